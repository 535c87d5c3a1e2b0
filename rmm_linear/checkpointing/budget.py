"""Budgets, as users write them."""

import re

_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BUDGET = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(%|[A-Za-z]*)\s*")


def budget_in_bytes(budget: int | str | None, plain_peak_bytes: int) -> int:
    """Read a budget.

    Args:
        budget: Bytes, or text: "8GiB", "500 MB", or "60%" of the plain program's peak.
        plain_peak_bytes: The plain program's peak.

    Returns:
        Bytes, at least 1.

    Raises:
        ValueError: If it is no budget.
    """
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    match = _BUDGET.fullmatch(budget) if isinstance(budget, str) else None
    if match and float(match[1]) > 0:
        if match[2] == "%":
            return max(1, int(plain_peak_bytes * float(match[1]) / 100))
        if match[2] in _UNITS:
            return max(1, int(float(match[1]) * _UNITS[match[2]]))
    raise ValueError(
        f'budget={budget!r} is no budget: pass a positive number of bytes, text such as "8GiB" or "500MB", or "60%" of'
        " what the step takes without a plan"
    )
