"""Fill the tables of README.md and docs/ from the committed results: `python -m experiments.readme`, or `--check` them.

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`, where typed text is replaced.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import language_model
from experiments.blocks import filled, quantiles, table
from experiments.checkpointing import report as checkpointing
from experiments.glue import cached_norms, peers, sketch_noise
from experiments.glue.evidence import evidence_table, read_study
from experiments.memory.report import FILE, summary_table
from experiments.peers import peers_table
from experiments.rows import read_rows
from experiments.which_tool import gpu_table, which_table

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
RESULTS = DOCS / "results.md"
MEMORY = ROOT / "experiments/memory/results" / FILE
BENCHMARKS = ROOT / "kernels/benchmarks/results"


def layer_tables() -> str:
    """Return one table a results file: time over nn.Linear's by shape, sketch and ratio."""
    parts = []
    for path in sorted(BENCHMARKS.rglob("layer-*.csv")):
        rows = read_rows(path)
        ratios = sorted({row["ratio"] for row in rows}, reverse=True)
        cells: dict[tuple[str, str], dict[float, str]] = {}
        for row in rows:
            shape = f"{row['rows']} x {row['in_features']} -> {row['out_features']}"
            sketch = row["sketch"] + (", centered" if row["center"] else "")
            sketch += f", {row['storage']}" if row.get("storage") else ""
            cells.setdefault((shape, sketch), {})[row["ratio"]] = quantiles(row, "time_ratio")
        first = rows[0]
        header = ["rows x in -> out", "sketch", *(f"ratio {ratio:g}" for ratio in ratios)]
        times = table(header, [[*of, *(values.get(ratio, "") for ratio in ratios)] for of, values in cells.items()])
        parts.append(
            f"Forward + backward time over `nn.Linear`'s, median and 20-80 % quantiles of {first['repeats']} pairs;\n"
            f"{first['dtype']}, {first['hardware']}, torch {first['torch']}, commit {first['commit']}:\n\n{times}"
        )
    return "\n\n".join(parts)


def memory_table() -> str:
    rows = read_rows(MEMORY)
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    return f"Counted on a CPU, commit {commits}:\n\n{summary_table(rows)}"


def _of(make: Callable[..., str], *arguments: Any) -> Callable[[], str]:
    return functools.partial(make, checkpointing.RESULTS, *arguments)


def pages() -> dict[Path, Mapping[str, Callable[[], str]]]:
    return {
        README: {"which": _of(which_table, MEMORY, sketch_noise.FILE, BENCHMARKS), "gpu": _of(gpu_table)},
        RESULTS: {
            "memory": memory_table,
            "layer": layer_tables,
            "variance": sketch_noise.budgets_table,
            "sketches": sketch_noise.sketches_table,
            "study": lambda: evidence_table(read_study()),
            "checkpointing": _of(checkpointing.eager_table),
        },
        DOCS / "codes.md": {"codes": _of(checkpointing.codes_table, [checkpointing.CODES])},
        DOCS / "gpu.md": {"steps": _of(checkpointing.codes_table, [checkpointing.CODES_ON_GPU])},
        DOCS / "budget.md": {"bounds": _of(checkpointing.bounds_table), "growth": _of(checkpointing.growth_table)},
        DOCS / "compare.md": {"peers": peers_table, "fine-tuned peers": peers.peers_table},
        DOCS / "noise.md": {
            "language model": language_model.language_model_table,
            "cached norms": cached_norms.cached_norms_table,
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill or check the pages; the exit status is 1 if `--check` finds a table that is not the results'."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if something would change")
    check = parser.parse_args(arguments).check
    changed = 0
    for page, blocks in pages().items():
        text = page.read_text()
        new = filled(text, blocks)
        if not check:
            page.write_text(new)
        elif new != text:
            print(f"{page.name} differs from the committed results; run python -m experiments.readme", file=sys.stderr)
            changed = 1
    return changed


if __name__ == "__main__":
    sys.exit(main())
