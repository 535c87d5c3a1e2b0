"""Which of the aims on a GPU are kept, read off the tables that `layer.py` and `each_kernel.py` left in a folder.

    python kernels/benchmarks/aims.py [--results DIR]

Nothing is measured here. The aims are those of `roofline.py`, set for an H200 and bfloat16, and judged on whatever GPU
the tables are of. A line is MISSED if any figure that belongs to it is beyond what is asked, or of a kernel that raised
or was wrong; else "not measured" if any is lacking, because a stage was ended early or broke; else kept. Of several
figures, the worst is shown. Lines of `information` ask for nothing: they tell which of two ways was faster.

- Time over nn.Linear: the median of `time_ratio`, of the Hadamard sketch without low-bit storage.
- int8's part: the median with int8 storage less that of the same layer without.
- Sketches: a kernel's time over that of a copy of as many bytes.
- Kept bytes: what autograd keeps is what the formula says, to the byte.
- Transient: `transient_bytes` less nn.Linear's, over the bytes of rank (in + out) elements of the layer's dtype. It is
  all that is there at the peak of a pass beyond the output, or the gradients, the kept sketch included, and so no less
  than the largest single tensor among it. What is gone before the gradients are formed can hide behind their memory;
  `tests/kernels/test_transients.py` follows each tensor.
- Launches: a tiny step's time over nn.Linear's, launched the same way, of a layer by itself and of several in a row;
  as a CUDA graph or compiled, the lesser counts.

The table is printed, and written to `aims.csv` in the folder. The exit status is 0 if no aim is missed, 1 if one is,
2 if nothing was measured that could be judged.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path

import each_kernel
import layer
import roofline
import torch
from result_files import RESULTS, check_results_folder, read_csv, write_csv

DTYPE = torch.bfloat16
# Beginning of a file's name -> what its lines are, and who writes it.
TABLES = {
    "layer": (layer.Row, "layer.py"),
    "launches": (layer.LaunchRow, "layer.py"),
    "kernels": (each_kernel.Row, "each_kernel.py"),
}
KEPT, MISSED, UNMEASURED, INFORMATION = "kept", "MISSED", "not measured", "information"
_CENTRING = {False: "plain", True: "centred"}
# Of what went wrong, as much as fits into the table.
_SAID = 50
Lines = list[dict[str, str]]
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Row:
    """One line of the results file: an aim, and whether it is kept."""

    aim: str
    asked: str
    measured: str
    verdict: str
    commit: str
    hardware: str = ""


@dataclass(frozen=True)
class Figure:
    """What is judged, the less the better.

    Attributes:
        value: The figure; None if it was not measured.
        said: The same for people; of what was not measured, why, if that is known.
    """

    value: float | None
    said: str = ""


def read_tables(folder: Path) -> dict[str, Lines]:
    """Read what there is.

    Returns:
        The lines of each table; none of a table that is not there.

    Raises:
        ValueError: If a table lacks a column or is of plain torch, or the tables are of more than one machine.
    """
    name = str(DTYPE).removeprefix("torch.")
    tables: dict[str, Lines] = {}
    for kind, (row, script) in TABLES.items():
        tables[kind] = []
        for path in sorted(folder.glob(f"{kind}-*-{name}.csv")):
            lines = read_csv(path)
            lacking = {field.name for field in fields(row)}.difference(*lines[:1])
            if lacking:
                raise ValueError(f"{path} lacks {', '.join(sorted(lacking))}; write it again with this {script}")
            if any(line.get("kernels") == "torch" for line in lines):
                raise ValueError(f"{path} is of plain torch, whose times are no kernel's; write it again without that")
            tables[kind] += lines
    machines = sorted({line["hardware"] for lines in tables.values() for line in lines})
    if len(machines) > 1:
        raise ValueError(f"{folder} holds tables of {' and '.join(machines)}; keep those of one machine in a folder")
    return tables


def judged(tables: dict[str, Lines]) -> list[Row]:
    """Judge every aim.

    Args:
        tables: What `read_tables` returns.

    Returns:
        A line an aim, whether or not it was measured.
    """
    rows = (
        *_layer_lines(tables["layer"]),
        *_sketch_lines(tables["kernels"]),
        *_launch_lines(tables["launches"]),
        *_rival_lines(tables["kernels"]),
    )
    hardware = _origin([line for lines in tables.values() for line in lines], "hardware")
    return [replace(row, hardware=hardware) for row in rows]


def _origin(lines: Lines, column: str) -> str:
    """What a column of a table holds; of several values, all."""
    return ", ".join(sorted({line[column] for line in lines}))


def _line(lines: Lines, aim: str, asked: str, limit: float, figures: Sequence[Figure]) -> Row:
    """A line about figures none of which may be above the limit."""
    found = [(figure.value, figure.said) for figure in figures if figure.value is not None]
    # not a comparison with >: what is no number keeps no aim
    beyond = sum(not value <= limit for value, _ in found)
    lacking = len(figures) - len(found)
    verdict = MISSED if beyond else UNMEASURED if lacking else KEPT
    if not found:
        measured = next((figure.said for figure in figures if figure.said), "")
    else:
        _, measured = max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
        many = len(figures) > 1
        measured += f"; {beyond} of {len(figures)} beyond" if beyond and many else ""
        measured += f"; {lacking} of {len(figures)} not measured" if lacking else ""
    return Row(aim, asked, measured, verdict, _origin(lines, "commit"))


def _at_most(limit: float) -> str:
    return f"<= {limit:.4g}"


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


def _size(shape: Shape) -> str:
    rows, features, out = shape
    return f"{rows} x {features} -> {out}"


def _spread(line: dict[str, str]) -> str:
    middle, low, high = (float(line[name]) for name in ("time_ratio", "time_ratio_q20", "time_ratio_q80"))
    return f"{middle:.3f} ({low:.3f}/{high:.3f})"


def _layer_lines(lines: Lines) -> Iterator[Row]:
    """Time, what int8 adds to it, kept bytes and transient memory."""
    found = {
        (
            (int(line["rows"]), int(line["in_features"]), int(line["out_features"])),
            float(line["ratio"]),
            line["center"] == "True",
            line["storage"],
        ): line
        for line in lines
        if line["sketch"] == "hadamard"
    }
    for shape, goals in roofline.GOALS.items():
        for (ratio, goal), center in product(goals.items(), _CENTRING):
            line = found.get((shape, ratio, center, ""))
            figure = Figure(float(line["time_ratio"]), _spread(line)) if line else Figure(None)
            name = f"time over nn.Linear, {_size(shape)}, ratio {ratio:g}, {_CENTRING[center]}"
            yield _line(lines, name, _at_most(goal), goal, [figure])
    for shape, goals in roofline.GOALS.items():
        added = []
        for ratio, center in product(goals, _CENTRING):
            plain, rounded = (found.get((shape, ratio, center, storage)) for storage in ("", "int8"))
            if plain is None or rounded is None:
                added.append(Figure(None))
                continue
            # the table's digits: 0.93 - 0.9 is more than 0.03
            value = round(float(rounded["time_ratio"]) - float(plain["time_ratio"]), 4)
            added.append(Figure(value, f"{value:.3f} ({_CENTRING[center]}, ratio {ratio:g})"))
        limit = roofline.INT8_GOAL
        yield _line(lines, f"time that int8 adds, over nn.Linear's, {_size(shape)}", _at_most(limit), limit, added)
    most = roofline.TRANSIENT_GOAL
    for aim, asked, limit, measure in (
        ("kept bytes", "the formula's", 0, _bytes_off),
        ("transient over rank (in + out) elements", _at_most(most), most, _transient),
    ):
        for shape, goals in roofline.GOALS.items():
            figures = []
            for ratio, center, storage in product(goals, _CENTRING, ("", "int8")):
                line = found.get((shape, ratio, center, storage))
                which = f"({_CENTRING[center]}, ratio {ratio:g}{', ' if storage else ''}{storage})"
                figures.append(measure(line, which) if line else Figure(None))
            yield _line(lines, f"{aim}, {_size(shape)}", asked, limit, figures)


def _bytes_off(line: dict[str, str], which: str) -> Figure:
    difference = int(line["kept_bytes"]) - int(line["said_bytes"])
    return Figure(abs(difference), f"{difference:+d} bytes {which}" if difference else "not a byte off")


def _transient(line: dict[str, str], which: str) -> Figure:
    mine, linear = _number(line["transient_bytes"]), _number(line["linear_transient_bytes"])
    if mine is None or linear is None:
        # a processor's
        return Figure(None)
    elements = roofline.rank_of(int(line["rows"]), float(line["ratio"]))
    elements *= int(line["in_features"]) + int(line["out_features"])
    value = (mine - linear) / (elements * DTYPE.itemsize)
    return Figure(value, f"{value:.3f} {which}")


def _cases(op: str) -> dict[tuple[int, int], list[each_kernel.Case]]:
    """What `each_kernel.py` measures of an op, by the (rows, columns) of what is read."""
    found: dict[tuple[int, int], list[each_kernel.Case]] = {}
    for case in each_kernel.cases(tuple(roofline.GOALS), device=torch.device("cpu"), dtype=DTYPE):
        if case.op == op:
            found.setdefault((case.rows, case.features), []).append(case)
    return found


def _rows_of(lines: Lines, cases: Iterable[each_kernel.Case]) -> Iterator[tuple[str, dict[str, str] | None]]:
    found = {(line["name"], line["rows"], line["features"], line["out"]): line for line in lines}
    for case in cases:
        yield case.name, found.get((case.name, str(case.rows), str(case.features), str(case.out)))


def _sketch_lines(lines: Lines) -> Iterator[Row]:
    limit = 1 / roofline.SKETCH_COPY_SHARE
    for (rows, columns), cases in _cases("hadamard_sketch").items():
        if columns < roofline.SKETCH_FEATURES:
            continue
        figures = []
        for name, line in _rows_of(lines, cases):
            value = _number(line["kernel_over_copy"]) if line else None
            short = name.removeprefix("hadamard_sketch ")
            if line is not None and line["failed"] == "True":
                # however fast: it is wrong, or raised
                figures.append(Figure(math.inf, f"{line['note'][:_SAID]} ({short})"))
            elif line is None or value is None:
                figures.append(Figure(None, line["note"][:_SAID] if line else ""))
            else:
                figures.append(Figure(value, f"{value:.3f} ({short})"))
        yield _line(lines, f"hadamard_sketch over a copy, {rows} x {columns}", _at_most(limit), limit, figures)


def _launch_lines(lines: Lines) -> Iterator[Row]:
    found = {
        (line["mode"], int(line["layers"]), line["center"] == "True"): line
        for line in lines
        if line["sketch"] == "hadamard"
    }
    for (modes, limit), center in product(roofline.LAUNCH_GOALS.items(), _CENTRING):
        for layers in sorted({layers for mode in modes for layers in layer.LAUNCH_DEPTHS[mode]}):
            measured, said = [], []
            asked = [mode for mode in modes if layers in layer.LAUNCH_DEPTHS[mode]]
            for mode in asked:
                line = found.get((mode, layers, center))
                if line is not None and line["time_ratio"]:
                    measured.append(float(line["time_ratio"]))
                    said.append(f"{mode} {_spread(line)}")
                else:
                    said.append(f"{mode} {line['error'][:_SAID] if line else UNMEASURED}")
            figure = Figure(min(measured, default=None), ", ".join(said))
            name = f"a tiny step over nn.Linear's, {' or '.join(asked)}, {_CENTRING[center]}"
            name += f", {layers} in a row" if layers > 1 else ""
            yield _line(lines, name, _at_most(limit), limit, [figure])


def _rival_lines(lines: Lines) -> Iterator[Row]:
    low_bit = {
        key: [case for case in cases if case.function == "sketched_grad_weight_low_bit"]
        for key, cases in _cases("sketched_grad_weight").items()
    }
    # One word tells a case: the last of "... of x, ratio 0.5", the third of "sketched_grad_weight from int8, ...".
    for aim, groups, word in (
        ("hadamard_sketch over butterflies", _cases("hadamard_sketch"), -1),
        ("product from codes over dequantize + cuBLAS", low_bit, 2),
    ):
        for (rows, columns), cases in groups.items():
            ratios = [
                (name.replace(",", "").split()[word], float(line["kernel_over_rival"]))
                for name, line in _rows_of(lines, cases)
                if line and line["kernel_over_rival"] and line["failed"] != "True"
            ]
            values = [value for _, value in ratios]
            slower = [name for name, value in ratios if not value < 1]
            measured = f"{min(values):.2f} to {max(values):.2f}; " if values else UNMEASURED
            if slower:
                measured += f"the kernel is not faster at {', '.join(slower)}"
            elif ratios:
                measured += f"the kernel is faster in all {len(ratios)}"
            yield Row(f"{aim}, {rows} x {columns}", "", measured, INFORMATION, _origin(lines, "commit"))


def _print_rows(rows: Sequence[Row]) -> None:
    heads = ("aim", "what is asked", "measured, the worst", "verdict")
    table = [heads, *((row.aim, row.asked, row.measured, row.verdict) for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(3)]
    for cells in table:
        print("  ".join((*(cell.ljust(width) for cell, width in zip(cells[:3], widths, strict=True)), cells[3])))


def main(arguments: list[str] | None = None) -> int:
    """Judge the tables of one folder.

    Args:
        arguments: Command line, `sys.argv[1:]` by default.

    Returns:
        The exit status: 0 if no aim is missed, 1 if one is, 2 without anything to judge.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables of one GPU")
    options = parser.parse_args(arguments)
    folder = options.results
    how = "measure with make gpu, or name the folder of a GPU's tables with --results"
    if not folder.is_dir():
        print(f"aims.py: {folder} is no folder; {how}", file=sys.stderr)
        return 2
    try:
        tables = read_tables(folder)
    except ValueError as error:
        print(f"aims.py: {error}", file=sys.stderr)
        return 2
    rows = judged(tables)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in (KEPT, MISSED, UNMEASURED)}
    if not counts[KEPT] + counts[MISSED]:
        print(f"aims.py: in {folder} is no {DTYPE} figure of a GPU for any aim; {how}", file=sys.stderr)
        return 2
    check_results_folder(parser, folder)
    origins = [f"{kind} of commit {_origin(lines, 'commit')}" for kind, lines in tables.items() if lines]
    print(f"{rows[0].hardware}, {DTYPE}: {'; '.join(origins)}")
    _print_rows(rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    path = folder / "aims.csv"
    write_csv(path, [asdict(row) for row in rows])
    print(f"written to {path}")
    return 1 if counts[MISSED] else 0


if __name__ == "__main__":
    sys.exit(main())
