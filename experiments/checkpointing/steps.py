"""Run training steps in every way: `python -m experiments.checkpointing.steps KIND`.

Each way of running a model's step has a copy of the model. All ways are compiled first, and kept; their peaks and
gradients are taken; then their steps are timed by turns. The peak is that of torch's profiler over one step (on a GPU
of the allocator): it counts all that torch allocates beside the parameters and the batch, gradients included.

- `eager`: torch's own ways beside plans, op by op: torch.utils.checkpoint in each block, and torch's
  `activation_memory_budget` by the backend "aot_eager", which fuses nothing. FLOPs are counted, and nothing is timed.
- `planners`: plans of every strategy within parts of the plain peak, each run op by op. POET is left out, for without
  pages its program is Checkmate's. Planning is timed, and no step.
- `compiled`: the same through Inductor, and the plain compiled step. Plans get as budgets the peaks that the rivals
  were measured to take, so that times compare at equal peaks; ten more budgets lie evenly between the peak of the
  step without a plan and the least that a plan can do.
- `codes`: codes of 8 and 4 bits, budgets, and `fit`; with `--device cuda` under autocast to bfloat16. With
  `--noise MODEL` also how much codes add to the gradients of MRPC's minibatches.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import re
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

from experiments.command_line import Parser, add_models
from experiments.glue.settings import BITS, RunSettings
from experiments.provenance import origin
from experiments.rows import write_rows
from rmm_linear import RMMConfig, convert_linears, fit
from rmm_linear.checkpointing import apply_schedule, available_strategies, capture, get_strategy
from rmm_linear.compiler.backend import Group, Options
from rmm_linear.compiler.torch_private import dynamo_options
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.memory import measure_kept_bytes
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.variance import measure_step_noise

from .instruments import allocator_peaks, flops_of, gpu_peak, interleaved, kernel_seconds
from .models import WORKLOADS, Shape, Workload, of_shape, own_loss
from .report import BLOCKS, BUDGET, COMPILED, EAGER, EXACT, INDUCTOR, RESULTS, SPREAD, write_report

MEMORY_BUDGETS = {"eager": (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05), "compiled": (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)}
CODES = {"8 bits": BITS["8"], "activations 4, rest 8": BITS["4/8"], "4 bits": BITS["4"]}
PLANNERS_PERCENTS = (80, 60, 40)
# Budgets that are closer to each other are one.
_CLOSE = 1.02
_SPREAD = 10
_DRAWS = 8
_NOISE_BATCHES = 12
_COLUMNS = (
    *("method", "setting", "budget_bytes", "simulated_peak_bytes", "peak_bytes", "tensors_peak_bytes"),
    *("activation_peak_bytes", "saved_bytes", "extra_flops", "step_s", "step_s_q20", "step_s_q80", "rounds"),
    *("eager_step_s", "kernels_s", "eager_kernels_s", "error", "mean_error", "draws", "same_gradients", "compile_s"),
    "note",
)


@dataclass
class Way:
    """A way of running a step, with its name and its knob in tables."""

    method: str
    setting: str = ""
    _: KW_ONLY
    # torch.utils.checkpoint in each block
    is_checkpointed: bool = False
    # of torch.compile; None for eager mode
    backend: str | None = None
    # torch's `activation_memory_budget`
    memory_budget: float = 1.0
    # of the backend rmm_linear, which then compiles the step
    options: dict[str, Any] | None = None
    # the budget that `fit` is given
    fitted: str | None = None
    sketched: RMMConfig | None = None


CODE_WAYS = (
    Way("checkpointing in each block", is_checkpointed=True),
    Way("torch.compile", backend="inductor"),
    Way("both", backend="inductor", is_checkpointed=True),
    *(Way(f"{BUDGET} {each:g}", backend="inductor", memory_budget=each) for each in (0.5, 0.2)),
    *(Way(name, options={"bits": bits}) for name, bits in CODES.items()),
    *(Way(f"budget {each}%", options={"budget": f"{each}%"}) for each in (60, 35)),
    Way("8 bits, budget 75%", options={"bits": 8, "budget": "75%"}),
    *(Way(f"fit {budget}", fitted=budget) for budget in ("60%", "40%", "25%")),
)
# These run only if `--ways` names them.
MORE_WAYS = (
    *(Way(f"{BUDGET} {each:g}", backend="inductor", memory_budget=each) for each in (0.9, 0.7, 0.4, 0.3, 0.1, 0.0)),
    *(Way(f"budget {each}%", options={"budget": f"{each}%"}) for each in (100, 80, 70, 50, 40, 30)),
    *(Way(f"hadamard at {ratio}", sketched=RMMConfig(ratio=ratio)) for ratio in (0.5, 0.1)),
    *(Way(f"the paper's gaussian at {at}", sketched=RMMConfig.from_recipe("paper", ratio=at)) for at in (0.5, 0.1)),
    Way("hadamard at 1, int4", sketched=RMMConfig(ratio=1.0, storage="int4")),
)


@dataclass
class _Running:
    model: nn.Module
    step: Callable[[], None]
    row: dict[str, Any]
    group: Group | None
    steps: int = 0

    def __call__(self) -> None:
        """Run a step, from no gradients to all."""
        self.model.zero_grad(set_to_none=True)
        self.step()
        self.steps += 1

    def alone(self) -> None:
        """Run a step that leaves no gradients behind."""
        self()
        self.model.zero_grad(set_to_none=True)


class Comparison:
    """All ways of running a model's step."""

    def __init__(self, workload: Workload, shape: Shape, device: str = "cpu", *, counts_flops: bool = False) -> None:
        self.workload, self.shape, self.device = workload, shape, torch.device(device)
        self.on_gpu, self._counts_flops = self.device.type == "cuda", counts_flops
        model, batch = workload.at(shape)
        self._model, self._batch = model.to(self.device), {key: each.to(self.device) for key, each in batch.items()}
        # given, and not made by `backward`: it would count
        self._tangent = torch.ones((), device=self.device)
        self._flops = 0
        self._reference: Sequence[Tensor | None] = []
        self.running: list[_Running] = []
        self.missing: list[dict[str, Any]] = []

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu)

    def add(self, way: Way) -> _Running | None:
        """Compile and measure a way; None if there is no plan, or the model has no blocks to checkpoint."""
        model, group, plan = copy.deepcopy(self._model), None, None
        row: dict[str, Any] = dict.fromkeys(_COLUMNS) | {"method": way.method, "setting": way.setting}
        if way.is_checkpointed:
            count = checkpoint_blocks(model, self.workload.blocks)
            if not count:
                return None
            row["note"] = f"{count} blocks"
        if way.sketched is not None:
            convert_linears(model, config=way.sketched)
        forward: Callable[..., Any] = _with_own_code(self.workload.step)
        counters = torch._dynamo.utils.counters
        counters.clear()
        if way.options is not None:
            group = Group(Options(**way.options))
            forward = torch.compile(forward, backend=group.compile, fullgraph=True, dynamic=False)
        elif way.backend is not None:
            forward = torch.compile(forward, backend=way.backend, fullgraph=True, dynamic=False)

        def step() -> None:
            with self._autocast():
                loss = forward(model, **self._batch)
            loss.backward(self._tangent)
            if self.on_gpu:
                torch.cuda.synchronize(self.device)

        running = _Running(model, step, row, group)
        began = time.perf_counter()
        try:
            with functorch_config.patch(activation_memory_budget=way.memory_budget):
                if way.fitted is not None:
                    with self._autocast():
                        plan = fit(model, self._batch, way.fitted).plan
                running()
        except InfeasibleBudgetError as error:
            least = f"no plan: the least takes {error.least_bytes} bytes"
            self.missing.append(row | {"budget_bytes": (way.options or {}).get("budget"), "note": least})
            return None
        # a baseline that runs something else measures nothing
        assert way.fitted or not counters["graph_break"], counters["graph_break"]
        row["compile_s"] = round(time.perf_counter() - began, 1)
        if group is not None:
            (variant,) = group.variants()
            plan = variant.plan
        if plan is not None:
            row["budget_bytes"], row["simulated_peak_bytes"] = plan.budget_bytes, plan.peak_bytes
            row["saved_bytes"] = plan.planned.forward_bytes
        is_estimated = way.sketched is not None or (plan is not None and plan.coding.coded)
        self._measure(running, draws=_DRAWS if is_estimated else 1)
        self.running.append(running)
        return running

    def _measure(self, running: _Running, draws: int) -> None:
        row, is_first = running.row, not self.running
        running()
        if is_first:
            found = (parameter.grad for parameter in running.model.parameters())
            self._reference = [None if each is None else each.clone() for each in found]
        row["same_gradients"] = _has_gradients(running.model, self._reference)
        row |= self._errors(running, draws)
        if self._counts_flops:
            flops = flops_of(running)
            self._flops = flops if is_first else self._flops
            row["extra_flops"] = round(flops / self._flops - 1, 4)
        running.model.zero_grad(set_to_none=True)
        if self.on_gpu:
            row["peak_bytes"] = gpu_peak(running)
        else:
            row["peak_bytes"], row["tensors_peak_bytes"] = allocator_peaks(running)
        gradient_bytes = sum(each.nbytes for each in self._reference if each is not None)
        row["activation_peak_bytes"] = row["peak_bytes"] - gradient_bytes
        if is_first:
            with self._autocast():
                # of models that are called with the batch alone
                is_called = self.workload.step is own_loss
                row["saved_bytes"] = measure_kept_bytes(running.model, **self._batch) if is_called else None
        running.alone()
        peak = row["peak_bytes"] / 2**20
        name = f"{self.workload.name}: {row['method']}, {row['setting']}"
        print(f"{name}: {peak:.2f} MiB, error {row['error']:.0e}", flush=True)

    def _errors(self, running: _Running, draws: int) -> dict[str, float]:
        """The relative error of the gradient: of one draw, and of the mean of several."""
        exact = [each for each in self._reference if each is not None]
        size = sum(float(each.double().square().sum()) for each in exact)
        total, one = [torch.zeros_like(each, dtype=torch.float64) for each in exact], 0.0
        for draw in range(draws):
            if draw:
                running()
            found = [each.grad for each in running.model.parameters() if each.grad is not None]
            one += sum(float((a - b).double().square().sum()) for a, b in zip(found, exact, strict=True)) / draws
            for so_far, each in zip(total, found, strict=True):
                so_far += each / draws
        mean = sum(float((a - b).square().sum()) for a, b in zip(total, exact, strict=True))
        return {"error": (one / size) ** 0.5, "mean_error": (mean / size) ** 0.5, "draws": draws}

    def rows(self, rounds: int) -> Iterator[dict[str, Any]]:
        """Time all ways, ways of equal peaks side by side."""
        ordered = sorted(self.running, key=lambda running: running.row["peak_bytes"])
        gc.collect()
        print(f"{self.workload.name}: {len(ordered)} ways by turns; other work spoils the times", flush=True)
        with torch.compiler.set_stance("fail_on_recompile"):
            times = interleaved([running.alone for running in ordered], rounds)
        for running, seconds in zip(ordered, times, strict=True):
            if rounds > 1:
                low, *_, high = statistics.quantiles(seconds, n=5, method="inclusive")
                found = {"step_s": statistics.median(seconds), "step_s_q20": low, "step_s_q80": high}
                found |= {"kernels_s": kernel_seconds(running.alone)} if self.on_gpu else {}
                running.row |= {key: round(value, 6) for key, value in found.items()} | {"rounds": rounds}
            assert running.group is None or running.group.runs == running.steps, "steps ran without their plan"
        shape = self.shape
        parameters = sum(each.nbytes for each in self._model.parameters())
        sizes = {"batch": shape.batch, "size": shape.size, "config": json.dumps(shape.options, sort_keys=True)}
        sizes |= {"parameter_bytes": parameters, "precision": "autocast to bfloat16" if self.on_gpu else "float32"}
        for row in (*(running.row for running in self.running), *self.missing):
            row |= {f"eager_{name}": self.running[0].row[name] for name in ("step_s", "kernels_s")}
            yield sizes | row


def _has_gradients(model: nn.Module, exact: Sequence[Tensor | None]) -> bool:
    pairs = zip(exact, (parameter.grad for parameter in model.parameters()), strict=True)
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _with_own_code(function: Any) -> Callable[..., Any]:
    """Return a function that Dynamo tells apart: Dynamo keeps and counts compiled graphs by code object."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def checkpoint_blocks(model: nn.Module, pattern: str | None) -> int:
    """Checkpoint the blocks whose names match, or the blocks that a Hugging Face model knows; return their number."""
    options: dict[str, Any] = {"use_reentrant": False}
    if pattern is None:
        if not hasattr(model, "gradient_checkpointing_enable"):
            return 0
        model.gradient_checkpointing_enable(options)  # type: ignore[operator]
        layers = transformers.modeling_layers.GradientCheckpointingLayer
        return sum(isinstance(module, layers) for module in model.modules())
    blocks = [module for name, module in model.named_modules() if re.fullmatch(pattern, name)]
    for block in blocks:
        block.__dict__["forward"] = lambda *x, forward=block.forward: checkpoint(forward, *x, **options)
    return len(blocks)


def rivals(kind: str) -> list[Way]:
    """Return everything that torch itself has; the first way is eager mode."""
    backend = "inductor" if kind == "compiled" else "aot_eager"
    ways = [Way(EAGER), Way(EAGER, BLOCKS, is_checkpointed=True)]
    if kind == "compiled":
        ways += [Way(COMPILED, backend=backend), Way(COMPILED, BLOCKS, backend=backend, is_checkpointed=True)]
    budgets = MEMORY_BUDGETS[kind]
    return [*ways, *(Way(COMPILED, f"{BUDGET} {each:g}", backend=backend, memory_budget=each) for each in budgets)]


def compare(comparison: Comparison, ways: Sequence[Way], executors: dict[str, str], *, spread: int = _SPREAD) -> None:
    """Measure rivals, then plans: without a limit, at the rivals' peaks, and at more budgets by the last executor."""
    for way in ways:
        comparison.add(way)
    budgets: dict[Any, str] = {}
    for row in sorted((each.row for each in comparison.running), key=lambda row: row["peak_bytes"]):
        if not budgets or row["peak_bytes"] > _CLOSE * max(budgets):
            budgets[row["peak_bytes"]] = f"as {row['method']} {row['setting']}".rstrip()
    for method, executor in executors.items():
        plain = comparison.add(Way(method, "100 %", options={"budget": "100%", "executor": executor}))
        for budget, setting in budgets.items():
            comparison.add(Way(method, setting, options={"budget": budget, "executor": executor}))
    assert plain
    assert plain.group
    (variant,) = plain.group.variants()
    most, least = variant.plan.plain.peak_bytes, 0
    try:
        get_strategy("auto").plan(variant.capture.graph, 1)
    except InfeasibleBudgetError as error:
        least = error.least_bytes
    for number in range(spread):
        budget = most - number * (most - least) // max(1, spread - 1)
        comparison.add(Way(method, f"{SPREAD} {number + 1}", options={"budget": budget, "executor": executor}))


def planner_rows(workload: Workload, shape: Shape) -> Iterator[dict[str, Any]]:
    """Plan a step with every strategy but POET, and run each plan once."""
    model, batch = workload.at(shape)
    # given, and not made by `backward`: it would count
    tangent = torch.ones(())
    torch.manual_seed(0)
    workload.step(model, **batch).backward(tangent)
    exact = [parameter.grad for parameter in model.parameters()]
    graph = capture(model, kwargs=batch, step=workload.step).graph
    plain_bytes = peak_and_cost(graph, range(len(graph.ops)))[0]
    for name in (name for name in available_strategies() if name != "patil2022_poet"):
        for percent in PLANNERS_PERCENTS:
            row: dict[str, Any] = {"batch": shape.batch, "size": shape.size, "ops": len(graph.ops)}
            row |= {"plain_peak_bytes": plain_bytes, "strategy": name, "budget_percent": percent}
            began = time.perf_counter()
            try:
                schedule = get_strategy(name).plan(graph, plain_bytes * percent // 100)
            except InfeasibleBudgetError as error:
                yield row | {"least_peak_bytes": error.least_bytes, "planning_s": round(time.perf_counter() - began, 2)}
                break
            except ValueError as error:
                # the graph has more ops, or more lower sets, than the strategy takes
                print(f"{workload.title}, {name}: {error}", flush=True)
                break
            row["planning_s"] = round(time.perf_counter() - began, 2)
            simulated_bytes, cost = peak_and_cost(graph, schedule.order)
            row |= {"extra_cost": round(cost / graph.cost - 1, 4), "simulated_peak_bytes": simulated_bytes}
            own = copy.deepcopy(model)
            planned = apply_schedule(own, workload.step, batch, schedule)

            def step(own: nn.Module = own, planned: Callable[..., Tensor] = planned) -> None:
                own.zero_grad(set_to_none=True)
                # for dropout
                torch.manual_seed(0)
                planned(**batch).backward(tangent)

            step()
            row["same_gradients"] = _has_gradients(own, exact)
            own.zero_grad(set_to_none=True)
            row["peak_bytes"] = allocator_peaks(step)[0]
            print(f"{workload.title}, {name} at {percent} %: {row}", flush=True)
            yield row | {"proof": schedule.proof}


def step_rows(workload: Workload, shape: Shape, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run a model's step in all ways of a kind."""
    kind, comparison = options.kind, Comparison(workload, shape, options.device, counts_flops=options.kind == "eager")
    torch._dynamo.reset()
    with dynamo_options(), fresh_cache():
        if kind == "codes":
            for way in (Way(EAGER), *CODE_WAYS, *MORE_WAYS):
                if way.method in (EAGER, *options.ways):
                    comparison.add(way)
        elif kind == "eager":
            compare(comparison, rivals(kind), {EXACT: "exact"}, spread=2)
        else:
            compare(comparison, rivals(kind), {EXACT: "exact", INDUCTOR: "inductor"})
        yield from comparison.rows(0 if kind == "eager" else options.rounds)


def noise_rows(model: str, data: str) -> Iterator[dict[str, Any]]:
    """Compare the variance that codes add to a gradient with the variance of minibatches of MRPC, dropout off."""
    from experiments.glue.training import PreparedRun

    prepared = PreparedRun(RunSettings(task="mrpc", model=model, data=data, batch_size=32, pad_multiple=128), cpu=True)
    split, size = prepared.splits["train"].shuffle(seed=0), prepared.settings.batch_size
    for module in prepared.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    made = [prepared.collate([split[row] for row in range(at * size, (at + 1) * size)]) for at in range(_NOISE_BATCHES)]
    prepared.model.train()
    for way, bits in CODES.items():
        planned: Any = torch.compile(prepared.model, backend="rmm_linear", options={"bits": bits})
        noise = measure_step_noise(planned, made)
        # The standard error of a quotient of two means, to first order; the covariance is left out.
        parts = (noise.step.standard_error / noise.step.value, noise.minibatch.standard_error / noise.minibatch.value)
        row = {"way": way, "batches": _NOISE_BATCHES, "batch": size, "share": noise.noise_ratio}
        row |= {"share_error": noise.noise_ratio * math.hypot(*parts), "relative_variance": noise.relative_variance}
        yield row | origin()


def _run(options: argparse.Namespace) -> None:
    kind, key = options.kind, "small" if options.kind in ("eager", "planners") else options.kind
    key += ", cuda" if options.device == "cuda" else ""
    transformers.logging.set_verbosity_error()
    # of names that are to change in transformers 6
    warnings.filterwarnings("ignore", category=FutureWarning)
    # the time to plan is measured
    os.environ["RMM_LINEAR_PLANS"] = "off"
    torch.set_num_threads(1 if kind == "planners" else 2)
    workloads = of_shape(key)
    if options.noise:
        write_rows(options.results / "codes_noise.csv", list(noise_rows(options.noise, options.data)))
    name = attrgetter("title" if kind in ("eager", "planners") else "name")
    file = options.results / f"{kind}{'-cuda' if options.device == 'cuda' else ''}.csv"
    for workload in (each for each in workloads if each.name in options.models):
        shape = workload.shapes[key]
        rows = planner_rows(workload, shape) if kind == "planners" else step_rows(workload, shape, options)
        found = [{"model": name(workload)} | row | origin(options.device) for row in rows]
        write_rows(file, found, order=[name(each) for each in workloads])
        gc.collect()
    print(write_report(options.results))


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("kind", choices=("eager", "planners", "compiled", "codes"))
    add_models(parser, WORKLOADS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each way (default: 7)")
    usual, more = ([way.method for way in ways] for ways in (CODE_WAYS, MORE_WAYS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of codes (default: cpu)")
    parser.add_argument("--ways", nargs="*", choices=usual + more, default=usual, help="of codes, beside eager mode")
    parser.add_argument("--noise", metavar="MODEL", help="of codes: measure their noise on this pretrained model")
    parser.add_argument("--data", default="GLUE", help="a folder in the official GLUE layout, for --noise")
    sys.exit(parser.run(_run))
