"""What the sketches' kernels have to issue, as a third bound beside bytes and products.

A multiprocessor issues four instructions of a warp a cycle at most. A kernel that moves few bytes for each of its
instructions is bound by that, and no kernel issues one in every slot. Instructions are those of `resources.py`'s table,
as written: the kernels here have no loop but of one turn, and slow paths that are hardly ever taken are counted in.

Reading and computing overlap, of other programs or, in the sketch that is stored as it is, of a program's tiles. The
programs of a small launch all run at once and begin together, so that they may all read before they all compute, which
is predicted as well. Like the roofline, these are predictions for a GPU to refute.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import roofline
from result_files import RESULTS, read_csv
from roofline import Cost, Gpu

from rmm_linear_kernels.ahead_of_time import all_builds
from rmm_linear_kernels.builds import Build

TARGET = "sm_90"
GPU = next(gpu for gpu in roofline.GPUS if gpu.name == "H200")
SHAPE = (8192, 768, 3072)
# Parts of all issue slots that kernels may make use of.
SHARES = (1.0, 0.75, 0.5)
_SHARE_IN_TURN = 0.75
_LANES = 32


@dataclass(frozen=True)
class Kernel:
    """One launch on a layer's tensors.

    Attributes:
        build: Name of what is compiled.
        values: Numbers of x, g or the sketch that the launch goes through.
        cost: Its bytes and products.
    """

    build: str
    values: int
    cost: Cost


def _values_of_program(build: Build) -> int:
    """The numbers of x or g that a program reads, or of the sketch for kernels that read codes or the sketch."""
    constants = build.constants
    if "TILES" in constants:
        return roofline.BLOCK_ROWS * int(constants["TILE"]) * int(constants["TILES"])
    if "BLOCKS" in constants:
        return roofline.BLOCK_ROWS * int(constants["BLOCKS"]) * int(constants["TILE"])
    if "CHUNK" in constants:
        return int(constants["CHUNK"]) * int(constants["BLOCK"])
    return int(constants["ROWS"]) * int(constants["TILE"])


@dataclass(frozen=True)
class Counted:
    """What is known of a build.

    Attributes:
        each: Instructions of a lane for one value.
        at_once: Values that all programs that a GPU holds at once go through between two times of reading.
    """

    each: float
    at_once: float


def counted() -> dict[str, Counted]:
    """Return what the committed table says of the builds that are predicted.

    Returns:
        Build -> its instructions, times its lanes, over the values that a program goes through; and these values, or
        those of a tile where a program reads tile after tile, times the programs that a GPU holds.
    """
    builds = {build.name: build for build in all_builds()}
    found = {}
    for row in read_csv(RESULTS / "resources.csv"):
        build = builds.get(row["name"])
        if row["target"] == TARGET and build is not None and _is_known(build):
            values = _values_of_program(build)
            programs = GPU.multiprocessors * int(row["resident_warps"]) / build.num_warps
            each = int(row["instructions"]) * _LANES * build.num_warps / values
            found[build.name] = Counted(each, programs * values / int(build.constants.get("TILES", 1)))
    return found


def _is_known(build: Build) -> bool:
    return build.name.startswith(("hadamard_sketch", "quantize", "dequantize"))


def seconds(
    kernel: Kernel, counts: dict[str, Counted], share: float, gpu: Gpu = GPU, *, in_turn: bool = False
) -> float:
    """Return the predicted time: for the bytes, the products or the instructions, whichever is longest.

    Args:
        kernel: The launch.
        counts: `counted()`.
        share: Part of the issue slots that it makes use of.
        gpu: Where.
        in_turn: Whether all programs that are held at once read before they compute. Each lot of them then takes both
            times, and the shorter one is hidden by the other lots'.
    """
    build = counts[kernel.build]
    issuing = build.each * kernel.values / _LANES / (share * gpu.issues)
    longest = max(kernel.cost.seconds(gpu), issuing)
    if not in_turn:
        return longest
    lots = max(1.0, kernel.values / build.at_once)
    return longest + min(kernel.cost.copy_seconds(gpu), issuing) / lots


def sketch_of_x(rows: int, features: int, ratio: float) -> Kernel:
    """Return the centred sketch of x in bfloat16.

    Args:
        rows: Rows of x.
        features: Its columns.
        ratio: 0.5, 0.25 or 0.1.
    """
    cost = roofline.hadamard_sketch(rows, features, roofline.rank_of(rows, ratio), with_sum=True, with_mean=True)
    return Kernel(f"hadamard_sketch x bf16 order=64 kept={int(64 * ratio)}", rows * features, cost)


def sketch_of_g(rows: int, out: int, ratio: float) -> Kernel:
    """Return the sketch of g in bfloat16, with its sums.

    Args:
        rows: Rows of g.
        out: Its columns.
        ratio: 0.5, 0.25 or 0.1.
    """
    cost = roofline.hadamard_sketch(rows, out, roofline.rank_of(rows, ratio), with_sum=True)
    return Kernel(f"hadamard_sketch g bf16 order=64 kept={int(64 * ratio)}", rows * out, cost)


def codes_of_x(rows: int, features: int, ratio: float) -> list[Kernel]:
    """Return what makes int8 codes of the centred x and what is left of its mean, in bfloat16.

    Args:
        rows: Rows of x.
        features: Its columns.
        ratio: 0.5 or 0.25, of one launch; or 0.1, of two.
    """
    rank, kept = roofline.rank_of(rows, ratio), int(64 * ratio)
    if ratio in (0.5, 0.25):
        cost = roofline.hadamard_sketch_quantized(rows, features, rank, 8, with_sum=True, with_mean=True)
        return [Kernel(f"hadamard_sketch_quantized int8 bf16 kept={kept} centred", rows * features, cost)]
    cost = roofline.hadamard_sketch(rows, features, rank, with_sum=True, with_mean=True)
    return [
        Kernel(f"hadamard_sketch x for codes bf16 order=64 kept={kept}", rows * features, cost),
        Kernel(
            "quantize_and_mean int8 bf16 order=64 share=32",
            rank * features,
            roofline.quantize_and_mean(rows, features, rank, 8),
        ),
    ]


def decoded(rows: int, features: int, ratio: float) -> Kernel:
    """Return what writes the values of int8 codes in bfloat16, before the product."""
    rank = roofline.rank_of(rows, ratio)
    cost = roofline.dequantize(rank, features, 8)
    # the formula's values are written in float32
    return Kernel("dequantize int8 bf16", rank * features, Cost(cost.moved_bytes - 2 * rank * features, cost.flops))


def low_bit_seconds(
    rows: int, features: int, ratio: float, counts: dict[str, Counted], share: float, *, in_turn: bool = False
) -> float:
    """Return how much longer a step takes with int8 storage.

    Args:
        rows: Rows of x.
        features: Its columns.
        ratio: 0.5, 0.25 or 0.1.
        counts: `counted()`.
        share: Part of the issue slots that kernels make use of.
        in_turn: As for `seconds`.

    Returns:
        Seconds: making codes and reading them, less the sketch that is stored as it is.
    """
    more = [*codes_of_x(rows, features, ratio), decoded(rows, features, ratio)]
    plain = seconds(sketch_of_x(rows, features, ratio), counts, share, in_turn=in_turn)
    return sum(seconds(kernel, counts, share, in_turn=in_turn) for kernel in more) - plain


def _kernels(ratio: float) -> Iterator[tuple[str, Kernel]]:
    rows, features, out = SHAPE
    yield "hadamard_sketch of x - 1 m^T, with its mean", sketch_of_x(rows, features, ratio)
    yield "hadamard_sketch of g, with sums", sketch_of_g(rows, out, ratio)
    yield "hadamard_sketch_quantized of x - 1 m^T to int8, with its mean", codes_of_x(rows, features, ratio)[0]
    yield "low_bit, dequantize int8", decoded(rows, features, ratio)


def kernel_table() -> str:
    """Return what the kernels of a layer issue, and how long that takes."""
    counts = counted()
    lines = []
    for ratio in (0.5, 0.25):
        for name, kernel in _kernels(ratio):
            each = counts[kernel.build].each
            issued = each * kernel.values / _LANES / GPU.issues
            moved = kernel.cost.copy_seconds(GPU)
            needed = 0.75 * issued / moved
            times = (f"{1e6 * time:.1f}" for time in (moved, issued))
            lines.append((name, f"{ratio:g}", f"{each:.1f}", *times, f"{needed:.0%}"))
    heads = ("kernel", "ratio", "instructions a value read", "us for the bytes", "us to issue", "slots for 75 %")
    return roofline.markdown_table(heads, lines)


def low_bit_table() -> str:
    """Return what int8 storage adds to the time of a layer, over nn.Linear's."""
    counts = counted()
    lines = []
    for shape, goals in roofline.GOALS.items():
        exact = roofline.linear_seconds(GPU, *shape)
        for ratio in goals:
            times = [low_bit_seconds(*shape[:2], ratio, counts, share) for share in SHARES]
            times.append(low_bit_seconds(*shape[:2], ratio, counts, _SHARE_IN_TURN, in_turn=True))
            rows, features, out = shape
            lines.append((f"{rows} x {features} -> {out}", f"{ratio:g}", *(f"{time / exact:+.3f}" for time in times)))
    heads = (*(f"{share:.0%} of the slots" for share in SHARES), f"{_SHARE_IN_TURN:.0%}, in turn")
    heads = ("shape", "ratio", *heads)
    return roofline.markdown_table(heads, lines)
