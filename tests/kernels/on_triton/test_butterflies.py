"""The sketch by butterflies, with which the Hadamard sketch's kernel is compared: the same sketch."""

from functools import partial

import pytest
import torch

from rmm_linear_kernels.hadamard_sketch import reference

# cases alike: a GPU runs them all
grid = partial(pytest.param, marks=pytest.mark.grid)


@pytest.fixture
def butterflies(benchmark_script):
    return benchmark_script("butterflies")


@pytest.mark.parametrize("dtype", [torch.float32, grid(torch.bfloat16), grid(torch.float16)], ids=str)
@pytest.mark.parametrize(("blocks", "kept", "features"), [(3, 32, 96), (1, 6, 37), (2, 64, 65)])
def test_both_ways_make_one_sketch(butterflies, dtype, blocks, kept, features, device, nan_poison):
    # rows of a wider matrix, with NaN beside them
    x = torch.full((64 * blocks, features + 3), torch.nan, device=device, dtype=dtype)[:, :features]
    x.copy_(torch.randn(x.shape))
    seed = torch.tensor(5, device=device)
    options = {"blocks": blocks, "kept": kept, "scale": 0.25}
    places = butterflies.places_of_rows(seed, kept)
    assert sorted(places.tolist()) == [-1] * (64 - kept) + list(range(kept))
    expected, sums = reference.hadamard_sketch_and_sums(x.double(), seed, None, **options, dtype=torch.float64)
    for wanted in (False, True):
        found, total = butterflies.hadamard_sketch_by_butterflies(
            x, seed, places, **options, dtype=torch.float32, sums=wanted
        )
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
        assert (total is not None) == wanted
    torch.testing.assert_close(total.double(), sums, rtol=0, atol=1e-4)


def test_other_blocks_are_refused(butterflies, device):
    seed = torch.tensor(5, device=device)
    for x in (torch.ones(63, 8), torch.ones(8, 64).t(), torch.ones(64, 0)):
        with pytest.raises(ValueError, match="pass 64 rows"):
            butterflies.hadamard_sketch_by_butterflies(
                x.to(device), seed, seed, blocks=1, kept=2, scale=1.0, dtype=x.dtype, sums=False
            )


def test_the_benchmark_times_what_makes_the_same(benchmark_script, device, monkeypatch):
    each_kernel = benchmark_script("each_kernel")
    monkeypatch.setattr(each_kernel, "_takes_butterflies", lambda rows, device: True)
    cases = [
        case
        for case in each_kernel.cases(((128, 48, 80),), device=device, dtype=torch.float32)
        if case.op == "hadamard_sketch" and case.rival is not None
    ]
    assert len(cases) == 6
    for case in cases:
        arguments = case.make()
        expected = each_kernel.call(getattr(reference, case.function), arguments)
        expected = expected if isinstance(expected, torch.Tensor) else expected[0]
        torch.testing.assert_close(case.rival(arguments), expected, rtol=0, atol=1e-4)
