"""Compare planned steps with torch.compile's own ways to save memory: `python -m experiments.checkpointing.compiled`.

Each way of running a model's step has a copy of the model. All ways are compiled first, and kept; their peaks and
gradients are taken; then their steps are timed by turns. The peak is that of torch's profiler over one step: it counts
all that torch allocates beside the parameters and the batch, gradients and what kernels hold for themselves included.
Plans get as budgets what their rivals were measured to take, so that times compare at equal peaks; ten more budgets lie
evenly between the peak of the step without a plan and the least that a plan can do.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache

from experiments import results_by_model
from experiments.command_line import HarnessError, Parser, exit_status
from rmm_linear.compiler.backend import Group, Options
from rmm_linear.compiler.torch_private import dynamo_options
from rmm_linear.errors import InfeasibleBudgetError

from . import compiled_report as report
from .baselines import BLOCKS, BUDGET, EAGER, checkpointed_blocks
from .compiled_models import CASES, QUICK, Case, Extent
from .compiled_report import COMPILED, ROWS_FILE, SPREAD
from .compiled_ways import COLUMNS, Watched, Way, least_bytes, with_own_code
from .instruments import all_equal, allocator_peaks, difference, interleaved
from .models import Shape
from .run import RESULTS, origin

# Budgets that are closer to each other are one.
_CLOSE = 1.02


@dataclass
class Comparison:
    """All ways of running a model's step.

    Attributes:
        case: The model.
        shape: Its size.
        extent: How much is measured.
        stack: Ends what lasts as long as the ways.
        ways: The ways so far; the first one is eager mode.
        missing: Rows of budgets that no plan can meet.
    """

    case: Case
    shape: Shape
    extent: Extent
    stack: ExitStack
    ways: list[Way] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # messages that transformers writes once break no graph, for rivals neither
        self.stack.enter_context(dynamo_options())
        # what earlier runs compiled is compiled anew; ways of one model share what they have in common
        self.stack.enter_context(fresh_cache())
        self._model, self._batch = self.case.workload.at(self.shape)
        config: Any = getattr(self._model, "config", None)
        self._blocks: int = self.case.blocks or config.num_hidden_layers
        self._reference: list[Tensor | None] = []

    def add_rivals(self) -> None:
        """Compile and measure everything that torch itself has."""
        self._add(EAGER, "")
        self._add(EAGER, BLOCKS, are_checkpointed=True)
        self._add(COMPILED, "", self.extent.backend)
        self._add(COMPILED, BLOCKS, self.extent.backend, are_checkpointed=True)
        for budget in self.extent.memory_budgets:
            with functorch_config.patch(activation_memory_budget=budget):
                self._add(COMPILED, f"{BUDGET} {budget:g}", self.extent.backend, memory_budget=budget)

    def add_plans(self) -> None:
        """Compile and measure plans: without a limit, at the rivals' peaks, and at budgets that lie evenly."""
        budgets: dict[int, str] = {}
        for way in sorted(self.ways, key=lambda way: way.row["peak_bytes"]):
            if not budgets or way.row["peak_bytes"] > _CLOSE * max(budgets):
                budgets[way.row["peak_bytes"]] = f"as {way.row['method']} {way.row['setting']}".rstrip()
        wanted: list[tuple[int | str, str]] = [("100%", "100 %"), *list(budgets.items())[: self.extent.rivals]]
        for executor in self.extent.executors:
            for budget, setting in wanted:
                self._add(executor, setting, budget=budget)
        plain = next(way for way in self.ways if way.group and way.row["method"] == self.extent.executors[-1])
        assert plain.group is not None
        (variant,) = plain.group.variants()
        most, least = variant.plan.plain.peak_bytes, least_bytes(variant.capture.graph)
        for number in range(self.extent.spread):
            budget = most - number * (most - least) // (self.extent.spread - 1)
            self._add(self.extent.executors[-1], f"{SPREAD} {number + 1}", budget=budget)

    def _add(
        self,
        method: str,
        setting: str,
        backend: str | None = None,
        *,
        budget: int | str | None = None,
        memory_budget: float = 1.0,
        are_checkpointed: bool = False,
    ) -> None:
        model, group = copy.deepcopy(self._model), None
        row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"method": method, "setting": setting, "budget_bytes": budget}
        watched: Watched | None = None
        if are_checkpointed:
            pattern = next(iter(self.case.workload.blocks.values()), None)
            count = self.stack.enter_context(checkpointed_blocks(model, pattern))
            assert count == self._blocks, f"{count} blocks are checkpointed, not {self._blocks}"
            row["note"] = f"{count} blocks"
        if budget is not None:
            group = Group(Options(budget=budget, executor=method.removeprefix("planned, ")))
            watched = Watched(group.compile)
        elif backend is not None:
            watched = Watched(torch._dynamo.lookup_backend(backend))
        forward = with_own_code(self.case.workload.step)
        if watched is not None:
            torch._dynamo.utils.counters.clear()
            forward = torch.compile(forward, backend=watched, fullgraph=True, dynamic=False)
        way = Way(model, lambda: forward(model, *self._batch), row, group, watched)
        began = time.perf_counter()
        try:
            way.step()
        except InfeasibleBudgetError as error:
            self.missing.append(row | {"note": f"no plan: the least takes {error.least_bytes} bytes"})
            return
        if watched is not None:
            row["compile_s"] = round(time.perf_counter() - began, 1)
            assert not torch._dynamo.utils.counters["graph_break"]
            assert watched.blocks == (self._blocks if are_checkpointed else 0), f"{watched.blocks} blocks are compiled"
            assert watched.memory_budget == memory_budget
        self._measure(way)
        self.ways.append(way)

    def _measure(self, way: Way) -> None:
        way.step()
        gradients = [parameter.grad for parameter in way.model.parameters()]
        self._reference = self._reference or [None if each is None else each.clone() for each in gradients]
        row = way.row
        row["same_gradients"] = all_equal(self._reference, gradients)
        row["gradient_difference"] = difference(self._reference, gradients)
        del gradients
        way.model.zero_grad(set_to_none=True)
        row["peak_bytes"], row["tensors_peak_bytes"] = allocator_peaks(way.step)
        way.timed_step()
        if way.group is not None:
            (variant,) = way.group.variants()
            row["budget_bytes"], row["simulated_peak_bytes"] = variant.plan.budget_bytes, variant.plan.peak_bytes
        print(
            f"{self.case.name}: {row['method']}, {row['setting']}: {row['peak_bytes'] / 2**20:.2f} MiB,"
            f" gradients by {row['gradient_difference']:.0e}, {row['compile_s'] or 0:.0f} s to compile",
            flush=True,
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Time all ways, those of equal peaks side by side."""
        ordered = sorted(self.ways, key=lambda way: way.row["peak_bytes"])
        steps = [(str(number), way.timed_step) for number, way in enumerate(ordered)]
        gc.collect()
        print(f"{self.case.name}: {len(steps)} ways by turns; other work beside them spoils the times", flush=True)
        times = interleaved(steps, self.extent.rounds)
        for (name, _), way in zip(steps, ordered, strict=True):
            low, *_, high = statistics.quantiles(times[name], n=5, method="inclusive")
            found = {"step_s": statistics.median(times[name]), "step_s_q20": low, "step_s_q80": high}
            way.row |= {key: round(value, 4) for key, value in found.items()} | {"rounds": self.extent.rounds}
            way.check()
        sizes = {"model": self.case.name, "batch": self.shape.batch, "size": self.shape.size}
        sizes["config"] = json.dumps(self.shape.options, sort_keys=True)
        sizes["parameter_bytes"] = sum(each.numel() * each.element_size() for each in self._model.parameters())
        for row in (*(way.row for way in self.ways), *self.missing):
            yield sizes | row | origin(self.case.workload)


def compare(case: Case, extent: Extent, *, is_tiny: bool = False) -> list[dict[str, Any]]:
    """Measure all ways of running a model's step.

    Args:
        case: The model.
        extent: How much is measured.
        is_tiny: Whether the model is of the size of `--quick`.
    """
    torch._dynamo.reset()
    with ExitStack() as stack:
        comparison = Comparison(case, case.tiny if is_tiny else case.shape, extent, stack)
        comparison.add_rivals()
        comparison.add_plans()
        return list(comparison.rows())


def _run(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m experiments.checkpointing.compiled", description=__doc__.partition("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help=f"some of {', '.join(names)} (default: those without results)"
    )
    parser.add_argument("--output", type=Path, help="folder of the results (default: this experiment's)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few budgets; writes no results")
    options = parser.parse_args(arguments)
    chosen = results_by_model.chosen(CASES, options.models)
    if options.quick and options.output is not None:
        raise HarnessError("--quick writes no results; leave --output out")
    transformers.logging.set_verbosity_error()
    # of names that are to change in transformers 6
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing")
    # the time to plan is measured
    os.environ["RMM_LINEAR_PLANS"] = "off"
    torch.set_num_threads(2)
    if options.quick:
        print(report.compiled_summary([row for case in chosen for row in compare(case, QUICK, is_tiny=True)]))
        return 0
    output = results_by_model.output_folder(options.output, RESULTS)
    path = output / ROWS_FILE
    for case in chosen:
        old = report.read_compiled_rows(path) if path.exists() else []
        # an interrupted run goes on with the next model
        if options.models is None and any(row["model"] == case.name for row in old):
            continue
        results_by_model.write_rows(path, compare(case, Extent()), old=old, names=names)
        gc.collect()
    print(report.write_compiled_report(output))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2, with one line on stderr, if the user has something to put right."""
    return exit_status(lambda: _run(arguments))


if __name__ == "__main__":
    sys.exit(main())
