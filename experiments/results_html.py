"""The measurements of docs/ as one HTML file with its figures inside: `make report` writes build/results.html."""

import base64
import re
from pathlib import Path

import markdown

_ROOT = Path(__file__).parent.parent
_DOCS = _ROOT / "docs"
_PAGES = ("results", "noise", "codes", "budget", "gpu", "compare")
_STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-size: 14px; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ccc; padding: .2em .6em; text-align: left; min-width: 4em }
pre, code { background: #f4f4f4 }
pre { white-space: pre-wrap }
img { max-width: 100% }
"""


def page_of(names: tuple[str, ...]) -> str:
    """Join pages into one that needs no other file: figures are part of it, and links to other files are plain text."""

    def embedded(match: re.Match[str]) -> str:
        figure = base64.b64encode((_DOCS / match[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{figure}"'

    text = "\n\n".join((_DOCS / f"{name}.md").read_text("utf-8") for name in names)
    body = markdown.markdown(text, extensions=["tables", "fenced_code", "toc"])
    body = re.sub(r'src="([^":]+\.png)"', embedded, body)
    body = re.sub(r'<a href="(?!http|#)[^"]*">(.*?)</a>', r"\1", body)
    head = f'<meta charset="utf-8"><title>rmm_linear: results</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


if __name__ == "__main__":
    (_ROOT / "build").mkdir(exist_ok=True)
    (_ROOT / "build" / "results.html").write_text(page_of(_PAGES), "utf-8")
