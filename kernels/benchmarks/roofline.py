"""What each kernel has to move and to multiply, and how long that takes at best: predictions for a GPU to refute.

A kernel takes the longer one of two times: its bytes at the rate of a device copy, its multiplications and additions at
the rate of a good matrix product. Launches, and what a cache saves, are left out. `each_kernel.py` measures against the
same formulas, and `readme_tables.py` writes the predictions into kernels/README.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass

BLOCK_ROWS = 64
# Columns of a tile of a gradient that is formed at once: each sketches g for itself.
_AT_ONCE_TILE = 64
# shape (rows, in, out) -> the time over nn.Linear's that is aimed at, by ratio
GOALS = {
    (8192, 768, 3072): {0.5: 0.97, 0.25: 0.90, 0.1: 0.85},
    (16384, 1024, 4096): {0.5: 0.97, 0.25: 0.90, 0.1: 0.85},
    (8192, 4096, 14336): {0.5: 0.90, 0.25: 0.82, 0.1: 0.77},
}
# Other aims. What int8 storage may add to a layer's time, over nn.Linear's.
INT8_GOAL = 0.03
# Share of a copy's bandwidth that hadamard_sketch is to reach, and from how many features on.
SKETCH_COPY_SHARE, SKETCH_FEATURES = 0.75, 768
# Times rank (in + out) elements that a step may allocate beyond inputs and outputs.
TRANSIENT_GOAL = 2
# Time of a tiny step over nn.Linear's, by the ways to launch it; the fastest of them counts.
LAUNCH_GOALS = {("eager",): 3.0, ("graph", "compiled"): 1.5}
# Bytes of a number in half precision, of float32, and of a seed.
_HALF, _WIDE, _SEED = 2, 4, 8
# Bits of the codes that share a step and an offset, of two bytes each, in low-bit storage: `LowBit`'s.
GROUP_BITS = 1024
# Rows out of which the mean is guessed that is taken off x.
SAMPLE = 256
# Share of the data sheet's rates that a large copy and a large matrix product reach.
COPY_SHARE, PRODUCT_SHARE = 0.9, 0.75


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet.

    Attributes:
        name: For people.
        bandwidth: Bytes a second of its memory.
        multiplication: Additions and multiplications a second of matrices in bfloat16, dense.
        multiprocessors: Their number.
        clock: Their cycles a second.
    """

    name: str
    bandwidth: float
    multiplication: float
    multiprocessors: int
    clock: float

    @property
    def issues(self) -> float:
        """Instructions of warps that are issued a second at most: 4 a cycle by each multiprocessor."""
        return 4 * self.multiprocessors * self.clock


GPUS = (
    Gpu("A100", 2.0e12, 312e12, 108, 1.41e9),
    Gpu("H100", 3.35e12, 989e12, 132, 1.83e9),
    Gpu("H200", 4.8e12, 989e12, 132, 1.83e9),
)


@dataclass(frozen=True)
class Cost:
    """What one call has to do, if everything is read once and written once.

    Attributes:
        moved_bytes: Bytes read and bytes written.
        flops: Multiplications and additions, two for each multiply-add.
    """

    moved_bytes: int
    flops: int

    def copy_seconds(self, gpu: Gpu) -> float:
        """Return how long a copy takes that moves as many bytes."""
        return self.moved_bytes / (COPY_SHARE * gpu.bandwidth)

    def seconds(self, gpu: Gpu) -> float:
        """Return the predicted time.

        Returns:
            Seconds: for the bytes or for the products, whichever is longer.
        """
        return max(self.copy_seconds(gpu), self.flops / (PRODUCT_SHARE * gpu.multiplication))


def rank_of(rows: int, ratio: float) -> int:
    """Return the rows that the Hadamard sketch keeps.

    Args:
        rows: Rows of x.
        ratio: At least 1/32.
    """
    blocks = -(-rows // BLOCK_ROWS)
    return blocks * max(1, int(ratio * rows / blocks))


def product(rows: int, inner: int, columns: int) -> Cost:
    """Return the cost of a matrix product in half precision, (rows, inner) times (inner, columns)."""
    return Cost(_HALF * (rows * inner + inner * columns + rows * columns), 2 * rows * inner * columns)


def column_sum(rows: int, features: int) -> Cost:
    """Return the cost of the sum of all rows."""
    return Cost(_HALF * rows * features + _WIDE * features, rows * features)


def hadamard_sketch(rows: int, features: int, rank: int, *, with_sum: bool = False, with_mean: bool = False) -> Cost:
    """Return the cost of the strided-block Hadamard sketch.

    Args:
        rows: Rows read.
        features: Their length.
        rank: Rows written.
        with_sum: Also write a vector for every block, in float32: its column sum, or its part of what is left of the
            mean.
        with_mean: Also read a mean.

    Returns:
        The cost.
    """
    sums = _WIDE * -(-rows // BLOCK_ROWS) * features if with_sum else 0
    mean = _WIDE * features if with_mean else 0
    return Cost(_HALF * (rows + rank) * features + _SEED + sums + mean, 2 * BLOCK_ROWS * rank * features)


def sketch_and_mean_at_once(rows: int, features: int, rank: int) -> Cost:
    """Return the cost of the sketch of few rows with what is left of their mean, all rows read once from memory."""
    return Cost(_HALF * (rows + rank) * features + _SEED + _WIDE * features, 2 * BLOCK_ROWS * rank * features)


def grad_weight_at_once(rows: int, features: int, out: int, rank: int, *, with_mean: bool = True) -> Cost:
    """Return the cost of a small gradient out of g and the sketch of x, both read once from memory.

    Args:
        rows: Rows of g.
        features: Columns of the sketch.
        out: Columns of g.
        rank: Rows of the sketch.
        with_mean: Also add the outer product of the sum of g and a mean.

    Returns:
        The cost: g is sketched once for every 64 columns of the gradient.
    """
    moved = _HALF * (rows * out + rank * features + out * features + out) + _SEED + _WIDE * features * with_mean
    sketches = -(-features // _AT_ONCE_TILE) * 2 * BLOCK_ROWS * rank * out
    return Cost(moved, sketches + 2 * (rank + with_mean) * out * features + rows * out)


def sampled_mean(features: int, *, sample: int = SAMPLE) -> Cost:
    """Return the cost of about the mean of all rows, out of a few.

    Args:
        features: Length of a row.
        sample: Rows read.

    Returns:
        The cost.
    """
    return Cost(_HALF * sample * features + _WIDE * features, sample * features)


def hadamard_sketch_quantized(
    rows: int, features: int, rank: int, bits: int, *, with_sum: bool = False, with_mean: bool = False
) -> Cost:
    """Return the cost of the Hadamard sketch in a few bits, which is written as codes alone.

    Args:
        rows: Rows read.
        features: Their length.
        rank: Rows of the sketch.
        bits: Bits of a code.
        with_sum: Also write a vector for every group of blocks that share a step, in float32: its part of what is left
            of the mean.
        with_mean: Also read a mean.

    Returns:
        The cost.
    """
    sums = _WIDE * -(-rank * bits // GROUP_BITS) * features if with_sum else 0
    mean = _WIDE * features if with_mean else 0
    moved = _HALF * rows * features + _codes(rank, features, bits) + _SEED + sums + mean
    return Cost(moved, (2 * BLOCK_ROWS + 8) * rank * features)


def quantize_and_mean(rows: int, features: int, rank: int, bits: int) -> Cost:
    """Return the cost of rounding to a few bits and of what the codes take off the mean, with the sum of its parts.

    Args:
        rows: Rows of x.
        features: Their length.
        rank: Rows of the sketch, next to which the sums of the blocks of x are read; 0 for x itself, about a mean.
        bits: Bits of a code.

    Returns:
        The cost: a part for every group of rows is written and read again.
    """
    read = rank or rows
    sums = 2 * -(-read * bits // GROUP_BITS) + 1 + (-(-rows // BLOCK_ROWS) if rank else 1)
    moved = _HALF * read * features + _codes(read, features, bits) + _SEED + _WIDE * sums * features
    return Cost(moved, 10 * read * features)


def random_projection(rows: int, features: int, rank: int) -> Cost:
    """Return the cost of a dense random projection that is made in registers.

    Args:
        rows: Rows read.
        features: Their length.
        rank: Rows written.

    Returns:
        The cost, without that of the random bits.
    """
    return Cost(_HALF * (rows + rank) * features + _SEED, 2 * rows * rank * features)


def gather_rows(features: int, rank: int) -> Cost:
    """Return the cost of copying chosen rows.

    Args:
        features: Length of a row.
        rank: Rows read and written.

    Returns:
        The cost.
    """
    return Cost(2 * _HALF * rank * features + 4 * rank, rank * features)


def row_norms(rows: int, features: int) -> Cost:
    """Return the cost of the norms of all rows.

    Args:
        rows: Rows read.
        features: Their length.

    Returns:
        The cost; norms are written in float64.
    """
    return Cost(_HALF * rows * features + 8 * rows, 2 * rows * features)


def uniform_draws(rank: int) -> Cost:
    """Return the cost of drawing rows with replacement.

    Returns:
        The cost; row numbers are written in 64 bits.
    """
    return Cost(_SEED + 8 * rank, rank)


def sampling_weights(rows: int) -> Cost:
    """Return the cost of the integer weights of all rows, and of their sums.

    Returns:
        The cost: norms in float64, which are read twice, and two numbers of 64 bits for each.
    """
    return Cost(2 * 8 * rows + 2 * 8 * rows, 4 * rows)


def weighted_draws(rows: int, rank: int) -> Cost:
    """Return the cost of drawing rows by their weights.

    Args:
        rows: Rows, whose sums of weights are looked into.
        rank: Rows drawn.

    Returns:
        The cost: a draw is a search among the sums, which stay in the cache; it reads a weight, and writes 8 bytes.
    """
    return Cost(_SEED + 8 * rows + (8 + 8) * rank, rank * rows.bit_length())


def _codes(rows: int, features: int, bits: int) -> int:
    return rows * (-(-features * bits // 8)) + 2 * _HALF * -(-rows * bits // GROUP_BITS) * features


def quantize(rows: int, features: int, bits: int) -> Cost:
    """Return the cost of rounding to a few bits.

    Args:
        rows: Rows read.
        features: Their length.
        bits: Bits of a code.

    Returns:
        The cost.
    """
    return Cost(_HALF * rows * features + _codes(rows, features, bits) + _SEED, 8 * rows * features)


def dequantize(rows: int, features: int, bits: int) -> Cost:
    """Return the cost of reading codes and writing what they stand for in float32.

    Args:
        rows: Rows written.
        features: Their length.
        bits: Bits of a code.

    Returns:
        The cost.
    """
    return Cost(_codes(rows, features, bits) + _SEED + _WIDE * rows * features, 4 * rows * features)


def sketched_grad_weight(
    rank: int, features: int, out: int, *, with_mean: bool = False, bits: int | None = None
) -> Cost:
    """Return the cost of (S^T g)^T (S^T x) in half precision, written in the dtype of the weight.

    Args:
        rank: Rows of both sketches.
        features: Columns of the one.
        out: Columns of the other.
        with_mean: Also add the outer product of a column sum and a mean.
        bits: Read S^T x as codes of so many bits, or as it is for None.

    Returns:
        The cost.
    """
    cost = product(out, rank, features)
    outer = Cost(_WIDE * (features + out), 2 * features * out) if with_mean else Cost(0, 0)
    read = 0 if bits is None else _codes(rank, features, bits) + _SEED - _HALF * rank * features
    return Cost(cost.moved_bytes + outer.moved_bytes + read, cost.flops + outer.flops)


def outer_product_of_sums(parts: int, features: int, out: int, *, with_mean: bool = True) -> Cost:
    """Return the cost of the sum of g out of the sums of its parts, and of its outer product with a mean."""
    written = _HALF * out * features + _WIDE * features if with_mean else 0
    return Cost(_WIDE * parts * out + _HALF * out + written, parts * out + (out * features if with_mean else 0))


def linear_seconds(gpu: Gpu, rows: int, features: int, out: int) -> float:
    """Return the predicted time of nn.Linear, forward and backward: three products and the sum of g."""
    parts = (
        product(rows, features, out),
        product(rows, out, features),
        product(out, rows, features),
        column_sum(rows, out),
    )
    return sum(part.seconds(gpu) for part in parts)


def sketched_seconds(gpu: Gpu, rows: int, features: int, out: int, ratio: float, *, center: bool) -> float:
    """Return the predicted time of the sketched layer, forward and backward.

    Two products as before; a sketch of x; one pass over g for its sketch and the sums of its blocks, and these sums'
    sum; the smaller product. Where the layer centres, also a few rows of x for about its mean; the blocks' parts of
    what is left of the mean, which come with x's sketch, and their sum; and the outer product of the column sum and the
    mean, written before the smaller product, which cuBLAS then reads and adds to.

    Args:
        gpu: Where.
        rows: Rows of x.
        features: Its columns.
        out: Columns of the output.
        ratio: Rows kept over rows.
        center: Whether the mean of x is kept.
    """
    rank, blocks = rank_of(rows, ratio), -(-rows // BLOCK_ROWS)
    parts = [
        product(rows, features, out),
        product(rows, out, features),
        hadamard_sketch(rows, features, rank, with_sum=center, with_mean=center),
        hadamard_sketch(rows, out, rank, with_sum=True),
        outer_product_of_sums(blocks, features, out, with_mean=center),
        sketched_grad_weight(rank, features, out),
    ]
    if center:
        parts += [sampled_mean(features), Cost(_WIDE * (blocks + 1) * features, blocks * features)]
        # the product reads what it is added to
        parts += [Cost(_HALF * out * features, 0)]
    return sum(part.seconds(gpu) for part in parts)


def kernel_costs(rows: int, features: int, out: int, ratio: float) -> list[tuple[str, Cost]]:
    """Return the cost of each kernel on one layer's tensors.

    Returns:
        (what, cost) pairs.
    """
    rank = rank_of(rows, ratio)
    return [
        ("hadamard_sketch of x", hadamard_sketch(rows, features, rank)),
        (
            "hadamard_sketch of x - 1 m^T, with its mean",
            hadamard_sketch(rows, features, rank, with_sum=True, with_mean=True),
        ),
        ("hadamard_sketch of g, with sums", hadamard_sketch(rows, out, rank, with_sum=True)),
        ("sampled_mean", sampled_mean(features)),
        ("random_projection of x", random_projection(rows, features, rank)),
        ("row_gather, gather_rows", gather_rows(features, rank)),
        ("row_gather, row_norms", row_norms(rows, features)),
        ("row_sampling, uniform_draws", uniform_draws(rank)),
        ("row_sampling, sampling_weights", sampling_weights(rows)),
        ("row_sampling, weighted_draws", weighted_draws(rows, rank)),
        ("low_bit, quantize to int8", quantize(rank, features, 8)),
        ("low_bit, quantize to int4", quantize(rank, features, 4)),
        ("hadamard_sketch_quantized to int8", hadamard_sketch_quantized(rows, features, rank, 8)),
        (
            "hadamard_sketch_quantized of x - 1 m^T to int8, with its mean",
            hadamard_sketch_quantized(rows, features, rank, 8, with_sum=True, with_mean=True),
        ),
        ("quantize_and_mean to int8", quantize_and_mean(rows, features, rank, 8)),
        ("quantize_and_mean of x itself to int8", quantize_and_mean(rows, features, 0, 8)),
        ("low_bit, dequantize int8", dequantize(rank, features, 8)),
        ("outer_product_of_sums", outer_product_of_sums(-(-rows // BLOCK_ROWS), features, out)),
        ("sketched_grad_weight", sketched_grad_weight(rank, features, out)),
        ("sketched_grad_weight from int8", sketched_grad_weight(rank, features, out, bits=8)),
    ]


_FORMULAS = (
    ("hadamard_sketch of x", "2 in (rows + rank)", "128 rank in"),
    ("hadamard_sketch of x - 1 m^T, with its mean", "2 in (rows + rank) + 4 in rows / 64", "128 rank in"),
    ("hadamard_sketch of g, with sums", "2 out (rows + rank) + 4 out rows / 64", "128 rank out"),
    ("sketch_and_mean_at_once", "2 in (rows + rank) + 4 in", "128 rank in"),
    ("grad_weight_at_once", "2 (rows out + rank in + out in) + 4 in", "4 rank out in"),
    ("sampled_mean", "512 in", "256 in"),
    ("random_projection of x", "2 in (rows + rank)", "2 rows rank in"),
    ("row_gather, gather_rows", "4 rank in + 4 rank", "rank in"),
    ("row_gather, row_norms", "2 rows in + 8 rows", "2 rows in"),
    ("row_sampling, uniform_draws", "8 rank", "rank"),
    ("row_sampling, sampling_weights", "32 rows", "4 rows"),
    ("row_sampling, weighted_draws", "8 rows + 16 rank", "rank log2(rows)"),
    ("low_bit, quantize to b bits", "2 rank in + rank in b (1/8 + 1/256)", "8 rank in"),
    ("hadamard_sketch_quantized to b bits", "2 rows in + rank in b (1/8 + 1/256)", "136 rank in"),
    ("hadamard_sketch_quantized of x - 1 m^T, with its mean", "2 rows in + rank in b (1/8 + 1/128)", "136 rank in"),
    ("quantize_and_mean to b bits", "rank in (2 + b (1/8 + 3/256)) + in rows / 16", "10 rank in"),
    ("quantize_and_mean of x itself to b bits", "rows in (2 + b (1/8 + 3/256))", "10 rows in"),
    ("low_bit, dequantize b bits", "rank in b (1/8 + 1/256) + 4 rank in", "4 rank in"),
    ("outer_product_of_sums", "4 out rows / 64 + 2 out (in + 1) + 4 in", "out in + out rows / 64"),
    ("sketched_grad_weight", "2 (rank out + rank in + out in)", "2 rank in out"),
    ("sketched_grad_weight from b bits", "2 (rank out + out in) + rank in b (1/8 + 1/256)", "2 rank in out"),
    ("nn.Linear, each of 3 products", "2 (rows in + rows out + in out)", "2 rows in out"),
    ("nn.Linear, sum of g", "2 rows out + 4 out", "rows out"),
)


def markdown_table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a table for a README.

    Args:
        heads: Its heads.
        lines: Its lines, each of as many cells.
    """
    heads = list(heads)
    text = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in text)


def _size(shape: tuple[int, int, int]) -> str:
    rows, features, out = shape
    return f"{rows} x {features} -> {out}"


def formula_table() -> str:
    """Return the formulas."""
    return markdown_table(("kernel", "bytes moved", "FLOPs"), _FORMULAS)


def kernel_table(ratio: float = 0.25) -> str:
    """Return the predicted time of each kernel."""
    lines = []
    for shape in GOALS:
        for name, cost in kernel_costs(*shape, ratio):
            cells = []
            for gpu in GPUS:
                over = cost.seconds(gpu) / cost.copy_seconds(gpu)
                cells.append(f"{1e6 * cost.seconds(gpu):.1f} ({over:.2f})")
            lines.append((_size(shape), name, f"{cost.moved_bytes / 1e6:.1f}", f"{cost.flops / 1e9:.2f}", *cells))
    return markdown_table(("shape", f"kernel, ratio {ratio:g}", "MB", "GFLOP", *(gpu.name for gpu in GPUS)), lines)


def layer_table() -> str:
    """Return the predicted time of a converted layer over nn.Linear's."""
    lines = []
    for shape, goals in GOALS.items():
        for ratio, goal in goals.items():
            cells = []
            for gpu in GPUS:
                exact = linear_seconds(gpu, *shape)
                times = [sketched_seconds(gpu, *shape, ratio, center=center) / exact for center in (False, True)]
                cells.append(" / ".join(f"{time:.3f}" for time in times))
            lines.append((_size(shape), f"{ratio:g}", f"{limit(ratio):.3f}", *cells, f"{goal:.2f}"))
    heads = ("shape", "ratio", "limit", *(f"{gpu.name}, plain / centred" for gpu in GPUS), "goal")
    return markdown_table(heads, lines)


def limit(ratio: float) -> float:
    """Return the time over nn.Linear's of a layer whose sketches cost nothing: one of three equal products shrinks.

    Returns:
        1 - (1 - ratio) / 3.
    """
    return 1 - (1 - ratio) / 3
