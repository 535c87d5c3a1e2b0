"""Time each Triton kernel against its plain-torch twin, a copy of as many bytes, and a rival; and its error.

    python kernels/benchmarks/each_kernel.py [--only hadamard] [--repeats 20] [--results DIR]

Every repetition times a device copy, the twin, the kernel and its rival, one after the other, on inputs that take turns
and are larger together than the device's cache. Rivals are torch.mm for products, the kernels of which one takes the
place, and butterflies for the Hadamard sketch. Times are medians with 20/80 quantiles. The copy moves as many bytes as
the kernel has to (`roofline.py`): a kernel that is bound by memory is as good as it can be at 1 times the copy's time.
Errors are root mean squares against a float64 computation, relative to its result; a kernel fails if its error is more
than twice its twin's, and 1e-5 above that.

On a processor (`--device cpu`) there is nothing but the twins to time; tiny shapes show that the script works.
"""

import argparse
import importlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import roofline
import torch
from measuring import device_of, hardware_name, milliseconds, quantiles, rotating_count, share_of
from result_files import RESULTS, check_results_folder, commit_name, slug, write_csv
from torch import Tensor

from rmm_linear_kernels.hadamard_at_once.reference import holds_gradient
from rmm_linear_kernels.hadamard_sketch.reference import hadamard_sketch
from rmm_linear_kernels.low_bit.reference import BITS, FP8, dequantize, quantize
from rmm_linear_kernels.quantize_and_mean.reference import mean_less_codes, rounded_dtype
from rmm_linear_kernels.row_sampling.reference import sampling_weights

TINY_SHAPES = ((256, 48, 80),)
RATIOS = (0.5, 0.25, 0.1)
KINDS = ("int8", "int4")
# A twin may take a hundred times as long as its kernel, and its median need not be as sharp.
_TWIN_REPEATS = 5
# Rows of what is done at once.
_FEW_ROWS = 256
# As many sums of parts of g as a product takes as they are.
_FEW_PARTS = 8
# Numbers of runs that rows come in: the first that divides theirs, if any does.
_RUNS = (16, 7, 2)
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call of one op.

    Attributes:
        op: Folder of the op.
        function: Name of the twin and of its kernel's launcher.
        name: What is computed, for people.
        rows: Rows of x.
        features: Columns of what is read.
        out: Columns of g, for a product.
        cost: What it has to do.
        make: Makes a new set of arguments, by name; a function is given those that it has.
        rival: The same in another way, of the same arguments.
        value: What of a result is compared, of the result and the arguments; the result itself by default.
    """

    op: str
    function: str
    name: str
    rows: int
    features: int
    out: int
    cost: roofline.Cost
    make: Callable[[], Arguments]
    rival: Callable[[Arguments], Tensor] | None = None
    value: Callable[[Any, Arguments], Tensor] = field(default=lambda result, arguments: result)


@dataclass(frozen=True)
class Row:
    """One line of the results file; empty where there is nothing to tell."""

    hardware: str
    dtype: str
    op: str
    name: str
    rows: int
    features: int
    out: int
    moved_bytes: int
    flops: int
    copy_us: float | str = ""
    copy_gb_per_s: float | str = ""
    twin_us: float | str = ""
    kernel_us: float | str = ""
    kernel_us_q20: float | str = ""
    kernel_us_q80: float | str = ""
    rival_us: float | str = ""
    kernel_over_copy: float | str = ""
    kernel_over_rival: float | str = ""
    kernel_gb_per_s: float | str = ""
    kernel_tflop_per_s: float | str = ""
    rival_tflop_per_s: float | str = ""
    twin_error: float | str = ""
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
        yield from _row_cases(shape, normal, seed, dtype)
        yield from _low_bit_cases(shape, normal, seed)
        yield from _quantized_sketch_cases(shape, normal, seed, dtype)
        yield from _product_cases(shape, normal, seed, dtype)


def _takes_butterflies(rows: int, device: torch.device) -> bool:
    """Whether the other way to a sketch, a Triton kernel for whole blocks, can run."""
    return device.type == "cuda" and rows % roofline.BLOCK_ROWS == 0 and _triton_version() != "none"


def _sketch_cases(
    shape: tuple[int, int, int], normal: Callable[[int, int], Tensor], seed: Tensor, dtype: torch.dtype
) -> Iterator[Case]:
    rows, features, out = shape
    blocks = -(-rows // roofline.BLOCK_ROWS)
    butterflies = importlib.import_module("butterflies") if _takes_butterflies(rows, seed.device) else None

    def hadamard(columns: int, rank: int, *, centred: bool = False) -> Arguments:
        x = normal(rows, columns)
        kept = rank // blocks
        mean = x.float().mean(0) if centred else None
        return {
            "x": x, "seed": seed, "mean": mean, "blocks": blocks, "kept": kept, "scale": kept**-0.5, "dtype": dtype,
        } | ({} if butterflies is None else {"places": butterflies.places_of_rows(seed, kept)})  # fmt: skip

    def by_butterflies(sums: bool) -> Callable[[Arguments], Tensor] | None:
        if butterflies is None:
            return None
        function = butterflies.hadamard_sketch_by_butterflies
        return lambda arguments: call(function, arguments | {"sums": sums})[0]

    for ratio, centred in ((0.5, False), (0.25, False), (0.25, True), (0.1, False)):
        rank = roofline.rank_of(rows, ratio)
        name = f"hadamard_sketch of x, ratio {ratio:g}" + (", centred" if centred else "")
        cost = roofline.hadamard_sketch(rows, features, rank, with_mean=centred)
        make = lambda rank=rank, centred=centred: hadamard(features, rank, centred=centred)  # noqa: E731
        rival = None if centred else by_butterflies(False)
        yield Case("hadamard_sketch", "hadamard_sketch", name, rows, features, 0, cost, make, rival=rival)
    for ratio in RATIOS:
        rank = roofline.rank_of(rows, ratio)
        yield Case(
            "hadamard_sketch",
            "hadamard_sketch_and_sums",
            f"hadamard_sketch of g, with sums, ratio {ratio:g}",
            rows,
            out,
            0,
            roofline.hadamard_sketch(rows, out, rank, with_sum=True),
            lambda rank=rank: hadamard(out, rank),
            rival=by_butterflies(True),
            value=lambda result, arguments: torch.cat((result[0].double(), result[1].double() / roofline.BLOCK_ROWS)),
        )
    rank = roofline.rank_of(rows, 0.25)
    runs = next((count for count in _RUNS if rows % count == 0 and rows > count), None)

    def in_runs() -> Arguments:
        """Without the first row of each run."""
        assert runs is not None
        x = normal(rows + runs, features).view(runs, rows // runs + 1, features)[:, 1:]
        return hadamard(features, rank, centred=True) | {"x": x}

    inputs = {"x": lambda: hadamard(features, rank, centred=True), **({} if runs is None else {"x in runs": in_runs})}
    for name, make in inputs.items():
        yield Case(
            "hadamard_sketch",
            "hadamard_sketch_and_mean",
            f"hadamard_sketch of {name} with what is left of its mean, ratio 0.25",
            rows,
            features,
            0,
            roofline.hadamard_sketch(rows, features, rank, with_sum=True, with_mean=True),
            make,
            value=lambda result, arguments: torch.cat((result[0].double(), result[1].double().unsqueeze(0))),
        )
    yield Case(
        "sampled_mean",
        "sampled_mean",
        "sampled_mean",
        rows,
        features,
        0,
        roofline.sampled_mean(features, sample=min(rows, roofline.SAMPLE)),
        lambda: {"x": normal(rows, features)},
    )
    for gaussian, ratio in itertools.product((True, False), (0.25, 0.1)):
        rank = max(1, int(ratio * rows))

        def projection(rank: int = rank, gaussian: bool = gaussian) -> Arguments:
            return {
                "x": normal(rows, features), "seed": seed, "mean": None, "rank": rank, "gaussian": gaussian,
                "scale": rank**-0.5, "dtype": dtype, "dense": normal(rank, rows),
            }  # fmt: skip

        yield Case(
            "random_projection",
            "random_projection",
            f"random_projection of x, {'normals' if gaussian else 'signs'}, ratio {ratio:g}",
            rows,
            features,
            0,
            roofline.random_projection(rows, features, rank),
            projection,
            rival=lambda arguments: torch.mm(arguments["dense"], arguments["x"]),
        )


def _at_once_cases(
    shape: tuple[int, int, int], normal: Callable[[int, int], Tensor], seed: Tensor, dtype: torch.dtype
) -> Iterator[Case]:
    """Of so many of the shape's rows and outputs as are few; next to the kernels of large inputs."""
    rows, features, out = min(shape[0], _FEW_ROWS), shape[1], shape[2]
    blocks = -(-rows // roofline.BLOCK_ROWS)
    while not holds_gradient(rows, blocks, out, features, dtype):
        out //= 2

    def kernel_of(op: str, function: str) -> Callable[..., Any]:
        found = implementation(op, function, "kernel" if seed.is_cuda else "reference")
        assert found is not None
        return found

    def one_after_the_other(arguments: Arguments) -> Tensor:
        """What it competes with: about the mean, the sketch with the blocks' parts, and their sum."""
        mean = kernel_of("sampled_mean", "sampled_mean")(arguments["x"])
        return call(kernel_of("hadamard_sketch", "hadamard_sketch_and_mean"), arguments | {"mean": mean})[0]

    def two_after_each_other(arguments: Arguments) -> Tensor:
        """What it competes with: the sketch of g by way of the memory, and the product."""
        sketch = kernel_of("hadamard_sketch", "hadamard_sketch_and_sums")
        sketched, sums = call(sketch, arguments | {"x": arguments["g"], "mean": None})
        mine = {"sketched_g": sketched, "sums": sums, "scale": arguments["factor"]}
        return call(kernel_of("sketched_grad_weight", "sketched_grad_weight"), arguments | mine)[0]

    for ratio in RATIOS:
        rank = roofline.rank_of(rows, ratio)
        geometry = {"seed": seed, "blocks": blocks, "kept": rank // blocks, "scale": 0.125, "dtype": dtype}
        yield Case(
            "hadamard_at_once",
            "sketch_and_mean_at_once",
            f"sketch_and_mean_at_once, ratio {ratio:g}",
            rows,
            features,
            0,
            roofline.sketch_and_mean_at_once(rows, features, rank),
            lambda geometry=geometry: geometry | {"x": normal(rows, features)},
            rival=one_after_the_other,
            value=lambda result, arguments: torch.cat((result[0].double(), result[1].double().unsqueeze(0))),
        )

        def gradient(rank: int = rank, geometry: Arguments = geometry) -> Arguments:
            sketched_x, mean = normal(rank, features), normal(1, features)[0].float()
            more = {"g": normal(rows, out), "sketched_x": sketched_x, "mean": mean, "factor": 1.0, "bias_dtype": dtype}
            return geometry | more

        yield Case(
            "hadamard_at_once",
            "grad_weight_at_once",
            f"grad_weight_at_once, ratio {ratio:g}",
            rows,
            features,
            out,
            roofline.grad_weight_at_once(rows, features, out, rank),
            gradient,
            rival=two_after_each_other,
            value=lambda result, arguments: torch.cat((result[0].double(), result[1].double().unsqueeze(1)), 1),
        )


def _row_cases(
    shape: tuple[int, int, int], normal: Callable[[int, int], Tensor], seed: Tensor, dtype: torch.dtype
) -> Iterator[Case]:
    rows, features, _ = shape
    for ratio in RATIOS:
        rank = max(1, int(ratio * rows))

        def gathered(rank: int = rank) -> Arguments:
            index = torch.randint(rows, (rank,), device=seed.device, dtype=torch.int32)
            x = normal(rows, features)
            return {"x": x, "index": index, "mean": None, "scales": None, "scale": 0.5, "dtype": dtype}

        cost = roofline.gather_rows(features, rank)
        yield Case("row_gather", "gather_rows", f"gather_rows, ratio {ratio:g}", rows, features, 0, cost, gathered)
        x = normal(rows, 1)
        norms = x[:, 0].double().exp()

        def drawn(rank: int = rank, x: Tensor = x) -> Arguments:
            return {"x": x, "seed": seed, "rank": rank, "replacement": True}

        def drawn_by_weight(rank: int = rank, x: Tensor = x, norms: Tensor = norms) -> Arguments:
            weights, ends, factor = sampling_weights(x, norms)
            return {
                "x": x, "seed": seed, "weights": weights, "ends": ends, "factor": factor, "order": None, "size": None,
                "rank": rank,
            }  # fmt: skip

        cost = roofline.uniform_draws(rank)
        yield Case("row_sampling", "uniform_draws", f"uniform_draws, ratio {ratio:g}", rows, 0, 0, cost, drawn)
        yield Case(
            "row_sampling",
            "weighted_draws",
            f"weighted_draws, ratio {ratio:g}",
            rows,
            0,
            0,
            roofline.weighted_draws(rows, rank),
            drawn_by_weight,
            value=lambda result, arguments: torch.cat((result[0].double(), result[1].double())),
        )
    yield Case(
        "row_sampling",
        "sampling_weights",
        "sampling_weights",
        rows,
        0,
        0,
        roofline.sampling_weights(rows),
        lambda: {"x": normal(rows, 1), "norms": normal(rows, 1)[:, 0].double().exp()},
        value=lambda result, arguments: torch.cat((result[0], result[1])),
    )
    yield Case(
        "row_gather",
        "row_norms",
        "row_norms",
        rows,
        features,
        0,
        roofline.row_norms(rows, features),
        lambda: {"x": normal(rows, features), "mean": None},
    )


def _stored(y: Tensor, seed: Tensor, kind: str) -> Arguments:
    group = roofline.GROUP_BITS // BITS[kind]
    codes, steps, offsets = quantize(y, seed, None, kind=kind, group=group)
    return {
        "codes": codes, "steps": steps, "offsets": offsets, "seed": seed, "kind": kind, "group": group,
        "features": y.shape[1],
    }  # fmt: skip


def _low_bit_cases(shape: tuple[int, int, int], normal: Callable[[int, int], Tensor], seed: Tensor) -> Iterator[Case]:
    rows, features, _ = shape
    rank = roofline.rank_of(rows, 0.25)
    for kind in KINDS:
        group = roofline.GROUP_BITS // BITS[kind]

        def rounded(kind: str = kind, group: int = group) -> Arguments:
            return {"y": normal(rank, features), "seed": seed, "mean": None, "kind": kind, "group": group}

        def read_back(result: tuple[Tensor, Tensor, Tensor], arguments: Arguments) -> Tensor:
            return dequantize(
                *result, seed, kind=arguments["kind"], group=arguments["group"], features=arguments["y"].shape[1]
            )

        cost = roofline.quantize(rank, features, BITS[kind])
        name = f"quantize to {kind}, {rank} rows"
        yield Case("low_bit", "quantize", name, rows, features, 0, cost, rounded, value=read_back)
        cost = roofline.dequantize(rank, features, BITS[kind])
        make = lambda kind=kind: _stored(normal(rank, features), seed, kind)  # noqa: E731
        yield Case("low_bit", "dequantize", f"dequantize {kind}, {rank} rows", rows, features, 0, cost, make)


def _quantized_sketch_cases(
    shape: tuple[int, int, int], normal: Callable[[int, int], Tensor], seed: Tensor, dtype: torch.dtype
) -> Iterator[Case]:
    rows, features, _ = shape
    blocks = -(-rows // roofline.BLOCK_ROWS)
    for kind, ratio, centred in (
        *itertools.product(("int8", FP8), (0.5, 0.25), (False,)),
        *itertools.product(("int8", "int4"), (0.5, 0.25), (True,)),
    ):
        rank = roofline.rank_of(rows, ratio)
        group = roofline.GROUP_BITS // BITS[kind]

        def sketched(rank: int = rank, kind: str = kind, group: int = group, centred: bool = centred) -> Arguments:
            x, kept = normal(rows, features), rank // blocks
            mean = x.float().mean(0) if centred else None
            return {
                "x": x, "seed": seed, "mean": mean, "blocks": blocks, "kept": kept, "scale": 0.125, "kind": kind,
                "group": group, "dtype": x.dtype,
            }  # fmt: skip

        def in_two_steps(arguments: Arguments) -> Tensor:
            """What it competes with: the sketch by way of the memory."""
            centred = arguments["mean"] is not None
            module = "kernel" if seed.is_cuda else "reference"
            sketch, rounding = (
                implementation(op, function, module) or implementation(op, function, "reference")
                for op, function in (
                    ("hadamard_sketch", "hadamard_sketch_and_sums" if centred else "hadamard_sketch"),
                    ("quantize_and_mean", "quantize_and_mean") if centred else ("low_bit", "quantize"),
                )
            )
            assert sketch is not None
            assert rounding is not None
            how = {name: arguments[name] for name in ("kind", "group")}
            y = call(sketch, arguments)
            if not centred:
                return rounding(y, seed, None, **how)[0]
            more = {name: arguments[name] for name in ("blocks", "kept")}
            more |= {"rows": rows, "decoded": rounded_dtype(dtype, arguments["kind"], blocks)}
            more["scale"] = 1 / (arguments["kept"] * arguments["scale"])
            y, sums = y
            return rounding(y, seed, None, sums, **how, **more)[0]

        def read_back(result: tuple[Tensor, Tensor, Tensor, Tensor], arguments: Arguments) -> Tensor:
            scale = 1 / (arguments["kept"] * arguments["scale"])
            sums = arguments["x"].double().sum(0, keepdim=True)
            decoded = rounded_dtype(dtype, arguments["kind"], blocks)
            return _values_and_rest(result, arguments | {"rows": rows, "scale": scale, "decoded": decoded}, sums)

        yield Case(
            "hadamard_sketch_quantized",
            "hadamard_sketch_quantized",
            f"hadamard_sketch_quantized to {kind}, ratio {ratio:g}" + (", centred" if centred else ""),
            rows,
            features,
            0,
            roofline.hadamard_sketch_quantized(rows, features, rank, BITS[kind], with_mean=centred, with_sum=centred),
            sketched,
            rival=in_two_steps,
            value=read_back,
        )
    rank = roofline.rank_of(rows, 0.1)
    for kind, of_sketch in itertools.product(KINDS, (True, False)):

        def centred(kind: str = kind, of_sketch: bool = of_sketch) -> Arguments:
            """A sketch, or x itself."""
            where: Arguments = {"y": normal(rows, features), "sums": None, "blocks": 0, "kept": 1, "scale": 1.0}
            if of_sketch:
                where = {"y": normal(rank, features), "sums": normal(blocks, features).float() * (rows / blocks) ** 0.5}
                where |= {"blocks": blocks, "kept": rank // blocks, "scale": 8 * blocks / rank}
            # not quite the mean of x, as a sampled one is: codes that are about that take something off
            mean = None if of_sketch else where["y"].float().mean(0) + 0.1
            decoded = rounded_dtype(dtype, kind, where["blocks"])
            group = roofline.GROUP_BITS // BITS[kind]
            return where | {"seed": seed, "mean": mean, "rows": rows, "kind": kind, "group": group, "decoded": decoded}

        def and_rest(result: tuple[Tensor, Tensor, Tensor, Tensor], arguments: Arguments) -> Tensor:
            of_x = arguments["sums"] is None
            sums = arguments["y"].double().sum(0, keepdim=True) if of_x else arguments["sums"].double()
            return _values_and_rest(result, arguments, sums)

        yield Case(
            "quantize_and_mean",
            "quantize_and_mean",
            f"quantize_and_mean to {kind}, {'ratio 0.1' if of_sketch else 'x itself'}",
            rows,
            features,
            0,
            roofline.quantize_and_mean(rows, features, rank if of_sketch else 0, BITS[kind]),
            centred,
            value=and_rest,
        )


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
    for ratio, centred in (*((ratio, False) for ratio in RATIOS), (0.25, True)):
        rank = roofline.rank_of(rows, ratio)

        def sketches(rank: int = rank, centred: bool = centred) -> Arguments:
            return {
                "sketched_g": normal(rank, out),
                "sketched_x": normal(rank, features),
                "sums": normal(_FEW_PARTS, out).float() if centred else None,
                "mean": normal(1, features)[0].float() if centred else None,
                "scale": 1.0,
                "dtype": dtype,
            }

        yield Case(
            "sketched_grad_weight",
            "sketched_grad_weight",
            f"sketched_grad_weight, ratio {ratio:g}" + (", centred" if centred else ""),
            rows,
            features,
            out,
            roofline.sketched_grad_weight(rank, features, out, with_mean=centred),
            sketches,
            rival=lambda arguments: torch.mm(arguments["sketched_g"].t(), arguments["sketched_x"]),
            value=lambda result, arguments: result[0],
        )
    blocks = -(-rows // roofline.BLOCK_ROWS)
    yield Case(
        "sketched_grad_weight",
        "outer_product_of_sums",
        "outer_product_of_sums",
        rows,
        features,
        out,
        roofline.outer_product_of_sums(blocks, features, out),
        lambda: {
            "sums": normal(blocks, out).float(),
            "mean": normal(1, features)[0].float(),
            "dtype": dtype,
            "bias_dtype": dtype,
        },
        value=lambda result, arguments: torch.cat((result[0].double(), result[1].double().unsqueeze(1)), 1),
    )
    rank = roofline.rank_of(rows, 0.25)
    for kind in KINDS:

        def low_bit_sketches(kind: str = kind) -> Arguments:
            stored = _stored(normal(rank, features), seed, kind)
            more = {"sketched_g": normal(rank, out), "sums": None, "mean": None, "scale": 1.0, "dtype": dtype}
            return stored | more

        def unpacked_product(arguments: Arguments) -> Tensor:
            """What it competes with: the fastest way to the numbers in memory, then cuBLAS."""
            unpack = implementation("low_bit", "dequantize", "kernel") if seed.is_cuda else None
            read = call(unpack or dequantize, arguments).to(arguments["sketched_g"].dtype)
            return torch.mm(arguments["sketched_g"].t(), read)

        yield Case(
            "sketched_grad_weight",
            "sketched_grad_weight_low_bit",
            f"sketched_grad_weight from {kind}, ratio 0.25",
            rows,
            features,
            out,
            roofline.sketched_grad_weight(rank, features, out, bits=BITS[kind]),
            low_bit_sketches,
            rival=unpacked_product,
            value=lambda result, arguments: result[0],
        )


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


def _twin_of(case: Case) -> Callable[[Arguments], Any]:
    reference = implementation(case.op, case.function, "reference")
    assert reference is not None, f"{case.op} has no twin {case.function}"
    return lambda arguments: call(reference, arguments)


def _exact_sketch(arguments: Arguments) -> Tensor:
    """The sketch that is rounded, float64; and no error of what is left of the sum of x, where it is formed."""
    exact = _exact(arguments)
    sketch = call(hadamard_sketch, exact)
    return sketch if exact["mean"] is None else torch.cat((sketch, torch.zeros_like(sketch[:1])))


def measured_errors(case: Case, device: torch.device) -> tuple[float, float | None]:
    """Return how far the twin and the kernel are from a float64 computation.

    Returns:
        Relative root mean squares; None for a kernel that is not there.
    """
    arguments, twin, launcher = case.make(), _twin_of(case), launcher_of(case, device)
    if case.function == "quantize":
        # Rounding is the op: what was rounded is the truth.
        exact = arguments["y"].double()
    elif case.function == "quantize_and_mean":
        y = arguments["y"].double() - (0.0 if arguments["mean"] is None else arguments["mean"].double())
        exact = torch.cat((y, torch.zeros_like(y[:1])))
    elif case.function == "hadamard_sketch_quantized":
        exact = _exact_sketch(arguments)
    else:
        exact = case.value(twin(_exact(arguments)), arguments)
    twin_error = _error(case.value(twin(arguments), arguments), exact)
    if launcher is None:
        return twin_error, None
    return twin_error, _error(case.value(call(launcher, arguments), arguments), exact)


def measure(case: Case, *, device: torch.device, dtype: torch.dtype, repeats: int) -> Row:
    """Time one case and measure its error.

    Args:
        case: What to call.
        device: Where.
        dtype: Dtype of x and g.
        repeats: Timed repetitions, after two that are not.
    """
    twin, launcher = _twin_of(case), launcher_of(case, device)
    kernel = None if launcher is None else (lambda arguments: call(launcher, arguments))
    note = "" if kernel is not None else ("no kernel" if device.type == "cuda" else "kernels need a GPU")
    errors = measured_errors(case, device)
    count = rotating_count(case.cost.moved_bytes, device)
    inputs = itertools.cycle([case.make() for _ in range(count)])
    # Half of the bytes of a copy are read, half are written.
    half = max(1, case.cost.moved_bytes // 2)
    buffers = itertools.cycle(
        [torch.empty(2, half, dtype=torch.uint8, device=device).zero_().unbind(0) for _ in range(count)]
    )

    def copy(_: Arguments) -> None:
        source, target = next(buffers)
        target.copy_(source)

    rival, fault = _working_rival(case)
    note = fault or note
    calls = {"copy": copy, "twin": twin, "kernel": kernel, "rival": rival}
    present = {name: function for name, function in calls.items() if function is not None}
    times: dict[str, list[float]] = {name: [] for name in present}
    for repeat in range(repeats + 2):
        for name, function in present.items():
            if name == "twin" and repeat >= _TWIN_REPEATS + 2:
                continue
            arguments = next(inputs)
            elapsed = milliseconds(lambda function=function, arguments=arguments: function(arguments), device)
            if repeat >= 2:
                times[name].append(elapsed * 1e3)
    middle = {name: quantiles(torch.tensor(measured)) for name, measured in times.items()}
    return _row(case, middle, errors, note, device=device, dtype=dtype, repeats=repeats)


def _working_rival(case: Case) -> tuple[Callable[[Arguments], Tensor] | None, str]:
    """The rival of a case, and what is wrong with it: that takes nothing from what is told of the kernel."""
    if case.rival is None:
        return None, ""
    try:
        case.rival(case.make())
    except Exception as error:
        return None, f"rival: {type(error).__name__}: {error}".splitlines()[0][:300]
    return case.rival, ""


def _row(
    case: Case,
    middle: Mapping[str, tuple[float, float, float]],
    errors: tuple[float, float | None],
    note: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
) -> Row:
    copy, twin = middle["copy"][1], middle["twin"][1]
    figures: dict[str, Any] = {
        "copy_us": copy,
        "copy_gb_per_s": case.cost.moved_bytes / copy / 1e3,
        "twin_us": twin,
        "twin_error": errors[0],
    }
    is_wrong = False
    if "rival" in middle:
        rival = middle["rival"][1]
        figures |= {"rival_us": rival, "rival_tflop_per_s": case.cost.flops / rival / 1e6}
    if "kernel" in middle:
        low, kernel, high = middle["kernel"]
        figures |= {
            "kernel_us": kernel,
            "kernel_us_q20": low,
            "kernel_us_q80": high,
            "kernel_over_copy": kernel / copy,
            "kernel_gb_per_s": case.cost.moved_bytes / kernel / 1e3,
            "kernel_tflop_per_s": case.cost.flops / kernel / 1e6,
            "kernel_error": errors[1],
        }
        if "rival" in middle:
            figures["kernel_over_rival"] = kernel / middle["rival"][1]
        is_wrong = not (errors[1] is not None and errors[1] <= 2 * errors[0] + 1e-5)
    if is_wrong:
        note = f"error {errors[1]:.3g}, the twin's {errors[0]:.3g}"
    return _empty_row(
        case,
        device=device,
        dtype=dtype,
        note=note,
        failed=is_wrong,
        repeats=repeats,
        **{name: _shortened(value) for name, value in figures.items()},
    )


def _shortened(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else value


def _empty_row(case: Case, *, device: torch.device, dtype: torch.dtype, **figures: Any) -> Row:
    return Row(
        hardware=hardware_name(device),
        dtype=str(dtype).removeprefix("torch."),
        op=case.op,
        name=case.name,
        rows=case.rows,
        features=case.features,
        out=case.out,
        moved_bytes=case.cost.moved_bytes,
        flops=case.cost.flops,
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
    size = f"{row.rows} x {row.features}" + (f" -> {row.out}" if row.out else "")
    errors = f"{row.kernel_error} / {row.twin_error}"
    cells = (row.copy_us, row.twin_us, row.kernel_us, row.rival_us, row.kernel_over_copy, row.kernel_over_rival)
    return f"{row.name:46}{size:22}" + "".join(f"{cell:>11}" for cell in cells) + f"{errors:>24}  {row.note}"


def main(arguments: list[str] | None = None) -> int:
    """Measure every case and write one CSV file.

    Args:
        arguments: Command line, `sys.argv[1:]` by default.

    Returns:
        The exit status: 1 where a kernel failed or is less exact than it may be.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for tiny shapes and the twins alone")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their names")
    parser.add_argument(
        "--share", type=share_of, default=(1, 1), metavar="K/N", help="only every Nth of them, from K on"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least one repetition is needed")
    device, dtype = device_of(parser, options.device), getattr(torch, options.dtype)
    check_results_folder(parser, options.results)
    torch.manual_seed(0)
    shapes = tuple(roofline.GOALS) if device.type == "cuda" else TINY_SHAPES
    chosen = [case for case in cases(shapes, device=device, dtype=dtype) if options.only in case.name]
    if not chosen:
        parser.error(f"--only {options.only}: no case has that in its name")
    number, count = options.share
    if number > len(chosen):
        parser.error(f"--share {number}/{count}: there are only {len(chosen)} cases")
    chosen = chosen[number - 1 :: count]
    hardware = hardware_name(device)
    print(f"{hardware}, {options.dtype}, torch {torch.__version__}, triton {_triton_version()}, commit {commit_name()}")
    heads = ("copy us", "twin us", "kernel us", "rival us", "over copy", "/ rival")
    print(f"{'':68}" + "".join(f"{head:>11}" for head in heads) + f"{'error, kernel / twin':>24}")
    found: list[Row] = []
    path = options.results / f"kernels-{slug(hardware)}-{options.dtype}.csv"
    for case in chosen:
        try:
            row = measure(case, device=device, dtype=dtype, repeats=options.repeats)
        except Exception as error:
            # The others' figures are worth having all the same.
            note = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            row = _empty_row(case, device=device, dtype=dtype, note=note, failed=True)
        found.append(row)
        print(_printed(row), flush=True)
        # After each: a run that is ended early has measured something.
        write_csv(path, [asdict(row) for row in found])
    print(f"written to {path}")
    return 1 if any(row.failed for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
