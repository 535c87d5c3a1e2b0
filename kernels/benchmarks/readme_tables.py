"""Fill the tables of kernels/README.md: predictions of time, and the host's time as it was measured.

    python kernels/benchmarks/readme_tables.py             fill them
    python kernels/benchmarks/readme_tables.py --check     write nothing; fail if a table is not what it should be

Each stands between two markers that name it; `make readme` fills them as well.
"""

import argparse
import re
import sys
from pathlib import Path

import instructions
import roofline
from result_files import RESULTS, read_csv, write_text

README = Path(__file__).parents[1] / "README.md"


def host_time_table() -> str:
    """Return what `host_time.py` has measured."""
    lines = []
    for path in sorted(RESULTS.glob("host-time-*.csv")):
        for row in read_csv(path):
            name = row["layer"] + (", centred" if row["center"] == "True" else "")
            times = (f"{float(row[column]):.0f}" for column in ("forward_us", "step_us"))
            over_linear = f"{float(row['over_linear']):.2f}"
            lines.append((row["hardware"], row["mode"], row["layers"], name, row["launches"], *times, over_linear))
    heads = ("host", "mode", "in a row", "layer", "launches", "forward, us", "forward + backward, us", "over nn.Linear")
    return roofline.markdown_table(heads, lines)


BLOCKS = {
    "host time": host_time_table,
    "formulas": roofline.formula_table,
    "kernel times": roofline.kernel_table,
    "layer times": roofline.layer_table,
    "instructions": instructions.kernel_table,
    "low bits": instructions.low_bit_table,
}


def filled(text: str) -> str:
    """Return a text with its tables made anew.

    Args:
        text: Holds `<!-- begin: NAME -->` and `<!-- end: NAME -->`, each on a line of its own, for every table.

    Raises:
        ValueError: If the markers of a table are missing.
    """
    for name, make in BLOCKS.items():
        pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"no block {name!r}: put <!-- begin: {name} --> and <!-- end: {name} --> on lines once")
        table = make()
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
    return text


def main(arguments: list[str] | None = None) -> int:
    """Fill the tables, or check them.

    Args:
        arguments: Command line, `sys.argv[1:]` by default.

    Returns:
        The exit status: 1 where a check finds a difference.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is not what it should be")
    options = parser.parse_args(arguments)
    text = README.read_text(encoding="utf-8")
    new = filled(text)
    if options.check and new != text:
        print(f"{README}: the tables are not what {Path(__file__).name} makes; run it", file=sys.stderr)
        return 1
    if not options.check:
        write_text(README, new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
