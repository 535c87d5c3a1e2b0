"""Time each Triton kernel against its plain-torch reference, and compare their errors.

    python kernels/benchmarks/each_kernel.py [--only hadamard] [--repeats 20] [--results DIR]

Every repetition times the reference and the kernel, one after the other, on rotating inputs that together exceed the
device's cache. Times are medians, the kernel's with 20/80 quantiles. Errors are root mean squares against a float64
computation, relative to its result; a kernel fails if its error exceeds twice its reference's error plus 1e-5.

On a CPU (`--device cpu`) only the references are timed, on tiny shapes that test the script.
"""

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import device_of, hardware_name, milliseconds, quantiles, rotating_count
from result_files import RESULTS, check_results_folder, commit_name, slug, write_csv
from torch import Tensor

from rmm_linear_kernels.low_bit.reference import BITS, dequantize, quantize

# (rows, features) of x
SHAPES = ((8192, 768), (8192, 3072), (16384, 4096))
TINY_SHAPES = ((256, 48),)

KINDS = ("int8", "int4")
# A reference may take a hundred times as long as its kernel, and needs a less precise median.
_REFERENCE_REPEATS = 5
_BLOCK_ROWS = 64
# Bits of the codes that share a step and an offset.
_GROUP_BITS = 1024


@dataclass(frozen=True)
class Case:
    """One call of one kernel.

    Attributes:
        op: Folder of the op.
        function: Name of the reference and of the kernel's launcher.
        name: Name of the case in the output.
        shape: Shape of x.
        make: Makes a new set of tensors, the first arguments.
        options: All other arguments.
    """

    op: str
    function: str
    name: str
    shape: tuple[int, int]
    make: Callable[[], tuple[Any, ...]]
    options: dict[str, Any]


# Columns of the results file that may be empty.
_FIGURES = (
    *("reference_us", "kernel_us", "kernel_us_q20", "kernel_us_q80", "kernel_over_reference"),
    *("reference_error", "kernel_error"),
)


def implementation(case: Case, module: str) -> Callable[..., Any]:
    """Return the reference of a case, or its launcher."""
    return getattr(importlib.import_module(f"rmm_linear_kernels.{case.op}.{module}"), case.function)


def cases(shapes: tuple[tuple[int, int], ...], *, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield every case of x for each shape (rows, features), one shape after the other."""
    seed = torch.tensor(7, device=device)
    for shape in shapes:
        rows, features = shape
        blocks = -(-rows // _BLOCK_ROWS)

        def inputs(centred: bool, shape: tuple[int, int] = shape) -> tuple[Any, ...]:
            x = torch.randn(shape, device=device, dtype=dtype)
            return x, seed, x.float().mean(0) if centred else None

        for ratio, centred in ((0.5, False), (0.25, False), (0.25, True), (0.1, True)):
            kept = max(1, int(ratio * rows / blocks))
            name = f"hadamard_sketch, ratio {ratio:g}" + (", centred" if centred else "")
            options = {"blocks": blocks, "kept": kept, "scale": kept**-0.5, "dtype": dtype}
            yield Case("hadamard", "hadamard_sketch", name, shape, partial(inputs, centred), options)
        for gaussian, ratio in itertools.product((True, False), (0.25, 0.1)):
            rank = max(1, int(ratio * rows))
            name = f"random_projection, {'normals' if gaussian else 'signs'}, ratio {ratio:g}"
            options = {"rank": rank, "gaussian": gaussian, "scale": rank**-0.5, "dtype": dtype}
            yield Case("projection", "random_projection", name, shape, partial(inputs, False), options)
        for kind in KINDS:
            options = {"kind": kind, "group": _GROUP_BITS // BITS[kind]}
            yield Case("low_bit", "quantize", f"quantize to {kind}", shape, partial(inputs, False), options)

            def codes(options: dict[str, Any] = options, inputs: Callable[..., Any] = inputs) -> tuple[Any, ...]:
                return *quantize(*inputs(False), **options), seed

            more = options | {"features": features}
            yield Case("low_bit", "dequantize", f"dequantize {kind}", shape, codes, more)


def _value(case: Case, result: Any, tensors: tuple[Any, ...]) -> Tensor:
    """The tensor to compare: a sketch, or the values of codes."""
    if not isinstance(result, tuple):
        return result
    return dequantize(*result, tensors[1], **case.options, features=case.shape[1])


def measured_errors(case: Case, launcher: Callable[..., Any] | None) -> tuple[float, float | None]:
    """Return the error of the reference, and that of the kernel, which is None without a launcher."""
    tensors = case.make()
    wide = tuple(t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors)
    options = case.options | ({"dtype": torch.float64} if "dtype" in case.options else {})
    if case.function == "dequantize":
        # scales keep their dtype
        wide = tensors
    reference = implementation(case, "reference")
    exact = _value(case, reference(*wide, **options), wide).double()
    if case.function == "quantize":
        # the error is relative to x itself
        exact = tensors[0].double()

    def error(function: Callable[..., Any]) -> float:
        found = _value(case, function(*tensors, **case.options), tensors).double()
        return float((found - exact).norm() / exact.norm())

    return error(reference), None if launcher is None else error(launcher)


def measure(case: Case, *, device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Time one case and measure its error, with `repeats` timed repetitions after two untimed."""
    launcher = implementation(case, "kernel") if device.type == "cuda" else None
    calls = {"reference": implementation(case, "reference")}
    if launcher is not None:
        calls["kernel"] = launcher
    reference_error, kernel_error = measured_errors(case, launcher)
    size = sum(value.nbytes for value in case.make() if isinstance(value, Tensor))
    inputs = itertools.cycle([case.make() for _ in range(rotating_count(size, device))])
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, function in calls.items():
            if name == "reference" and repeat >= _REFERENCE_REPEATS + 2:
                continue
            elapsed = milliseconds(partial(function, *next(inputs), **case.options), device)
            if repeat >= 2:
                times[name].append(elapsed * 1e3)
    low, middle, high = quantiles(torch.tensor(times["reference"]))
    figures = {"reference_us": middle, "reference_error": reference_error}
    note, failed = "kernels need a GPU", False
    if kernel_error is not None:
        low, kernel, high = quantiles(torch.tensor(times["kernel"]))
        figures |= {"kernel_us": kernel, "kernel_us_q20": low, "kernel_us_q80": high}
        figures |= {"kernel_over_reference": kernel / middle, "kernel_error": kernel_error}
        # a comparison with NaN is False
        failed = not kernel_error <= 2 * reference_error + 1e-5
        note = f"error {kernel_error:.3g}, the reference's {reference_error:.3g}" if failed else ""
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    return _row(case, device, dtype, rounded, note=note, failed=failed, repeats=repeats)


def _row(
    case: Case, device: torch.device, dtype: torch.dtype, figures: dict[str, float], **outcome: Any
) -> dict[str, Any]:
    return {
        "hardware": hardware_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "op": case.op,
        "name": case.name,
        "shape": " x ".join(map(str, case.shape)),
        **dict.fromkeys(_FIGURES, ""),
        **figures,
        **outcome,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "commit": commit_name(),
    }


def _triton_version() -> str:
    try:
        return importlib.import_module("triton").__version__
    except ModuleNotFoundError:
        return "none"


def _printed(row: dict[str, Any]) -> str:
    cells = "{reference_us:>14}{kernel_us:>14}{kernel_over_reference:>14}".format_map(row)
    errors = "{kernel_error} / {reference_error}".format_map(row)
    return f"{row['name']:48}{row['shape']:22}{cells}{errors:>24}  {row['note']}"


def main(arguments: list[str] | None = None) -> int:
    """Measure every case and write one CSV file; the exit status is 1 if a kernel fails or is not exact enough."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for tiny shapes and the references alone")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their names")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least one repetition is needed")
    device, dtype = device_of(parser, options.device), getattr(torch, options.dtype)
    check_results_folder(parser, options.results)
    torch.manual_seed(0)
    shapes = SHAPES if device.type == "cuda" else TINY_SHAPES
    chosen = [case for case in cases(shapes, device=device, dtype=dtype) if options.only in case.name]
    if not chosen:
        parser.error(f"--only {options.only}: no case has that in its name")
    hardware = hardware_name(device)
    print(f"{hardware}, {options.dtype}, torch {torch.__version__}, triton {_triton_version()}, commit {commit_name()}")
    heads = ("reference us", "kernel us", "kernel / ref.")
    print(f"{'':70}" + "".join(f"{head:>14}" for head in heads) + f"{'error, kernel / ref.':>24}")
    found: list[dict[str, Any]] = []
    path = options.results / f"kernels-{slug(hardware)}-{options.dtype}.csv"
    for case in chosen:
        try:
            row = measure(case, device=device, dtype=dtype, repeats=options.repeats)
        except Exception as error:
            # Go on: other cases may work.
            note = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            row = _row(case, device, dtype, {}, note=note, failed=True, repeats=0)
        found.append(row)
        print(_printed(row), flush=True)
        # Written after each case, so that an interrupted run has results.
        write_csv(path, found)
    print(f"written to {path}")
    return 1 if any(row["failed"] for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
