"""Inputs of kernels, and how good their results are."""

from functools import partial

import pytest
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)


def operands(rows, features, dtype, device, spread=1.0):
    """An input inside a frame of NaN, so that reading beyond its edge shows, and a mean."""
    frame = torch.full((rows + 2, features + 3), torch.nan, dtype=dtype, device=device)
    x = frame[1:-1, 2:-1]
    x.copy_(torch.randn(rows, features) * spread)
    return x, torch.randn(features, device=device) * spread


# (rows, features) of any strides
LAYOUTS = {
    "transposed": lambda rows, features, **on: torch.randn(features, rows, **on).t(),
    "every other column": lambda rows, features, **on: torch.randn(rows, 2 * features, **on)[:, ::2],
    "expanded rows": lambda rows, features, **on: torch.randn(1, features, **on).expand(rows, features),
    "expanded columns": lambda rows, features, **on: torch.randn(rows, 1, **on).expand(rows, features),
}


def assert_as_good(kernel, reference, x, seed, mean, *, dtype, **how):
    """A kernel's error against float64 is at most twice the reference's, next to the size of the result."""
    found, plain = (sketch(x, seed, mean, **how, dtype=dtype) for sketch in (kernel, reference))
    truth = reference(x.double(), seed, None if mean is None else mean.double(), **how, dtype=torch.float64)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, plain.shape, True)
    allowed = 2 * (plain.double() - truth).abs().max() + 1e-5 * truth.abs().max()
    assert ((found.double() - truth).abs() <= allowed).all()
