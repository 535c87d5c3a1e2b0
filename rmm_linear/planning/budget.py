"""Budgets, as users write them, and answers in the unit that they were written in."""

import math
import re
from dataclasses import dataclass
from numbers import Integral, Real

from rmm_linear.byte_sizes import UNITS, readable

_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(%|[A-Za-z]*)\s*")
# a float is a part of the plain program's peak
_SHARE = "of the whole"
# No step fits into so few bytes: such a number is meant in another unit.
_FEW_BYTES = 1000


@dataclass(frozen=True)
class Budget:
    """A budget in the user's own unit.

    Attributes:
        amount: How many of them, more than 0.
        unit: "GiB", "MB" and so on, "" for bytes, "%", or "of the whole".
    """

    amount: float
    unit: str

    @classmethod
    def of(cls, budget: float | str | None) -> "Budget":
        """Read a budget.

        It is bytes; text, as "8GiB", "500 MB", or "60%" of the plain program's peak; or 0.6, which is "60%".

        Raises:
            ValueError: If it is no budget.
        """
        if isinstance(budget, Integral):
            if not isinstance(budget, bool) and budget > 0:
                return cls(int(budget), "")
        elif isinstance(budget, Real) and 0 < budget <= 1:
            return cls(float(budget), _SHARE)
        match = _TEXT.fullmatch(budget) if isinstance(budget, str) else None
        if match and not match[2] and "." in match[1]:
            # no part of a byte: as the number would be
            return cls.of(float(match[1]))
        if match and float(match[1]) > 0 and (match[2] == "%" or match[2] in UNITS):
            return cls(float(match[1]), match[2])
        raise ValueError(
            f'budget={budget!r} is no budget: pass a positive number of bytes, text such as "8GiB" or "500MB", or "60%"'
            " (or 0.6) of what the captured step takes without a plan"
        )

    @property
    def is_relative(self) -> bool:
        """Whether it is a part of the plain program's peak."""
        return self.unit in ("%", _SHARE)

    def in_bytes(self, plain_peak_bytes: int) -> int:
        """Say how many bytes it is, at least 1."""
        if self.unit == "%":
            return max(1, int(plain_peak_bytes * self.amount / 100))
        return max(1, int(self.amount * (plain_peak_bytes if self.unit == _SHARE else UNITS[self.unit])))

    def that_holds(self, size_bytes: int, plain_peak_bytes: int) -> "Budget":
        """Write the budget that a size of at least a byte needs, in the same unit.

        It is the least one that has a decimal of a percent, or two of GiB and its like, and three digits.
        """
        if self.is_relative:
            steps = 10 if self.unit == "%" else 1000
            count = math.ceil(1000 * size_bytes / plain_peak_bytes)
        else:
            unit = UNITS[self.unit]
            steps = 10 ** max(2, 2 - math.floor(math.log10(size_bytes / unit))) if unit > 1 else 1
            count = math.ceil(steps * size_bytes / unit)
        # one more where a fraction was rounded down
        while Budget(count / steps, self.unit).in_bytes(plain_peak_bytes) < size_bytes:
            count += 1
        return Budget(count / steps, self.unit)

    def __str__(self) -> str:
        unit = {"%": "%", _SHARE: "", "": " bytes", "B": " bytes"}.get(self.unit, f" {self.unit}")
        # no exponents, which `of` does not read
        return f"{self.amount:.12f}".rstrip("0").rstrip(".") + unit


def refusal(budget: Budget, plain_peak_bytes: int, least_bytes: int, strategy: str) -> str:
    """Say in the user's unit that a budget can't be met.

    Sizes read "20% = 312.00 MiB" where the budget is a part of the whole, or else they are in its unit alone. For a
    budget of a few bytes, another unit is suggested.
    """
    least = budget.that_holds(least_bytes, plain_peak_bytes)
    asked, found, end = str(budget), str(least), ""
    if budget.is_relative:
        asked += f" = {readable(budget.in_bytes(plain_peak_bytes))}"
        found += f" = {readable(least_bytes)}"
        end = f", of the {readable(plain_peak_bytes)} that the captured step takes without a plan"
    elif UNITS[budget.unit] == 1 and budget.amount < _FEW_BYTES:
        meant = Budget(budget.amount, "%" if budget.amount <= 100 else "MB")
        end = f'; did you mean "{str(meant).replace(" ", "")}"?'
    return f"{strategy} found no schedule within {asked}; the least that was found takes {found}{end}"
