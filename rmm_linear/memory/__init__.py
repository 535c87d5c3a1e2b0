"""Measure the bytes that a model keeps for its backward pass, and the bytes that sketches save."""

from rmm_linear.memory.kept import SavedTensors, measure_kept_bytes
from rmm_linear.memory.recorder import profile
from rmm_linear.memory.report import Keeper, KeptStorage, LinearCall, MemoryReport
from rmm_linear.memory.saving import MeasuredSaving

__all__ = [
    "Keeper",
    "KeptStorage",
    "LinearCall",
    "MeasuredSaving",
    "MemoryReport",
    "SavedTensors",
    "measure_kept_bytes",
    "profile",
]
