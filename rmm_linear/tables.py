"""Tables of text."""

from collections.abc import Sequence


def aligned(table: Sequence[tuple[str, ...]], *, numbers: tuple[int, ...] = (), has_rule: bool = True) -> list[str]:
    """Return a table as one string a row: columns of `numbers` are flush right, and a rule follows the first row."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in [table[0], tuple("-" * width for width in widths), *table[1:]] if has_rule else table:
        cells = (
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines
