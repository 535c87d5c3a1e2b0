"""Parts of a page that are made from results: between `<!-- begin: NAME -->` and `<!-- end: NAME -->`."""

import re
from collections.abc import Callable, Mapping


def filled(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return a text with its blocks filled.

    Args:
        text: Markdown with markers.
        blocks: What makes each block.

    Returns:
        The same text with what the results say between the markers.

    Raises:
        ValueError: If a block has no markers.
    """
    for name, make in blocks.items():
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if not pattern.search(text):
            markers = f"<!-- begin: {name} --> and <!-- end: {name} -->"
            raise ValueError(f"the text has no block {name!r}; put {markers} in it")
        content = make()
        text = pattern.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", text)
    return text
