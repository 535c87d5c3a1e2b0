"""The most memory that a stretch of code held, as far as the machine can tell."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Context manager: CUDA's allocator where there is one, else the resident set of the whole process on Linux.

    The two are not comparable: the resident set holds the interpreter, the libraries and the pages that the C allocator
    has not given back from earlier work.

    Attributes:
        report: After the block: `bytes` (None where it can't be measured) and `what` they are.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure on `device`."""
        self._device = device
        self.report: dict[str, Any] = {"bytes": None, "what": "not measurable here"}

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return self
        self._resettable = _reset_resident_peak()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            self.report = {"bytes": peak, "what": "tensors, by the CUDA allocator"}
        elif self._resettable:
            self.report = {"bytes": _resident_peak(), "what": "resident set of the whole process"}


def _reset_resident_peak() -> bool:
    try:
        # 5 resets VmHWM, see proc(5)
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return False
    return _STATUS.exists()


def _resident_peak() -> int | None:
    found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
