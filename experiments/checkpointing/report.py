"""Tables and figure of this folder's results: `python -m experiments.checkpointing.report`.

Everything is computed from `results/*.csv`, but for the peaks that Kusumoto et al. published, which stand beside ours.
"""

import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.blocks import filled, percent, table
from experiments.command_line import report_command
from experiments.rows import grouped, read_rows, replace_file

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent / "README.md"
EAGER, BLOCKS, COMPILED, BUDGET = "eager", "torch checkpoint", "torch.compile", "torch budget"
EXACT, INDUCTOR = "planned, exact", "planned, inductor"
# settings of budgets that lie evenly between the plain peak and the least
SPREAD = "spread"
Row = dict[str, Any]
Rows = Sequence[Row]
_GB = 1e9
_BUDGETS = (80, 60, 40, 20)
# planners that ran on a few models alone; a table of their own shows them
_SOLVERS = ("jain2020", "kirisame2021", "moccasin2023", "patil2022", "steiner2022", "zhang2023")
# Steps of a process whose eager step takes this many times the fastest one were not timed alone.
_STEADY = 1.15
# steps with codes, on a GPU and on a CPU
CODES_ON_GPU, CODES = "codes-cuda.csv", "codes.csv"
# of the plain step: a forward pass is about a third of it
_ONE_FORWARD = 1 / 3
# of a figure: DTR computes some ops many times near the least peak
_MOST_EXTRA = 40
# an unrolled loop has more ops, so that the table names its planning times apart
_MANY_OPS = 10_000
# peak memory in GB: Kusumoto et al. 2019, table 1: none, Chen's algorithm, theirs; with liveness analysis
_PUBLISHED = {
    "resnet-50": (8.9, 3.7, 3.4),
    "resnet-152": (9.2, 2.4, 2.3),
    "vgg-19": (7.0, 4.7, 4.5),
    "densenet-161": (8.5, 1.8, 1.6),
    "googlenet": (8.5, 6.5, 5.2),
    "u-net": (9.1, 7.4, 5.0),
}


def _cheapest(rows: Rows, peak_bytes: float) -> float | None:
    return min((row["extra_cost"] for row in rows if row["peak_bytes"] <= peak_bytes), default=None)


def _least(rows: Rows, extra_cost: float) -> Row | None:
    """The row of the least peak for a price."""
    fitting = [row for row in rows if row["extra_cost"] <= extra_cost]
    return min(fitting, key=lambda row: (row["peak_bytes"], row["extra_cost"]), default=None)


def _percents(rows: Rows) -> list[int]:
    return sorted({row["budget_percent"] for row in rows}, reverse=True)


def strategies_table(folder: Path) -> str:
    """Return each strategy's least peak whose extra time is at most a third, "-" where it refuses: a line a model."""
    every = [row for row in read_rows(folder / "frontiers.csv") if not row["strategy"].startswith(_SOLVERS)]
    names, lines = list(grouped(every, "strategy")), []
    for model, rows in grouped(every, "model").items():
        found = [_least([row for row in rows if row["strategy"] == name], _ONE_FORWARD) for name in names]
        shares = ((row, percent(row["peak_bytes"] / row["plain_peak_bytes"] if row else None)) for row in found)
        lines.append([model, *(f"{of} for {percent(row['extra_cost'], '+')}" if row else "-" for row, of in shares)])
    for label, rows in (
        (f"planning, s (longest of up to {_MANY_OPS} ops)", [row for row in every if row["ops"] <= _MANY_OPS]),
        ("planning, s (longest of more)", [row for row in every if row["ops"] > _MANY_OPS]),
    ):
        seconds = [max((row["planning_s"] for row in rows if row["strategy"] == name), default=None) for name in names]
        lines.append([label, *("-" if longest is None else f"{longest:.1f}" for longest in seconds)])
    return table(["model", *names], lines)


def solvers_table(folder: Path) -> str:
    """Return the time at each budget by each solver and online policy, and by the best of the others: a line each."""
    lines = []
    for model, rows in grouped(read_rows(folder / "frontiers.csv"), "model").items():
        for row in rows:
            row["group"] = row["strategy"] if row["strategy"].startswith(_SOLVERS) else "best of the others"
        groups = grouped(rows, "group")
        plain = rows[0]["plain_peak_bytes"]
        for name, own in groups.items() if len(groups) > 1 else ():
            seconds = sum({row["strategy"]: row["planning_s"] for row in own}.values())
            least = percent(min(row["peak_bytes"] for row in own) / plain)
            times = [percent(_cheapest(own, plain * each / 100), "+") for each in _BUDGETS]
            lines.append([model, str(rows[0]["ops"]), name, *times, least, f"{seconds:.1f}"])
    head = ["model", "ops", "strategy", *(f"time at {each} %" for each in _BUDGETS), "least peak"]
    return table([*head, "planning all budgets, s"], lines)


def planners_block(folder: Path) -> str:
    """Return the figure of plans that ran, a table with a line a model and strategy, and how many ran as planned."""
    every, lines = read_rows(folder / "planners.csv"), []
    ran = [row for row in every if row["extra_cost"] is not None]
    percents = _percents(every)
    for (model, name), rows in grouped(every, "model", "strategy").items():
        cells = {
            row["budget_percent"]: f"{percent(row['extra_cost'], '+')}, {row['planning_s']:.1f} s"
            for row in rows
            if row in ran
        }
        proofs = [row["proof"] for row in rows if row["proof"]]
        lines.append([model, name, *(cells.get(each, "-") for each in percents), proofs[-1] if proofs else ""])
    head = ["model", "strategy", *(f"at {each} %: time, planning" for each in percents)]
    to_the_byte = sum(row["peak_bytes"] == row["simulated_peak_bytes"] for row in ran)
    same = sum(row["same_gradients"] for row in ran)
    claim = (
        f"Each plan ran, op by op: the measured peak, workspaces of kernels included, is the simulated one to the byte"
        f" in {to_the_byte} of {len(ran)} plans; all gradients are eager mode's bit for bit in {same}. A strategy has"
        ' "-" at the largest budget that it refused and at smaller budgets; kusumoto2019_exact takes only graphs with'
        " few lower sets. The proof is of the least budget that has one. The figure leaves out plans that cost more"
        f" than {_MOST_EXTRA} %."
    )
    return "\n\n".join(["![extra time against peak](results/planners.png)", table([*head, "proof"], lines), claim])


def draw_planners(rows: Rows, path: Path) -> None:
    """Draw a panel a model: the extra time of each strategy's plans against their measured peaks."""
    models, names = grouped([row for row in rows if row["extra_cost"] is not None], "model"), grouped(rows, "strategy")
    figure = Figure(figsize=(4.4 * len(models) + 2.2, 4.2), layout="constrained")
    grid = figure.subplots(1, len(models), squeeze=False, sharey=True)
    colours, markers = colormaps["tab20"], "osPX^vD*"
    for axes, (model, own) in zip(grid.flat, models.items(), strict=True):
        for number, name in enumerate(names):
            of = sorted((row for row in own if row["strategy"] == name), key=lambda row: row["peak_bytes"])
            xs = [100 * row["peak_bytes"] / row["plain_peak_bytes"] for row in of]
            style = {"color": colours(number), "marker": markers[number % len(markers)], "markersize": 5}
            # the first strategy, `auto`, lies above the others: Moccasin's plans are often the same
            lies_above = 2 + 1 / (1 + number)
            ys = [100 * row["extra_cost"] for row in of]
            axes.plot(xs, ys, label=name, linewidth=1, alpha=0.8, zorder=lies_above, **style)
        axes.set_title(f"{model}, {own[0]['ops']} ops", fontsize=10)
        axes.set_ylim(0, _MOST_EXTRA)
        axes.grid(alpha=0.25)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    figure.supxlabel("measured peak, % of the plain step's", fontsize=10)
    figure.supylabel("extra time by roofline, %", fontsize=10)
    figure.savefig(path, dpi=130, format="png")


def published_table(folder: Path) -> str:
    """Return the peaks that Kusumoto et al. published beside ours, parameters included, gradients kept."""
    frontiers, lines = grouped(read_rows(folder / "frontiers.csv"), "model"), []
    for model, (none, chen, kusumoto) in _PUBLISHED.items():
        rows = frontiers[model]
        parameters = rows[0]["parameter_bytes"]
        total = rows[0]["plain_peak_bytes"] + parameters
        cells = [model, f"{none} GB", *(percent(peak / none) for peak in (chen, kusumoto)), f"{total / _GB:.2f} GB"]
        for wanted in ("chen", "kusumoto", ""):
            row = _least([row for row in rows if wanted in row["strategy"]], _ONE_FORWARD)
            cells.append(percent((row["peak_bytes"] + parameters) / total if row else None))
        lines.append(cells)
    head = ["model", "paper: none", "Chen", "Kusumoto", "here: none", "Chen", "Kusumoto", "best of all"]
    return table(head, lines)


def bounds_table(folder: Path) -> str:
    """Return the extra compute of auto's plans, and the bound of any plan."""

    def cell(row: Row) -> str:
        return " / ".join("-" if each is None else f"{100 * each:.1f}" for each in (row["extra_cost"], row["bound"]))

    every = read_rows(folder / "bounds.csv")
    lines = [[model, *map(cell, rows)] for model, rows in grouped(every, "model").items()]
    return table(["model", *(f"{each} %" for each in _percents(every))], lines)


def growth_table(folder: Path) -> str:
    """Return the seconds of planning, and the plan's extra compute, of small and large graphs."""

    def cell(row: Row) -> str:
        extra = "no plan found" if row["extra_cost"] is None else f"{100 * row['extra_cost']:.1f} %"
        return f"{row['seconds']:.1f} s ({extra})"

    every = read_rows(folder / "growth.csv")
    lines = [[model, f"{ops:,}", *map(cell, rows)] for (model, ops), rows in grouped(every, "model", "ops").items()]
    return table(["graph", "ops", *(f"budget {each} %" for each in _percents(every))], lines)


def energy_table(folder: Path) -> str:
    """Return time and energy over the plain step's, within parts of its peak: a line a model, device and way."""

    def cell(row: Row) -> str:
        return "-" if row["time"] is None else f"{row['time']:.3f}, {row['energy']:.3f}"

    every, columns = read_rows(folder / "energy.csv"), ("model", "device", "way")
    lines = [[*names, *map(cell, rows)] for names, rows in grouped(every, *columns).items()]
    return table([*columns, *(f"at {each} %: time, energy" for each in _percents(every))], lines)


def arenas_table(folder: Path) -> str:
    """Return the least arenas of the online policies, and the arena of best-fit addresses: a line a model."""
    columns = [(policy, key) for policy in ("DTR", "Coop") for key in ("least_arena", "free_at_failure")]
    labels = {"least_arena": "least arena", "free_at_failure": "free where it fails"}
    lines = []
    for model, rows in grouped(read_rows(folder / "arenas.csv"), "model").items():
        of = {row["policy"]: row for row in rows}
        cells = [percent(of[policy][key]) if policy in of else "" for policy, key in columns]
        lines.append([model, *cells, percent(of["OLLA"]["least_arena"]) if "OLLA" in of else ""])
    return table(["model", *(f"{policy}: {labels[key]}" for policy, key in columns), "OLLA's addresses"], lines)


def _family(row: Row) -> str:
    setting = row["setting"] or ""
    kind = next((each for each in (BLOCKS, BUDGET) if setting.startswith(each)), None)
    return row["method"] if kind is None else f"{row['method']}, {kind}"


_EAGER_BLOCKS, _COMPILED_BLOCKS = (f"{each}, {BLOCKS}" for each in (EAGER, COMPILED))
_COMPILED_BUDGET = f"{COMPILED}, {BUDGET}"


def _of(rows: Rows, family: str) -> list[Row]:
    return [row for row in rows if _family(row) == family and (row["peak_bytes"] or row["tensors_peak_bytes"])]


def eager_table(folder: Path) -> str:
    """Return, for the tools that torch has, the extra FLOPs of a plan of the same peak."""
    lines = []
    for model, rows in grouped(read_rows(folder / "eager.csv"), "model").items():
        eager, plans = _of(rows, EAGER)[0]["tensors_peak_bytes"], _of(rows, EXACT)
        cells = [model]
        for family in (_EAGER_BLOCKS, _COMPILED_BUDGET):
            best = min(_of(rows, family), key=lambda row: row["tensors_peak_bytes"], default=None)
            if best is None:
                cells += ["-", "-", "-"]
                continue
            peak = best["tensors_peak_bytes"]
            knob = f" ({best['setting'].removeprefix(BUDGET).strip()})" if family == _COMPILED_BUDGET else ""
            fitting = [row["extra_flops"] for row in plans if row["tensors_peak_bytes"] <= peak]
            cells += [f"{percent(peak / eager)}{knob}", percent(best["extra_flops"], "+")]
            cells.append(percent(min(fitting, default=None), "+"))
        lines.append([*cells, percent(min(row["tensors_peak_bytes"] for row in plans) / eager)])
    head = ["model"]
    for family in (BLOCKS, BUDGET):
        head += [f"{family}: least peak", "FLOPs", "a plan of that peak: FLOPs"]
    return table([*head, "least planned peak"], lines)


def _claims(rows: Rows) -> str:
    """Say how many plans kept their budgets and bits."""
    spread = [row for row in rows if row["method"] == INDUCTOR and row["setting"].startswith(SPREAD)]
    within = sum(row["peak_bytes"] is not None and row["peak_bytes"] <= row["budget_bytes"] for row in spread)
    models, monotone = grouped(spread, "model"), 0
    for own in models.values():
        peaks = [row["peak_bytes"] for row in sorted(own, key=lambda row: row["budget_bytes"])]
        monotone += None not in peaks and peaks == sorted(peaks)
    others = [row for row in _of(rows, INDUCTOR) if row not in spread]
    kept = sum(row["peak_bytes"] <= row["budget_bytes"] for row in others)
    exact = _of(rows, EXACT)
    to_the_byte = sum(row["peak_bytes"] == row["simulated_peak_bytes"] for row in exact)
    same = sum(row["same_gradients"] for row in exact)
    return (
        f'`executor="inductor"`: the measured peak is at most the budget in {within} of {len(spread)} evenly spread'
        f" budgets and in {kept} of {len(others)} other budgets. With the spread budgets the peak grows on"
        f' {monotone} of {len(models)} models. `executor="exact"`: the measured peak is the simulated peak to the byte'
        f" in {to_the_byte} of {len(exact)} plans, and all gradients are the bits of eager mode in {same} plans."
    )


def _share(row: Row, eager: Row) -> str:
    return f"{percent(row['peak_bytes'] / eager['peak_bytes'])}, {row['step_s'] / eager['step_s']:.2f}"


def _ratios(rows: Rows, rivals: Rows) -> Iterator[float]:
    """The time of the plan of the largest budget within a rival's peak, over the rival's."""
    for rival in rivals:
        fitting = [row for row in _of(rows, INDUCTOR) if row["budget_bytes"] <= rival["peak_bytes"]]
        if fitting:
            yield max(fitting, key=lambda row: row["budget_bytes"])["step_s"] / rival["step_s"]


def _compiled_table(rows: Rows) -> str:
    """Return plans beside torch.compile's own ways, a line a model."""
    lines = []
    for model, own in grouped(rows, "model").items():
        (eager,), (unlimited,) = _of(own, EAGER), _of(own, COMPILED)
        cells = [f"{model}, {eager['batch']} x {eager['size']}", f"{eager['step_s']:.2f}"]
        cells += [_share(row, eager) for each in (_EAGER_BLOCKS, COMPILED, _COMPILED_BLOCKS) for row in _of(own, each)]
        plain = next(row for row in _of(own, INDUCTOR) if row["setting"] == "100 %")
        peak = percent(plain["peak_bytes"] / eager["peak_bytes"])
        cells.append(f"{peak}, {plain['step_s'] / unlimited['step_s']:.2f}")
        cells += [f"{ratio:.2f}" for ratio in _ratios(own, _of(own, _COMPILED_BLOCKS))] or ["-"]
        budgets = _of(own, _COMPILED_BUDGET)
        ratios = list(_ratios(own, budgets))
        cells.append(percent(min(row["peak_bytes"] for row in budgets) / eager["peak_bytes"]))
        cells.append(f"{statistics.median(ratios):.2f} ({max(ratios):.2f}), {len(ratios)}" if ratios else "-")
        lines.append([*cells, _share(min(_of(own, INDUCTOR), key=lambda row: row["peak_bytes"]), eager)])
    head = ["model", "eager, s", f"eager, {BLOCKS}", COMPILED, _COMPILED_BLOCKS]
    head += [f"plan of 100 %: peak, time over {COMPILED}'s", f"plan at the peak of {COMPILED}, {BLOCKS}: time over its"]
    head += [f"{BUDGET}: least peak", "plans at its peaks: time over its, median (worst), how many"]
    return table([*head, "least plan"], lines)


def read_compiled(folder: Path) -> list[Row]:
    return [row | {"setting": row["setting"] or ""} for row in read_rows(folder / "compiled.csv")]


def compiled_block(folder: Path) -> str:
    rows = read_compiled(folder)
    return "\n\n".join(["![time against peak](results/compiled.png)", _compiled_table(rows), _claims(rows)])


# colours of Okabe and Ito; the marks say the same again
_FAMILIES = {
    EAGER: ("black", "s"),
    _EAGER_BLOCKS: ("black", "P"),
    COMPILED: ("#E69F00", "s"),
    _COMPILED_BLOCKS: ("#E69F00", "P"),
    _COMPILED_BUDGET: ("#D55E00", "X"),
    EXACT: ("#56B4E9", "o"),
    INDUCTOR: ("#0072B2", "o"),
}


def draw_compiled(rows: Rows, path: Path) -> None:
    """Draw a panel a model: the step's time against its peak, both of eager mode's."""
    models = grouped(rows, "model")
    # the legend takes a panel of its own
    columns = min(4, len(models) + 1)
    lines = (len(models) + columns) // columns
    figure = Figure(figsize=(4.2 * columns, 3.4 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, own in zip(panels, models.values(), strict=False):
        (eager,) = _of(own, EAGER)
        for family, (colour, marker) in _FAMILIES.items():
            of_family = sorted(_of(own, family), key=lambda row: row["peak_bytes"])
            xs = [100 * row["peak_bytes"] / eager["peak_bytes"] for row in of_family]
            ys = [row["step_s"] / eager["step_s"] for row in of_family]
            markersize = 5 if family in (EXACT, INDUCTOR) else 10
            axes.plot(xs, ys, color=colour, marker=marker, markersize=markersize, markeredgecolor="white", alpha=0.9)
        axes.set_title(f"{eager['model']}, {eager['batch']} x {eager['size']}", fontsize=10)
        axes.grid(alpha=0.25)
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=c, marker=m, linestyle="-", label=name) for name, (c, m) in _FAMILIES.items()]
    panels[len(models)].legend(handles=handles, loc="center", frameon=False, labelspacing=0.8)
    figure.supxlabel("measured peak, % of the eager step's (parameters and batch left out)")
    figure.supylabel("time of a step, of the eager step's")
    figure.savefig(path, dpi=130, format="png")


def codes_table(folder: Path, names: Sequence[str] = (CODES_ON_GPU, CODES)) -> str:
    """Return a table a model and machine of steps with codes, and the noise that codes add on a CPU."""
    parts = []
    every = [row for name in names if (folder / name).exists() for row in read_rows(folder / name)]
    for rows in grouped(every, "model", "hardware", "batch", "size", "config").values():
        first, lines = rows[0], []
        is_gpu = all(row.get("kernels_s") is not None for row in rows if row["peak_bytes"] is not None)
        steady = _STEADY * min(row["eager_step_s"] for row in rows if row["eager_step_s"])
        for row in rows:
            if row["peak_bytes"] is None:
                lines.append([row["method"], "no plan", *[""] * (3 + is_gpu)])
                continue
            saved = row["saved_bytes"] and f"{100 * row['saved_bytes'] / first['saved_bytes']:.0f} %"
            peak = f"{100 * row['activation_peak_bytes'] / first['activation_peak_bytes']:.0f} %"
            error = f"{row['error']:.1e} ({row['mean_error']:.1e} of {row['draws']})"
            times = [f"{row['step_s'] / row['eager_step_s']:.2f}" if row["eager_step_s"] <= steady else "-"]
            times += [f"{row['kernels_s'] / row['eager_kernels_s']:.2f}"] if is_gpu else []
            lines.append([row["method"], *times, saved or "", peak, error])
        head = ["way", "step time", *["in kernels"] * is_gpu]
        head += ["saved for the backward pass", "activation peak", "error of one draw (mean of n)"]
        layers, width = size_of(first)
        parts.append(
            f"{first['model']}, {layers} layers of {width}, batch {first['batch']} x {first['size']},\n"
            f"{first['precision']}: {first['hardware']}, torch {first['torch']}\n\n{table(head, lines)}"
        )
    if CODES in names and (noise := folder / "codes_noise.csv").exists():
        noises = []
        for row in read_rows(noise):
            share = f"{100 * row['share']:.3f} ± {100 * row['share_error']:.3f} %"
            noises.append([row["way"], share, f"{row['relative_variance']:.1e}"])
        text = (
            "MiniLM on MRPC, 12 batches of 32: the share is the variance that codes add over the minibatches'\n"
            "variance, ± the share's standard error."
        )
        parts.append(f"{text}\n\n{table(['way', 'share', 'relative variance'], noises)}")
    return "\n\n".join(parts)


def size_of(row: Row) -> tuple[int, int]:
    """Return the number of layers of a row's Transformer, and their width."""
    config = json.loads(row["config"])
    names = ("num_hidden_layers", "n_layer", "num_layers"), ("hidden_size", "n_embd", "d_model")
    layers, width = (next(config[name] for name in of if name in config) for of in names)
    return layers, width


def origins(folder: Path) -> str:
    """Say which commits, versions and hardware the rows of this README.md are of."""
    lines = []
    for name in ("frontiers.csv", "planners.csv", "eager.csv", "compiled.csv", "arenas.csv", "energy.csv"):
        origins = grouped(read_rows(folder / name), "rmm_linear", "commit", "torch", "hardware")
        lines += [
            f"- `{name}`, {', '.join(grouped(rows, 'model'))}: rmm_linear {version} (commit {commit}), torch {torch},"
            f" {hardware}."
            for (version, commit, torch, hardware), rows in origins.items()
        ]
    return "\n".join(lines)


# block of this experiment's page -> the results file that it needs, and the function that makes it
MAKERS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "strategies": ("frontiers", strategies_table),
    "solvers": ("frontiers", solvers_table),
    "planners": ("planners", planners_block),
    "published": ("frontiers", published_table),
    "arenas": ("arenas", arenas_table),
    "energy": ("energy", energy_table),
    "baselines": ("eager", eager_table),
    "compiled": ("compiled", compiled_block),
}
# tables of other pages
_OTHERS_TABLES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "bounds": ("bounds", bounds_table),
    "growth": ("growth", growth_table),
    "codes": ("codes*", codes_table),
}


def blocks(folder: Path) -> dict[str, Callable[[], str]]:
    makers = {name: make for name, (_, make) in MAKERS.items()} | {"origins": origins}
    return {name: functools.partial(make, folder) for name, make in makers.items()}


def write_report(folder: Path) -> str:
    """Draw the figures, and fill this experiment's README.md if the folder is its own; return all tables."""
    if (folder / "compiled.csv").exists():
        replace_file(folder / "compiled.png", lambda path: draw_compiled(read_compiled(folder), path))
    if (planners := folder / "planners.csv").exists():
        replace_file(folder / "planners.png", lambda path: draw_planners(read_rows(planners), path))
    if folder.resolve() == RESULTS.resolve():
        text = filled(README.read_text(encoding="utf-8"), blocks(folder))
        replace_file(README, lambda path: path.write_text(text, encoding="utf-8"))
    makers = {name: make for name, (file, make) in (MAKERS | _OTHERS_TABLES).items() if [*folder.glob(f"{file}.csv")]}
    return "\n\n".join(f"{name}\n\n{make(folder)}" for name, make in makers.items())


if __name__ == "__main__":
    sys.exit(report_command(write_report, RESULTS))
