"""The most memory that a stretch of code held, as far as the machine can tell."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield what is after the block its peak: `bytes`, None where they can't be measured, and `what` they are.

    Of CUDA's allocator, or of the resident set of the whole process on Linux. The two are not comparable: the resident
    set holds the interpreter, the libraries and the pages that the C allocator has not given back from earlier work.
    """
    report: dict[str, Any] = {"bytes": None, "what": "not measurable here"}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield report
        report.update(bytes=torch.cuda.max_memory_allocated(device), what="tensors, by the CUDA allocator")
        return
    try:
        # 5 resets VmHWM, see proc(5)
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        yield report
        return
    yield report
    if found := re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE):
        report.update(bytes=int(found[1]) * 1024, what="resident set of the whole process")
