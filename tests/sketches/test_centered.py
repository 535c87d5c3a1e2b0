"""Centering: the mean's part is exact."""

import pytest
import torch

from rmm_linear import RMMConfig


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
