"""Centering: the mean's part is exact, and costs its own bytes."""

import pytest
import torch

from rmm_linear import RMMConfig
from rmm_linear.sketches import Centered, Hadamard, LowBit

ROWS = 389


def pair(rows=ROWS, dtype=torch.float64):
    return (torch.randn(rows, 12) + 5).to(dtype), (torch.randn(rows, 10) - 2).to(dtype)


@pytest.mark.parametrize("inner", [Hadamard(ratio=0.3), LowBit(Hadamard(ratio=0.3), "int8")], ids=str)
def test_the_estimate_is_the_mean_s_part_and_the_inner_sketch_s_of_the_rest(inner):
    x, g = pair()
    sketch, seed = Centered(inner), torch.tensor(5)
    saved = sketch.compress(x, seed)
    torch.testing.assert_close(saved.tensors[-1], x.mean(0))
    centred = inner.compress(x, seed, mean=x.mean(0))
    rest = inner.grad_weight(g - g.mean(0), centred)
    expected = rest + torch.outer(g.sum(0), x.mean(0))
    torch.testing.assert_close(sketch.backward(g, saved)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ratio", [0.4, 0.004, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", [None, "int8", "int4"])
def test_a_gradient_of_equal_rows_has_no_noise(storage, dtype, ratio):
    """It is zero once it is centred; in blocks of 64 rows and of 550, and of x itself."""
    x, g = (torch.randn(1100, 12) + 2).to(dtype), torch.ones(1100, 10, dtype=dtype)
    sketch = RMMConfig(ratio=ratio, storage=storage).sketch_object
    found, bias = sketch.backward(g, sketch.compress(x, torch.tensor(5)), dtype=torch.float32)
    expected = x.double().sum(0).expand(10, 12)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6 * float(expected.abs().max()))
    assert bias.tolist() == torch.full((10,), 1100.0).to(dtype).tolist()
