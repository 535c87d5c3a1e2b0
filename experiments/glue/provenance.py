"""Where a number comes from: versions, commit, hardware and fingerprints of data and weights."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from torch import nn

import rmm_linear

from .settings import RunSettings, is_local_model

REPOSITORY = Path(__file__).resolve().parents[2]
_MODEL_SUFFIXES = (".json", ".txt", ".model", ".safetensors", ".bin")
_PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "evaluate",
    "accelerate",
    "tokenizers",
    "scikit-learn",
    "scipy",
    "numpy",
)


def versions() -> dict[str, str]:
    """Versions of Python, of this library and of what it ran on."""
    found = {"python": platform.python_version(), "rmm_linear": rmm_linear.__version__}
    return found | {package: metadata.version(package) for package in _PACKAGES}


def sources(settings: RunSettings) -> dict[str, str | None]:
    """What a run reads, told cheaply, before anything is loaded.

    Returns:
        SHA-256 of the data files and of the model's files, None for those that are not on this machine; and the
        version of this library.
    """
    found: dict[str, str | None] = {"data files": None, "model files": None, "rmm_linear": rmm_linear.__version__}
    if settings.data not in ("hub", "demo"):
        task = settings.task_description
        folder = Path(settings.data) / task.folder
        found["data files"] = _files_fingerprint([folder / "train.tsv", folder / task.dev_file])
    if is_local_model(settings.model):
        files = (path for path in Path(settings.model).iterdir() if path.suffix in _MODEL_SUFFIXES)
        found["model files"] = _files_fingerprint(sorted(files))
    return found


def _files_fingerprint(paths: Sequence[Path]) -> str | None:
    """SHA-256 over names and contents; None where a file is missing, which is told when it is to be read."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                digest.update(f"{path.name} {os.fstat(file.fileno()).st_size} ".encode())
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError:
            return None
    return digest.hexdigest()


def commit() -> dict[str, Any]:
    """The repository's commit, and whether tracked files differed from it; None where there is no repository.

    Configurations and results don't count: a result holds all its settings itself, and is there to be written.
    """
    try:
        head = _git("rev-parse", "HEAD")
        ignored = [f":!experiments/glue/{folder}" for folder in ("configs", "results")]
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *ignored)
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "modified": None}
    return {"commit": head, "modified": bool(changed)}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor, memory and accelerator, without anything that names the machine."""
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": _processor(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    # not every system knows these names
    except (AttributeError, ValueError, OSError):
        return None


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names and bytes of all parameters: equal if and only if two models are bitwise equal."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def data_fingerprint(splits: DatasetDict) -> str:
    """SHA-256 over all rows of the splits `train` and `validation`."""
    digest = hashlib.sha256()
    for split in ("train", "validation"):
        for column in splits[split].column_names:
            digest.update(f"{split}/{column}".encode())
            digest.update(repr(list(splits[split][column])).encode())
    return digest.hexdigest()
