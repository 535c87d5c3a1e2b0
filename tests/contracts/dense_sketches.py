"""S itself, of each kind of sketch: what `compress` and `backward` have to multiply by."""

import math
from functools import singledispatch

import torch
from torch import Tensor

from rmm_linear import backend
from rmm_linear.sketches import Centered, Hadamard, LowBit, RowsWithoutReplacement, Sketch
from rmm_linear.sketches.centered import centred
from rmm_linear.sketches.dense import DenseProjection
from rmm_linear.sketches.row_sampling import ColumnRowSampling, row_norms
from rmm_linear.sketches.trigonometric import TrigonometricSketch
from rmm_linear_kernels.hadamard.reference import hadamard_dense
from rmm_linear_kernels.projection.reference import projection_dense


@singledispatch
def dense(sketch: Sketch, x: Tensor, seeds: Tensor) -> Tensor:
    """Return S for seeds (draws,), int64: shape (draws, rows, rank), float64.

    The S of a new kind of sketch is a function that is decorated with `@dense.register`.
    """
    raise NotImplementedError(f"S of {type(sketch).__name__} is unknown: register a function, @dense.register")


@dense.register
def _(sketch: Centered, x: Tensor, seeds: Tensor) -> Tensor:
    return dense(sketch.inner, centred(x), seeds)


@dense.register
def _(sketch: LowBit, x: Tensor, seeds: Tensor) -> Tensor:
    """S of the sketch inside, the identity without one; what is stored differs from S^T x by the rounding."""
    if sketch.inner is not None:
        return dense(sketch.inner, x, seeds)
    rows = x.shape[0]
    return torch.eye(rows, dtype=torch.float64, device=x.device).expand(seeds.numel(), rows, rows)


@dense.register
def _(sketch: DenseProjection, x: Tensor, seeds: Tensor) -> Tensor:
    rows, rank = x.shape[0], sketch.rank(x.shape[0])
    return projection_dense(seeds, rows=rows, rank=rank, gaussian=sketch.gaussian, dtype=torch.float64)


@dense.register
def _(sketch: Hadamard, x: Tensor, seeds: Tensor) -> Tensor:
    blocks, kept = sketch.geometry(x.shape[0])
    return hadamard_dense(seeds, rows=x.shape[0], blocks=blocks, kept=kept, dtype=torch.float64)


@dense.register
def _(sketch: TrigonometricSketch, x: Tensor, seeds: Tensor) -> Tensor:
    rows, rank = x.shape[0], sketch.rank(x.shape[0])
    if rows == 0:
        return torch.zeros((seeds.numel(), 0, rank), dtype=torch.float64, device=x.device)
    signs = backend.random.signs(seeds, rows, dtype=torch.float64)
    columns = backend.random.subset(seeds, rows, rank)
    identity = torch.eye(rows, dtype=torch.float64, device=x.device)
    transposed = sketch.transformed(identity, torch.arange(rows, device=x.device))
    chosen = transposed[columns] * signs.unsqueeze(1) * math.sqrt(rows / rank)  # (draws, rank, rows)
    return chosen.transpose(1, 2)


@dense.register
def _(sketch: RowsWithoutReplacement, x: Tensor, seeds: Tensor) -> Tensor:
    rows, rank = x.shape[0], sketch.rank(x.shape[0])
    index = backend.random.subset(seeds, rows, rank)
    found = torch.zeros((seeds.numel(), rows, rank), dtype=torch.float64, device=x.device)
    return found.scatter_(1, index.unsqueeze(1), (rows / max(1, rank)) ** 0.5)


@dense.register
def _(sketch: ColumnRowSampling, x: Tensor, seeds: Tensor) -> Tensor:
    rows, rank = x.shape[0], sketch.rank(x.shape[0])
    found = torch.zeros((seeds.numel(), rows, rank), dtype=torch.float64, device=x.device)
    if rows == 0:
        return found
    index, squared = sketch.sample(row_norms(x, None), seeds, rank=rank)
    return found.scatter_(1, index.unsqueeze(1), squared.sqrt().unsqueeze(1))
