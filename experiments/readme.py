"""Fill the tables of README.md and docs/ from the committed results: `python -m experiments.readme`, or `--check` them.

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`; what is typed there by hand is replaced.
"""

import argparse
import csv
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.blocks import filled, table
from experiments.checkpointing.bounds import bounds_table
from experiments.checkpointing.codes import codes_table
from experiments.checkpointing.growth import growth_table
from experiments.checkpointing.report import blocks as checkpointing_blocks
from experiments.glue import allocated
from experiments.glue.evidence import evidence_table, read_study
from experiments.glue.sketch_noise import (
    ALL_ROWS,
    GRID_FILE,
    HEADLINE_BUDGETS,
    REAL_ROWS,
    TO_LONGEST,
    read_records,
)
from experiments.glue.variance_report import best_of, describe
from experiments.memory.report import FILE, read_rows, summary_table
from experiments.which_tool import which_table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results.md"
CODES = ROOT / "docs" / "codes.md"
BUDGET = ROOT / "docs" / "budget.md"
VARIANCE = ROOT / "experiments/glue/results/variance"
CHECKPOINTING = ROOT / "experiments/checkpointing/results"
MEMORY = ROOT / "experiments/memory/results" / FILE
BENCHMARKS = ROOT / "kernels/benchmarks/results"


def layer_tables() -> str:
    """Return one table a results file: time over nn.Linear's by shape, sketch and ratio."""
    parts = []
    for path in sorted(BENCHMARKS.rglob("layer-*.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        ratios = sorted({float(row["ratio"]) for row in rows}, reverse=True)
        cells: dict[tuple[str, str], dict[float, str]] = {}
        for row in rows:
            shape = f"{row['rows']} x {row['in_features']} -> {row['out_features']}"
            sketch = row["sketch"] + (", centered" if row["center"] == "True" else "")
            sketch += f", {row['storage']}" if row.get("storage") else ""
            spread = f"{float(row['time_ratio_q20']):.2f}-{float(row['time_ratio_q80']):.2f}"
            cells.setdefault((shape, sketch), {})[float(row["ratio"])] = f"{float(row['time_ratio']):.2f} ({spread})"
        first = rows[0]
        header = ["rows x in -> out", "sketch", *(f"ratio {ratio:g}" for ratio in ratios)]
        times = table(header, [[*of, *(values.get(ratio, "") for ratio in ratios)] for of, values in cells.items()])
        parts.append(
            f"Forward + backward time over `nn.Linear`'s, median and 20-80 % quantiles of {first['repeats']} pairs;\n"
            f"{first['dtype']}, {first['hardware']}, torch {first['torch']}, commit {first['commit']}:\n\n{times}"
        )
    return "\n\n".join(parts)


def study_table() -> str:
    """Return the differences to exact of the runs on real data."""
    return evidence_table(read_study())


def variance_table() -> str:
    """Return the relative variance that a few budgets of bytes buy on batches of MRPC."""
    records = [record for record in read_records(VARIANCE / GRID_FILE) if record["task"] == "mrpc"]
    first = records[0]
    step = max(record["step"] for record in records)
    together = [row for row in read_records(VARIANCE / allocated.FILE) if row["way"] == allocated.BEST_WAY]
    lines = []
    for budget in HEADLINE_BUDGETS:
        cells = [f"{100 * budget:g} %"]
        every = best_of(records, step, TO_LONGEST, ALL_ROWS, budget, papers=True)
        cells.append("" if every is None else f"{every['relative_variance']:.3g}")
        for rows in (ALL_ROWS, REAL_ROWS):
            best = best_of(records, step, TO_LONGEST, rows, budget)
            cells.append("" if best is None else f"{best['relative_variance']:.2g} ({describe(best)})")
        cells += [
            f"{row['measured']:.2g} ({row['configs']})"
            for row in together
            if (row["padding"], row["rows"], row["budget"]) == (TO_LONGEST, REAL_ROWS, budget)
        ]
        lines.append(cells)
    real = next(record for record in records if (record["padding"], record["rows"]) == (TO_LONGEST, REAL_ROWS))
    share = 100 * real["sketched_rows"] / real["batch_rows"]
    head = (
        f"MRPC, 32 sequences padded to 128 tokens ({share:.0f} % of the rows real), {first['model']} after {step}"
        f" steps, mean of {first['layers']} layers, closed forms, commit {first['commit']}; the last column is"
        f" measured, commit {together[0]['commit']}:"
    )
    header = ["bytes", "the paper's gaussian", "best here", "padding left out", "and the first token kept, one a layer"]
    return f"{head}\n\n{table(header, lines)}"


def memory_table() -> str:
    """Return what each method keeps of seven models' bytes."""
    rows = read_rows(MEMORY)
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    return f"Counted on a CPU, commit {commits}:\n\n{summary_table(rows)}"


def checkpointing_table() -> str:
    """Return plans beside torch's own checkpointing."""
    return checkpointing_blocks(CHECKPOINTING)["baselines"]()


BLOCKS: dict[str, Callable[[], str]] = {
    "memory": memory_table,
    "layer": layer_tables,
    "variance": variance_table,
    "study": study_table,
    "checkpointing": checkpointing_table,
}


def pages() -> dict[Path, Mapping[str, Callable[[], str]]]:
    """Return the blocks of each page."""
    which = functools.partial(which_table, CHECKPOINTING, MEMORY, VARIANCE / GRID_FILE, BENCHMARKS)
    codes = functools.partial(codes_table, CHECKPOINTING)
    bounds = functools.partial(bounds_table, CHECKPOINTING)
    growth = functools.partial(growth_table, CHECKPOINTING)
    budget = {"bounds": bounds, "growth": growth}
    return {README: {"which": which}, RESULTS: BLOCKS, CODES: {"codes": codes}, BUDGET: budget}


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
            print(f"{page.name} does not say what the results say; run python -m experiments.readme", file=sys.stderr)
            changed = 1
    return changed


if __name__ == "__main__":
    sys.exit(main())
