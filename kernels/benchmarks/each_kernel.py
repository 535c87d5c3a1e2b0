"""Time each Triton kernel against its plain-torch reference, and compare their errors.

    python kernels/benchmarks/each_kernel.py [--only hadamard] [--repeats 20] [--results DIR]

Every repetition times the reference and the kernel, one after the other, on inputs that take turns and are larger
together than the device's cache. Times are medians, the kernel's with 20/80 quantiles. Errors are root mean squares
against a float64 computation, relative to its result; a kernel fails if its error is more than twice its reference's,
and 1e-5 above that.

On a processor (`--device cpu`) there is nothing but the references to time; tiny shapes show that the script works.
"""

import argparse
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import device_of, hardware_name, milliseconds, quantiles, rotating_count
from result_files import RESULTS, check_results_folder, commit_name, slug, write_csv
from torch import Tensor

from rmm_linear_kernels.hadamard_at_once.reference import holds_gradient
from rmm_linear_kernels.hadamard_sketch.reference import hadamard_sketch
from rmm_linear_kernels.low_bit.reference import BITS, FP8, dequantize, quantize
from rmm_linear_kernels.quantize_and_mean.reference import mean_less_codes, rounded_dtype

# (rows, in, out)
SHAPES = ((8192, 768, 3072), (16384, 1024, 4096), (8192, 4096, 14336))
TINY_SHAPES = ((256, 48, 80),)
RATIOS = (0.5, 0.25, 0.1)
KINDS = ("int8", "int4")
# A reference may take a hundred times as long as its kernel, and its median need not be as sharp.
_REFERENCE_REPEATS = 5
# Rows of what is done at once.
_FEW_ROWS = 256
# As many sums of parts of g as a product takes as they are.
_FEW_PARTS = 8
# Numbers of runs that rows come in: the first that divides theirs, if any does.
_RUNS = (16, 7, 2)
BLOCK_ROWS = 64
# Bits of the codes that share a step and an offset.
GROUP_BITS = 1024
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call of one op.

    Attributes:
        op: Folder of the op.
        function: Name of the reference and of its kernel's launcher.
        name: What is computed, for people.
        shape: (rows, in, out) of the layer, or what is read of it.
        make: Makes a new set of arguments, by name; a function is given those that it has.
        value: What of a result is compared, of the result and the arguments; the result itself by default.
    """

    op: str
    function: str
    name: str
    shape: tuple[int, ...]
    make: Callable[[], Arguments]
    value: Callable[[Any, Arguments], Tensor] = field(default=lambda result, arguments: result)


@dataclass(frozen=True)
class Row:
    """One line of the results file; empty where there is nothing to tell."""

    hardware: str
    dtype: str
    op: str
    name: str
    shape: str
    reference_us: float | str = ""
    kernel_us: float | str = ""
    kernel_us_q20: float | str = ""
    kernel_us_q80: float | str = ""
    kernel_over_reference: float | str = ""
    reference_error: float | str = ""
    kernel_error: float | str = ""
    note: str = ""
    failed: bool = False
    repeats: int = 0
    torch: str = torch.__version__
    triton: str = ""
    commit: str = ""


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with those of the arguments that it has."""
    names = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in names})


def implementation(op: str, function: str, module: str) -> Callable[..., Any] | None:
    """Return a function of an op, if there is one.

    Returns:
        The function; None where there is no such file or no such function in it.

    Raises:
        ModuleNotFoundError: If the file is there, and something else that it imports is not.
    """
    path = f"rmm_linear_kernels.{op}.{module}"
    try:
        found = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name in (path, "triton"):
            return None
        raise
    return getattr(found, function, None)


def launcher_of(case: Case, device: torch.device) -> Callable[..., Any] | None:
    """Return what launches the kernel of a case.

    Returns:
        The launcher; None where there is none, and on a processor.
    """
    return implementation(case.op, case.function, "kernel") if device.type == "cuda" else None


def cases(shapes: tuple[tuple[int, int, int], ...], *, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Make every case.

    Args:
        shapes: (rows, in, out) of layers.
        device: Where tensors are made.
        dtype: Dtype of x and g.

    Yields:
        The cases of one shape after those of another.
    """
    seed = torch.tensor(7, device=device)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype)

    for shape in shapes:
        yield from _sketch_cases(shape, normal, seed, dtype)
        yield from _at_once_cases(shape, normal, seed, dtype)
        yield from _low_bit_cases(shape, normal, seed)
        yield from _quantized_sketch_cases(shape, normal, seed, dtype)
        yield from _product_cases(shape, normal, seed, dtype)


def rank_of(rows: int, ratio: float) -> int:
    """Return the rows that the Hadamard sketch keeps."""
    blocks = -(-rows // BLOCK_ROWS)
    return blocks * max(1, int(ratio * rows / blocks))


def _first_and_row(result: tuple[Tensor, Tensor], arguments: Arguments) -> Tensor:
    return torch.cat((result[0].double(), result[1].double().unsqueeze(0)))


def _first_and_column(result: tuple[Tensor, Tensor], arguments: Arguments) -> Tensor:
    return torch.cat((result[0].double(), result[1].double().unsqueeze(1)), 1)


def _sketch_cases(
    shape: tuple[int, int, int], normal: Callable[[int, int], Tensor], seed: Tensor, dtype: torch.dtype
) -> Iterator[Case]:
    rows, features, out = shape
    blocks = -(-rows // BLOCK_ROWS)

    def hadamard(columns: int, ratio: float, *, centred: bool = False) -> Arguments:
        x, kept = normal(rows, columns), rank_of(rows, ratio) // blocks
        mean = x.float().mean(0) if centred else None
        return {
            "x": x, "seed": seed, "mean": mean, "blocks": blocks, "kept": kept, "scale": kept**-0.5, "dtype": dtype,
        }  # fmt: skip

    for ratio, centred in ((0.5, False), (0.25, False), (0.25, True), (0.1, False)):
        name = f"hadamard_sketch of x, ratio {ratio:g}" + (", centred" if centred else "")
        make = partial(hadamard, features, ratio, centred=centred)
        yield Case("hadamard_sketch", "hadamard_sketch", name, shape[:2], make)
    for ratio in RATIOS:
        yield Case(
            "hadamard_sketch",
            "hadamard_sketch_and_sums",
            f"hadamard_sketch of g, with sums, ratio {ratio:g}",
            (rows, out),
            partial(hadamard, out, ratio),
            lambda result, arguments: torch.cat((result[0].double(), result[1].double() / BLOCK_ROWS)),
        )
    runs = next((count for count in _RUNS if rows % count == 0 and rows > count), None)

    def in_runs() -> Arguments:
        """Without the first row of each run."""
        assert runs is not None
        x = normal(rows + runs, features).view(runs, rows // runs + 1, features)[:, 1:]
        return hadamard(features, 0.25, centred=True) | {"x": x}

    whole = partial(hadamard, features, 0.25, centred=True)
    inputs = {"x": whole, **({} if runs is None else {"x in runs": in_runs})}
    for of, make in inputs.items():
        name = f"hadamard_sketch of {of} with what is left of its mean, ratio 0.25"
        yield Case("hadamard_sketch", "hadamard_sketch_and_mean", name, shape[:2], make, _first_and_row)
    for gaussian, ratio in itertools.product((True, False), (0.25, 0.1)):

        def projection(rank: int = max(1, int(ratio * rows)), gaussian: bool = gaussian) -> Arguments:
            return {
                "x": normal(rows, features), "seed": seed, "mean": None, "rank": rank, "gaussian": gaussian,
                "scale": rank**-0.5, "dtype": dtype,
            }  # fmt: skip

        name = f"random_projection of x, {'normals' if gaussian else 'signs'}, ratio {ratio:g}"
        yield Case("random_projection", "random_projection", name, shape[:2], projection)


def _at_once_cases(
    shape: tuple[int, int, int], normal: Callable[[int, int], Tensor], seed: Tensor, dtype: torch.dtype
) -> Iterator[Case]:
    """Of so many of the shape's rows and outputs as are few."""
    rows, features, out = min(shape[0], _FEW_ROWS), shape[1], shape[2]
    blocks = -(-rows // BLOCK_ROWS)
    while not holds_gradient(rows, blocks, out, features, dtype):
        out //= 2
    for ratio in RATIOS:
        rank = rank_of(rows, ratio)
        geometry = {"seed": seed, "blocks": blocks, "kept": rank // blocks, "scale": 0.125, "dtype": dtype}

        def sketched(geometry: Arguments = geometry) -> Arguments:
            return geometry | {"x": normal(rows, features)}

        def gradient(rank: int = rank, geometry: Arguments = geometry) -> Arguments:
            sketched_x, mean = normal(rank, features), normal(1, features)[0].float()
            more = {"g": normal(rows, out), "sketched_x": sketched_x, "mean": mean, "factor": 1.0, "bias_dtype": dtype}
            return geometry | more

        name = f"sketch_and_mean_at_once, ratio {ratio:g}"
        yield Case("hadamard_at_once", "sketch_and_mean_at_once", name, (rows, features), sketched, _first_and_row)
        name, sizes = f"grad_weight_at_once, ratio {ratio:g}", (rows, features, out)
        yield Case("hadamard_at_once", "grad_weight_at_once", name, sizes, gradient, _first_and_column)


def _stored(y: Tensor, seed: Tensor, kind: str) -> Arguments:
    group = GROUP_BITS // BITS[kind]
    codes, steps, offsets = quantize(y, seed, None, kind=kind, group=group)
    return {
        "codes": codes, "steps": steps, "offsets": offsets, "seed": seed, "kind": kind, "group": group,
        "features": y.shape[1],
    }  # fmt: skip


def _low_bit_cases(shape: tuple[int, int, int], normal: Callable[[int, int], Tensor], seed: Tensor) -> Iterator[Case]:
    sizes = rank, features = rank_of(shape[0], 0.25), shape[1]

    def read_back(result: tuple[Tensor, Tensor, Tensor], arguments: Arguments) -> Tensor:
        return dequantize(*result, seed, kind=arguments["kind"], group=arguments["group"], features=features)

    for kind in KINDS:

        def rounded(kind: str = kind) -> Arguments:
            group = GROUP_BITS // BITS[kind]
            return {"y": normal(rank, features), "seed": seed, "mean": None, "kind": kind, "group": group}

        yield Case("low_bit", "quantize", f"quantize to {kind}", sizes, rounded, read_back)
        make = lambda kind=kind: _stored(normal(rank, features), seed, kind)  # noqa: E731
        yield Case("low_bit", "dequantize", f"dequantize {kind}", sizes, make)


def _quantized_sketch_cases(
    shape: tuple[int, int, int], normal: Callable[[int, int], Tensor], seed: Tensor, dtype: torch.dtype
) -> Iterator[Case]:
    rows, features, _ = shape
    blocks = -(-rows // BLOCK_ROWS)

    def read_back(result: tuple[Tensor, Tensor, Tensor, Tensor], arguments: Arguments) -> Tensor:
        scale = 1 / (arguments["kept"] * arguments["scale"])
        sums = arguments["x"].double().sum(0, keepdim=True)
        decoded = rounded_dtype(dtype, arguments["kind"], blocks)
        return _values_and_rest(result, arguments | {"rows": rows, "scale": scale, "decoded": decoded}, sums)

    for kind, ratio, centred in (
        *itertools.product(("int8", FP8), (0.5, 0.25), (False,)),
        *itertools.product(("int8", "int4"), (0.5, 0.25), (True,)),
    ):

        def sketched(ratio: float = ratio, kind: str = kind, centred: bool = centred) -> Arguments:
            x, kept = normal(rows, features), rank_of(rows, ratio) // blocks
            mean = x.float().mean(0) if centred else None
            return {
                "x": x, "seed": seed, "mean": mean, "blocks": blocks, "kept": kept, "scale": 0.125, "kind": kind,
                "group": GROUP_BITS // BITS[kind], "dtype": dtype,
            }  # fmt: skip

        name = f"hadamard_sketch_quantized to {kind}, ratio {ratio:g}" + (", centred" if centred else "")
        op = "hadamard_sketch_quantized"
        yield Case(op, op, name, shape[:2], sketched, read_back)
    rank = rank_of(rows, 0.1)

    def and_rest(result: tuple[Tensor, Tensor, Tensor, Tensor], arguments: Arguments) -> Tensor:
        of_x = arguments["sums"] is None
        sums = arguments["y"].double().sum(0, keepdim=True) if of_x else arguments["sums"].double()
        return _values_and_rest(result, arguments, sums)

    for kind, of_sketch in itertools.product(KINDS, (True, False)):

        def centred_codes(kind: str = kind, of_sketch: bool = of_sketch) -> Arguments:
            """A sketch, or x itself."""
            where: Arguments = {"y": normal(rows, features), "sums": None, "blocks": 0, "kept": 1, "scale": 1.0}
            if of_sketch:
                where = {"y": normal(rank, features), "sums": normal(blocks, features).float() * (rows / blocks) ** 0.5}
                where |= {"blocks": blocks, "kept": rank // blocks, "scale": 8 * blocks / rank}
            # not quite the mean of x, as a sampled one is: codes that are about that take something off
            mean = None if of_sketch else where["y"].float().mean(0) + 0.1
            decoded = rounded_dtype(dtype, kind, where["blocks"])
            group = GROUP_BITS // BITS[kind]
            return where | {"seed": seed, "mean": mean, "rows": rows, "kind": kind, "group": group, "decoded": decoded}

        name = f"quantize_and_mean to {kind}, {'ratio 0.1' if of_sketch else 'x itself'}"
        yield Case("quantize_and_mean", "quantize_and_mean", name, shape[:2], centred_codes, and_rest)


def _values_and_rest(result: tuple[Tensor, Tensor, Tensor, Tensor], arguments: Arguments, sums: Tensor) -> Tensor:
    """What the codes stand for, and in one more row the error of what is left of the sum of x next to these codes."""
    *codes, rest = result
    seed, how = arguments["seed"], {name: arguments[name] for name in ("kind", "group")}
    y = dequantize(*codes, seed, **how, features=codes[1].shape[1]).double()
    if not rest.numel():
        return y
    more = {name: arguments[name] for name in ("rows", "blocks", "kept", "scale", "decoded")}
    expected = mean_less_codes(sums, *codes, seed, **how, **more)
    # of x itself, all that may be missing is the mean of what is rounded off
    weight = arguments["rows"] ** (1.0 if arguments["blocks"] else 1.5)
    return torch.cat((y, (rest.double() - expected).unsqueeze(0) * weight))


def _product_cases(
    shape: tuple[int, int, int], normal: Callable[[int, int], Tensor], seed: Tensor, dtype: torch.dtype
) -> Iterator[Case]:
    rows, features, out = shape
    op, blocks = "sketched_grad_weight", -(-rows // BLOCK_ROWS)
    first = lambda result, arguments: result[0]  # noqa: E731
    for ratio, centred in (*((ratio, False) for ratio in RATIOS), (0.25, True)):

        def sketches(ratio: float = ratio, centred: bool = centred) -> Arguments:
            rank = rank_of(rows, ratio)
            return {
                "sketched_g": normal(rank, out),
                "sketched_x": normal(rank, features),
                "sums": normal(_FEW_PARTS, out).float() if centred else None,
                "mean": normal(1, features)[0].float() if centred else None,
                "scale": 1.0,
                "dtype": dtype,
            }

        name = f"sketched_grad_weight, ratio {ratio:g}" + (", centred" if centred else "")
        yield Case(op, "sketched_grad_weight", name, shape, sketches, first)

    def sums_and_mean() -> Arguments:
        sums, mean = normal(blocks, out).float(), normal(1, features)[0].float()
        return {"sums": sums, "mean": mean, "dtype": dtype, "bias_dtype": dtype}

    yield Case(op, "outer_product_of_sums", "outer_product_of_sums", shape, sums_and_mean, _first_and_column)
    rank = rank_of(rows, 0.25)
    for kind in KINDS:

        def low_bit_sketches(kind: str = kind) -> Arguments:
            stored = _stored(normal(rank, features), seed, kind)
            more = {"sketched_g": normal(rank, out), "sums": None, "mean": None, "scale": 1.0, "dtype": dtype}
            return stored | more

        name = f"sketched_grad_weight from {kind}, ratio 0.25"
        yield Case(op, "sketched_grad_weight_low_bit", name, shape, low_bit_sketches, first)


def _exact(arguments: Arguments) -> Arguments:
    """The arguments as a float64 computation wants them; steps and offsets stay what they are."""
    wide = {
        name: value.double()
        if isinstance(value, Tensor) and value.is_floating_point() and name not in ("steps", "offsets")
        else value
        for name, value in arguments.items()
    }
    return wide | {name: torch.float64 for name in ("dtype", "bias_dtype") if name in wide}


def _error(value: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference, relative to that of the exact result."""
    size = torch.linalg.vector_norm(exact.double())
    return float(torch.linalg.vector_norm(value.double() - exact.double()) / size.clamp(min=1e-300))


def _reference_of(case: Case) -> Callable[[Arguments], Any]:
    reference = implementation(case.op, case.function, "reference")
    assert reference is not None, f"{case.op} has no reference {case.function}"
    return lambda arguments: call(reference, arguments)


def _exact_sketch(arguments: Arguments) -> Tensor:
    """The sketch that is rounded, float64; and no error of what is left of the sum of x, where it is formed."""
    exact = _exact(arguments)
    sketch = call(hadamard_sketch, exact)
    return sketch if exact["mean"] is None else torch.cat((sketch, torch.zeros_like(sketch[:1])))


def measured_errors(case: Case, device: torch.device) -> tuple[float, float | None]:
    """Return how far the reference and the kernel are from a float64 computation.

    Returns:
        Relative root mean squares; None for a kernel that is not there.
    """
    arguments, reference, launcher = case.make(), _reference_of(case), launcher_of(case, device)
    if case.function == "quantize":
        # Rounding is the op: what was rounded is the truth.
        exact = arguments["y"].double()
    elif case.function == "quantize_and_mean":
        y = arguments["y"].double() - (0.0 if arguments["mean"] is None else arguments["mean"].double())
        exact = torch.cat((y, torch.zeros_like(y[:1])))
    elif case.function == "hadamard_sketch_quantized":
        exact = _exact_sketch(arguments)
    else:
        exact = case.value(reference(_exact(arguments)), arguments)
    reference_error = _error(case.value(reference(arguments), arguments), exact)
    if launcher is None:
        return reference_error, None
    return reference_error, _error(case.value(call(launcher, arguments), arguments), exact)


def measure(case: Case, *, device: torch.device, dtype: torch.dtype, repeats: int) -> Row:
    """Time one case and measure its error.

    Args:
        case: What to call.
        device: Where.
        dtype: Dtype of x and g.
        repeats: Timed repetitions, after two that are not.
    """
    launcher = launcher_of(case, device)
    calls = {"reference": _reference_of(case)}
    if launcher is not None:
        calls["kernel"] = partial(call, launcher)
    reference_error, kernel_error = measured_errors(case, device)
    size = sum(value.nbytes for value in case.make().values() if isinstance(value, Tensor))
    inputs = itertools.cycle([case.make() for _ in range(rotating_count(size, device))])
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, function in calls.items():
            if name == "reference" and repeat >= _REFERENCE_REPEATS + 2:
                continue
            elapsed = milliseconds(partial(function, next(inputs)), device)
            if repeat >= 2:
                times[name].append(elapsed * 1e3)
    low, middle, high = quantiles(torch.tensor(times["reference"]))
    figures = {"reference_us": middle, "reference_error": reference_error}
    note, failed = ("no kernel" if device.type == "cuda" else "kernels need a GPU"), False
    if kernel_error is not None:
        low, kernel, high = quantiles(torch.tensor(times["kernel"]))
        figures |= {"kernel_us": kernel, "kernel_us_q20": low, "kernel_us_q80": high}
        figures |= {"kernel_over_reference": kernel / middle, "kernel_error": kernel_error}
        # a comparison with NaN is False
        failed = not kernel_error <= 2 * reference_error + 1e-5
        note = f"error {kernel_error:.3g}, the reference's {reference_error:.3g}" if failed else ""
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    return _row(case, device, dtype, note=note, failed=failed, repeats=repeats, **rounded)


def _row(case: Case, device: torch.device, dtype: torch.dtype, **figures: Any) -> Row:
    return Row(
        hardware=hardware_name(device),
        dtype=str(dtype).removeprefix("torch."),
        op=case.op,
        name=case.name,
        shape=" x ".join(map(str, case.shape)),
        triton=_triton_version(),
        commit=commit_name(),
        **figures,
    )


def _triton_version() -> str:
    try:
        return importlib.import_module("triton").__version__
    except ModuleNotFoundError:
        return "none"


def _printed(row: Row) -> str:
    cells = (row.reference_us, row.kernel_us, row.kernel_over_reference)
    errors = f"{row.kernel_error} / {row.reference_error}"
    return f"{row.name:68}{row.shape:22}" + "".join(f"{cell:>14}" for cell in cells) + f"{errors:>24}  {row.note}"


def main(arguments: list[str] | None = None) -> int:
    """Measure every case and write one CSV file.

    Args:
        arguments: Command line, `sys.argv[1:]` by default.

    Returns:
        The exit status: 1 where a kernel failed or is less exact than it may be.
    """
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
    print(f"{'':90}" + "".join(f"{head:>14}" for head in heads) + f"{'error, kernel / ref.':>24}")
    found: list[Row] = []
    path = options.results / f"kernels-{slug(hardware)}-{options.dtype}.csv"
    for case in chosen:
        try:
            row = measure(case, device=device, dtype=dtype, repeats=options.repeats)
        except Exception as error:
            # The others' figures are worth having all the same.
            note = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            row = _row(case, device, dtype, note=note, failed=True)
        found.append(row)
        print(_printed(row), flush=True)
        # After each: a run that is ended early has measured something.
        write_csv(path, [asdict(row) for row in found])
    print(f"written to {path}")
    return 1 if any(row.failed for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
