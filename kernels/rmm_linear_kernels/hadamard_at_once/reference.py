"""What a forward and a backward pass of few rows need, in plain torch: each a few other operations in turn.

A large input is sketched by kernels that read it once, whose results others add up or multiply. On a small one, the
time of a step is that of its launches, whatever they do: there one kernel reads all there is, several times over where
it has to.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ..hadamard_sketch.reference import hadamard_sketch_and_mean, hadamard_sketch_and_sums
from ..sampled_mean.reference import SAMPLE, sampled_mean
from ..sketched_grad_weight.reference import sketched_grad_weight
from ..strides import as_matrix

# Rows of the largest blocks that a program holds; larger ones belong to ratios below 1/32.
_MOST_BLOCK_ROWS = 64
# Blocks that a program goes through, one after the other.
_MOST_BLOCKS = 8
# Rows and columns of a tile of the gradient, in half precision and in float32.
_TILE, _WIDE_TILE = 64, 32
# Tiles of a gradient, each of which sketches g for itself: as many as a large GPU works on at once, four times over.
_MOST_TILES = 1024
# Sizes whose answer is remembered.
_MOST_REMEMBERED = 4096


def holds_input(rows: int, blocks: int) -> bool:
    """Return whether an input is small enough for `sketch_and_mean_at_once` to be the one kernel of its sketch.

    Args:
        rows: Rows of x, at least 1.
        blocks: Number of strided blocks.

    Returns:
        True up to 256 rows, about whose mean a sample says no less than all of them, in blocks of at most 64.
    """
    return rows <= SAMPLE and rows <= _MOST_BLOCK_ROWS * blocks


def tile_of(dtype: torch.dtype) -> int:
    """Return how many rows and columns of the gradient a program of `grad_weight_at_once` forms.

    Returns:
        64; 32 in float32, which takes more registers.
    """
    return _WIDE_TILE if dtype == torch.float32 else _TILE


# asked at every step, and more than a look-up to answer
@lru_cache(maxsize=_MOST_REMEMBERED)
def holds_gradient(rows: int, blocks: int, out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    """Return whether `grad_weight_at_once` is no slower than a sketch of g and a product: an unmeasured rule.

    Args:
        rows: Rows of g, at least 1.
        blocks: Number of strided blocks.
        out_features: Columns of g.
        in_features: Columns of the sketch of x.
        dtype: Dtype of g.

    Returns:
        True for at most 8 blocks of at most 64 rows, and gradients of at most 1024 tiles: 4096 x 1024 in half
        precision.
    """
    tile = tile_of(dtype)
    tiles = -(-out_features // tile) * -(-in_features // tile)
    return blocks <= _MOST_BLOCKS and rows <= _MOST_BLOCK_ROWS * blocks and tiles <= _MOST_TILES


def sketch_and_mean_at_once(
    x: Tensor, seed: Tensor, *, blocks: int, kept: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sketch of the centred x, and what is left of the mean; `hadamard_sketch_and_mean` tells the rest.

    Args:
        x: Input, shape (rows, features), any float dtype.
        seed: 0-d int64.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations of the sketch, and not of what is taken off the mean.
        dtype: Dtype of the sketch.

    Returns:
        Sketch (blocks * kept, features) of x - 1 m^T, m = `sampled_mean` of x; mean (features,), float32 (float64 for
        float64).
    """
    x = as_matrix(x)
    return hadamard_sketch_and_mean(x, seed, sampled_mean(x), blocks=blocks, kept=kept, scale=scale, dtype=dtype)


def grad_weight_at_once(
    g: Tensor,
    seed: Tensor,
    sketched_x: Tensor,
    mean: Tensor | None,
    *,
    blocks: int,
    kept: int,
    scale: float,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weight's gradient out of g and the stored sketch of x; and the sum of g.

    Args:
        g: Gradient of the output, shape (rows, out), any float dtype.
        seed: 0-d int64, of the sketch of x.
        sketched_x: S^T x as stored, shape (blocks * kept, in), of the dtype that S^T g is held in.
        mean: What goes with the sum of g, shape (in,), or None.
        blocks: Number of strided blocks K.
        kept: Hadamard rows kept of each block, p.
        scale: Factor on the +-1 combinations of g before they are rounded.
        factor: What their product with the sketch of x lacks.
        dtype: Dtype of the gradient, that of `sketched_x` by default.
        bias_dtype: Dtype of the sum of g; None where it is not wanted.

    Returns:
        Gradient (out, in); sum of g (out,), (0,) where it is not wanted.
    """
    sketched_g, sums = hadamard_sketch_and_sums(
        g, seed, None, blocks=blocks, kept=kept, scale=scale, dtype=sketched_x.dtype
    )
    return sketched_grad_weight(sketched_g, sketched_x, sums, mean, scale=factor, dtype=dtype, bias_dtype=bias_dtype)
