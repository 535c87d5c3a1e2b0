"""The kernel of the mean of a few rows against its plain-torch twin."""

import pytest
import torch

from rmm_linear_kernels.sampled_mean import kernel, reference

ROWS = (1, 2, 7, 255, 256, 257, 509, 5000)


def framed(rows, features, dtype, device):
    """Inside a frame of NaN, so that reading beyond the edge shows."""
    frame = torch.full((rows + 2, features + 3), torch.nan, dtype=dtype, device=device)
    x = frame[1:-1, 2:-1]
    x.copy_(torch.randn(rows, features) + 3 * torch.randn(features))
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_it_is_the_twin_s(rows, dtype, device, nan_poison):
    for features in (1, 16, 37):
        x = framed(rows, features, dtype, device)
        found, twin, truth = kernel.sampled_mean(x), reference.sampled_mean(x), reference.sampled_mean(x.double())
        assert (found.shape, found.dtype) == ((features,), torch.float32)
        allowed = 2 * (twin.double() - truth).abs().max() + 1e-5
        assert (found.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("rows", [257, 509, 70_000])
def test_the_same_rows_are_read(rows, device):
    """Only the twin's rows are numbers: every other one is NaN."""
    x = torch.full((rows, 20), torch.nan, device=device)
    index = reference.sampled_rows(rows, device=device)
    x[index] = torch.randn(reference.SAMPLE, 20, device=device)
    found = kernel.sampled_mean(x)
    torch.testing.assert_close(found, reference.sampled_mean(x), rtol=1e-5, atol=1e-6)
    # and every one of them is read
    for part in range(0, reference.SAMPLE, 51):
        other = x.clone()
        other[index[part]] = torch.nan
        # a group whose mean is NaN is before and behind nothing
        assert not torch.equal(kernel.sampled_mean(other), found)


def test_equal_means_have_places_too(device):
    x = torch.zeros(300, 5, device=device)
    assert torch.equal(kernel.sampled_mean(x), torch.zeros(5, device=device))
    assert torch.equal(kernel.sampled_mean(x + 2), torch.full((5,), 2.0, device=device))
    x[reference.sampled_rows(300, device=device)[::8]] = 7.0
    assert torch.equal(kernel.sampled_mean(x), torch.zeros(5, device=device))


@pytest.mark.parametrize("layout", ["transposed", "every other column", "expanded rows", "expanded columns"])
def test_any_strides(layout, device):
    x = {
        "transposed": torch.randn(41, 300, device=device).t(),
        "every other column": torch.randn(300, 82, device=device)[:, ::2],
        "expanded rows": torch.randn(1, 41, device=device).expand(300, 41),
        "expanded columns": torch.randn(300, 1, device=device).expand(300, 41),
    }[layout]
    assert torch.equal(kernel.sampled_mean(x), kernel.sampled_mean(x.contiguous()))


def test_nothing_comes_of_nothing(device):
    assert kernel.sampled_mean(torch.empty(0, 3, device=device)).tolist() == [0.0] * 3
    assert kernel.sampled_mean(torch.empty(300, 0, device=device)).shape == (0,)
