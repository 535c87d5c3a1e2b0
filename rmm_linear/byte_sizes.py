"""Parse and format numbers of bytes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit in which sizes are shown, such as "MiB"."""

    name: str
    size_bytes: int

    def of(self, size_bytes: float) -> str:
        """Format a size without its unit, for a table whose heading names the unit."""
        return f"{size_bytes / self.size_bytes:.2f}"


# The units of sizes in options.
UNITS: Mapping[str, int] = MappingProxyType(
    {
        "": 1,
        "B": 1,
        **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
        **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
    }
)
_KIB, _MIB, _GIB, _TIB = (Unit(name, UNITS[name]) for name in ("KiB", "MiB", "GiB", "TiB"))
# A size stays in the smaller unit up to five digits before the point, so that the unit seldom changes between runs.
_MOST = 10_000


def unit_for(largest_bytes: float) -> Unit:
    """Choose one unit for a table: KiB below a MiB, or else MiB unless that makes long numbers."""
    if largest_bytes < _MIB.size_bytes:
        return _KIB
    fitting = (unit for unit in (_MIB, _GIB) if largest_bytes < _MOST * unit.size_bytes)
    return next(fitting, _TIB)


def readable(size_bytes: int) -> str:
    """Format a size with its unit: bytes below a KiB, KiB below a MiB, and so on.

    Examples:
        >>> readable(300), readable(20_388), readable(5 * 2**20), readable(3 * 2**40)
        ('300 bytes', '19.91 KiB', '5.00 MiB', '3072.00 GiB')
    """
    if size_bytes < _KIB.size_bytes:
        return f"{size_bytes} bytes"
    unit = unit_for(size_bytes)
    return f"{unit.of(size_bytes)} {unit.name}"
