"""What a step of a layer costs the host, on a machine without a GPU: time, and launches.

    python kernels/benchmarks/host_time.py [--repeats 15] [--modes eager,compiled] [--results DIR]

A step on a small input takes a GPU as long as the host needs to launch it. Here the kernels are launched on a GPU that
is none (`pretended_gpu`), with all that Triton's host code does, and torch's own operators run on a CPU, where they
take about as long for inputs as small as these. Not in the times: what a driver takes for a launch, a few microseconds
on most machines, and the questions about the current device (about one a kernel). The launches are counted. The layers
are timed in float32, whose kernels have the arguments of half precision's. `layer.py` measures the whole on a GPU.

A layer by itself, as `layer.py` times it, and eight in a row: there what a step takes once, whatever is in it, is
dealt out among them, and every layer has an input that it has not seen before.
"""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
from measuring import hardware_name, quantiles
from pretended_gpu import Launch, PretendedGPU, pretended_gpu
from result_files import RESULTS, check_results_folder, commit_name, slug, write_csv
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear import RMMConfig, RMMLinear, __version__
from rmm_linear.ops import dispatch

# As few features as leave torch's products on a CPU next to nothing to do.
ROWS, FEATURES = 128, 8
_STEPS = 200
_WARM_STEPS = 50
# Layers in a row.
DEPTHS = (1, 8)
MODES = ("eager", "compiled")
# Operators that launch nothing: views, and memory from the allocator.
_WITHOUT_LAUNCH = (
    "view",
    "t",
    "transpose",
    "detach",
    "alias",
    "expand",
    "unsqueeze",
    "squeeze",
    "select",
    "slice",
    "_unsafe_view",
)
_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


@dataclass(frozen=True)
class Row:
    """One line of the results file; microseconds of the wall for each layer, quantiles over repetitions.

    Attributes:
        mode: "eager", or "compiled" by `torch.compile`.
        layers: Layers in a row.
        launches: Kernels that a step launches on a GPU, of each layer; of a compiled one it is not counted.
        over_linear: `step_us` over that of nn.Linear in the same mode, as many in a row.
    """

    hardware: str
    mode: str
    layers: int
    layer: str
    center: bool | str
    ratio: float | str
    rows: int
    features: int
    launches: int | str
    forward_us: float
    step_us: float
    step_us_q20: float
    step_us_q80: float
    over_linear: float
    repeats: int
    torch: str
    rmm_linear: str
    commit: str


@contextlib.contextmanager
def as_on_a_gpu(*, small: bool = True) -> Iterator[PretendedGPU]:
    """Let layers on CPU tensors go the ways of half precision on a GPU, float32 as well. What they return is garbage.

    In float32 they may not have a storage, for which there is another kernel in half precision.

    Args:
        small: False to take the ways of large inputs, whatever the size: a kernel for each thing to do, and the product
            of the sketches by cuBLAS.
    """
    patches = {
        "rmm_linear.ops.is_for_kernels": lambda g: True,
        "rmm_linear.ops.dispatch.is_for_kernels": lambda g: True,
        "rmm_linear.ops.grad_weight.is_for_kernels": lambda g: True,
        "rmm_linear.ops.dispatch._reason_against": lambda name, x: None,
        "rmm_linear.ops.grad_weight.HALVES": (torch.float32, torch.bfloat16),
        "rmm_linear.ops.grad_weight._is_one_launch": lambda *operands: small,
        "rmm_linear_kernels.sketched_grad_weight.reference.has_half_precision_product": lambda g, dtype: True,
    }
    if not small:
        for way in ("input", "gradient"):
            patches[f"rmm_linear_kernels.hadamard_at_once.reference.holds_{way}"] = lambda *sizes: False
    with pretended_gpu() as gpu, contextlib.ExitStack() as stack:
        # graphs of these ways are not to be found by who goes the ways of a CPU, nor the other way round
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        for place, value in patches.items():
            stack.enter_context(mock.patch(place, value))
        # after all else, and before it is as it was
        dispatch.forget_launches()
        stack.callback(dispatch.forget_launches)
        yield gpu


class _Names(list):
    """Names of launched kernels. Who kept their arguments would make autograd copy the gradients among them."""

    def append(self, launch: Launch) -> None:
        super().append(launch.kernel)


class _Launches(TorchDispatchMode):
    """Counts torch's own operators that launch a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in (*_WITHOUT_LAUNCH, *_ALLOCATIONS):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def launches(step: Callable[[], object], gpu: PretendedGPU | None) -> list[str]:
    """Return what a step launches.

    Args:
        step: One step.
        gpu: Where the kernels of this project are launched, or None for a step that has none of them.
    """
    noted = _Names()
    if gpu is not None:
        gpu.launches, gpu.is_noting = noted, True
    # The operators of this project are called as functions, or the mode would see each as one.
    with mock.patch("rmm_linear.ops.registration._is_watched", return_value=False), _Launches() as found:
        step()
    if gpu is not None:
        gpu.is_noting = False
    return [*found.names, *noted]


def _microseconds(call: Callable[[], object], depth: int) -> float:
    """Wall time of a call, for each layer."""
    calls = _STEPS // depth
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / (calls * depth) * 1e6


def step_of(layer: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Callable[[], None]:
    """Return a function that runs a layer forward and backward.

    Args:
        layer: An nn.Linear, a sketched one, several in a row, or what `torch.compile` makes of them.
        x: Its input.
        g: The gradient of its output.
    """
    parameters = tuple(layer.parameters()) if isinstance(layer, nn.Module) else ()

    def step() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        layer(x).backward(g)

    return step


def _model(config: RMMConfig | None, depth: int) -> nn.Module:
    """Layers in a row."""
    made = [
        nn.Linear(FEATURES, FEATURES) if config is None else RMMLinear(FEATURES, FEATURES, config=config)
        for _ in range(depth)
    ]
    return made[0] if depth == 1 else nn.Sequential(*made)


def benchmark(configs: list[RMMConfig], *, modes: list[str], repeats: int) -> Iterator[Row]:
    """Time nn.Linear, and sketched layers in the way of a GPU.

    Args:
        configs: Configurations of the sketched layers.
        modes: Some of `MODES`.
        repeats: Timed repetitions of all of them.

    Yields:
        A row a layer for each mode and depth, nn.Linear's first.
    """
    x, g = torch.randn(ROWS, FEATURES, requires_grad=True), torch.randn(ROWS, FEATURES)
    variants = (None, *configs)
    with as_on_a_gpu() as gpu:
        gpu.is_noting = False
        for mode, depth in itertools.product(modes, DEPTHS):
            torch._dynamo.reset()
            models: list[Any] = [_model(config, depth) for config in variants]
            if mode == "compiled":
                models = [torch.compile(model, fullgraph=True) for model in models]
            steps = [step_of(model, x, g) for model in models]
            for step in steps:
                for _ in range(_WARM_STEPS):
                    step()
            # the mode that counts would be compiled for
            counts = [len(launches(step, gpu)) // depth if mode == "eager" else "" for step in steps]
            forwards, times = [], []
            for _ in range(repeats):
                forwards.append([_microseconds(lambda model=model: model(x), depth) for model in models])
                times.append([_microseconds(step, depth) for step in steps])
            forward_table, table = torch.tensor(forwards), torch.tensor(times)
            ratios = table / table[:, :1]
            for index, (count, config) in enumerate(zip(counts, variants, strict=True)):
                low, middle, high = quantiles(table[:, index])
                yield Row(
                    hardware=hardware_name(torch.device("cpu")),
                    mode=mode,
                    layers=depth,
                    layer="nn.Linear" if config is None else config.sketch,
                    center="" if config is None else config.center,
                    ratio="" if config is None else config.ratio,
                    rows=ROWS,
                    features=FEATURES,
                    launches=count,
                    forward_us=round(float(forward_table[:, index].median()), 1),
                    step_us=round(middle, 1),
                    step_us_q20=round(low, 1),
                    step_us_q80=round(high, 1),
                    over_linear=round(float(ratios[:, index].median()), 3),
                    repeats=repeats,
                    torch=torch.__version__,
                    rmm_linear=__version__,
                    commit=commit_name(),
                )
        torch._dynamo.reset()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and write one CSV file.

    Args:
        arguments: Command line, `sys.argv[1:]` by default.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {','.join(MODES)}; all by default")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least one repetition is needed")
    modes = options.modes.split(",")
    if not set(modes) <= set(MODES):
        parser.error(f"--modes {options.modes}: some of {', '.join(MODES)}")
    check_results_folder(parser, options.results)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    configs = [RMMConfig(ratio=0.5, center=center, min_rows=1) for center in (False, True)]
    print(
        f"{'mode':10}{'layers':>7}  {'layer':22}{'launches':>10}{'forward us':>12}{'step us':>10}{'over nn.Linear':>16}"
    )
    rows = []
    for row in benchmark(configs, modes=modes, repeats=options.repeats):
        rows.append(row)
        name = row.layer + (" + center" if row.center else "")
        times = f"{row.forward_us:>12}{row.step_us:>10}{row.over_linear:>16.2f}"
        print(f"{row.mode:10}{row.layers:>7}  {name:22}{row.launches:>10}{times}")
    path = options.results / f"host-time-{slug(rows[0].hardware)}.csv"
    write_csv(path, [asdict(row) for row in rows])
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
