"""Tables, and parts of a page that are made from results: between `<!-- begin: NAME -->` and `<!-- end: NAME -->`."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def percent(fraction: float | None, sign: str = "") -> str:
    """Return a fraction in percent: "-" for None, and no digit after the point from 100 % on."""
    if fraction is None:
        return "-"
    value = 100 * fraction
    digits = 0 if abs(value) >= 99.95 else 1
    # adding zero turns a rounded -0.0 into 0.0
    return f"{round(value, digits) + 0.0:{sign}.{digits}f} %"


def quantiles(row: Mapping[str, Any], column: str) -> str:
    return f"{row[column]:.2f} ({row[f'{column}_q20']:.2f}-{row[f'{column}_q80']:.2f})"


def filled(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return a text with each block's new content between its markers.

    Raises:
        ValueError: If a block has no markers.
    """
    for name, make in blocks.items():
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        found = pattern.search(text)
        if found is None:
            markers = f"<!-- begin: {name} --> and <!-- end: {name} -->"
            raise ValueError(f"the text has no block {name!r}; put {markers} in it")
        text = f"{text[: found.end(1)]}{make()}\n{text[found.start(2) :]}"
    return text
