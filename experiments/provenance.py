"""Where a number comes from: versions, commit and hardware."""

import functools
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import rmm_linear

REPOSITORY = Path(__file__).resolve().parents[1]
_PACKAGES = (
    *("torch", "transformers", "datasets", "evaluate", "accelerate"),
    *("tokenizers", "scikit-learn", "scipy", "numpy"),
)


def versions() -> dict[str, str]:
    """Versions of Python, of this library and of its dependencies."""
    found = {"python": platform.python_version(), "rmm_linear": rmm_linear.__version__}
    return found | {package: metadata.version(package) for package in _PACKAGES}


def commit() -> dict[str, Any]:
    """The repository's commit, and whether tracked files differed from it; None where there is no repository.

    Configurations and results don't count: a result holds all its settings itself, and is there to be written.
    """
    ignored = [f":!experiments/{folder}" for folder in ("glue/configs", "results", "*/results")]
    status = ["status", "--porcelain", "--untracked-files=no", "--", ".", *ignored]
    git = functools.partial(subprocess.run, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    try:
        head, changed = (git(["git", *command]).stdout.strip() for command in (["rev-parse", "HEAD"], status))
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "modified": None}
    return {"commit": head, "modified": bool(changed)}


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor and accelerator, without anything that names the machine."""
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": _processor(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return platform.processor() or platform.machine()
    return found[1].strip() if found else platform.machine()


@functools.cache
def commit_name() -> str:
    """The commit in seven digits, with a + where tracked files differed from it when the process first asked."""
    found = commit()
    return (found["commit"] or "none")[:7] + ("+" if found["modified"] else "")


def origin(device: str = "cpu") -> dict[str, Any]:
    """The last columns of a results file's row: library, commit, torch, transformers and hardware."""
    found = hardware(torch.device(device))
    return {
        "rmm_linear": rmm_linear.__version__,
        "commit": commit_name(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "hardware": found["gpu"] or f"{found['cpu']}, {found['torch_threads']} of {found['cpu_cores']} cores",
    }
