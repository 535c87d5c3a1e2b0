"""Larger and smaller sizes, where a compiler may know them as symbols alone.

`max` of a symbol would fix it by a guard, and the compiler of torch 2.11 cannot trace `torch.sym_max` of plain numbers.
"""

import torch


def larger(a: int, b: int) -> int:
    """Return the larger of two sizes."""
    # to a compiler, a symbol is an int: `max` becomes torch.sym_max then by itself
    return torch.sym_max(a, b) if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt) else max(a, b)


def smaller(a: int, b: int) -> int:
    """Return the smaller of two sizes."""
    return torch.sym_min(a, b) if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt) else min(a, b)
