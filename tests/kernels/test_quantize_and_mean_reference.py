"""What codes take off the mean, in plain torch, against the sketch as a matrix."""

import pytest
import torch

from rmm_linear_kernels.hadamard_sketch.reference import hadamard_dense
from rmm_linear_kernels.low_bit.reference import dequantize, quantize
from rmm_linear_kernels.quantize_and_mean.reference import mean_less_codes, quantize_and_mean


@pytest.mark.parametrize("decoded", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "blocks", "kept"), [(128, 2, 32), (187, 3, 6), (300, 1, 2), (50, 0, 1), (1, 1, 1)])
def test_it_is_the_mean_less_the_decoded_sketch_s_own(rows, blocks, kept, decoded, device):
    seed, how = torch.tensor(5, device=device), {"kind": "int4", "group": 32}
    rank = blocks * kept or rows
    codes = quantize(torch.randn(rank, 7).to(device), seed, None, **how)
    sums = torch.randn(3, 7, dtype=torch.float64).to(device) * rows
    geometry = {"rows": rows, "blocks": blocks, "kept": kept, "scale": 0.4}
    found = mean_less_codes(sums, *codes, seed, **geometry, **how, decoded=decoded)
    values = dequantize(*codes, seed, **how, features=7, dtype=decoded).double()
    ones = torch.ones(rows, dtype=torch.float64, device=device)
    if blocks:
        dense = hadamard_dense(seed.unsqueeze(0), rows=rows, blocks=blocks, kept=kept, dtype=torch.float64)[0]
        ones = dense.t() @ ones * kept**0.5
    torch.testing.assert_close(found, (sums.sum(0) - 0.4 * values.t() @ ones) / rows, rtol=1e-9, atol=1e-12)


def test_nothing_comes_of_nothing(device):
    seed, how = torch.tensor(5, device=device), {"kind": "int8", "group": 128}
    for features in (0, 3):
        codes = quantize(torch.empty(0, features, device=device), seed, None, **how)
        sums = torch.empty(0, features, device=device)
        found = mean_less_codes(sums, *codes, seed, rows=0, blocks=0, kept=1, scale=1.0, **how, decoded=torch.float32)
        assert found.tolist() == [0.0] * features


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_both_together_are_one_after_the_other(dtype, device):
    seed, how = torch.tensor(5, device=device), {"kind": "int8", "group": 32}
    y, mean, sums = (torch.randn(*size).to(device, dtype) for size in ((60, 7), (7,), (3, 7)))
    sums = sums.double() if dtype == torch.float64 else sums.float()
    for centre, given, blocks, kept in ((mean, None, 0, 1), (None, None, 0, 1), (None, sums, 3, 20)):
        options = {"rows": 60 if given is None else 187, "blocks": blocks, "kept": kept, "scale": 0.4}
        options |= how | {"decoded": torch.bfloat16}
        *codes, rest = quantize_and_mean(y, seed, centre, given, **options)
        for one, other in zip(codes, quantize(y, seed, centre, **how), strict=True):
            assert torch.equal(one, other)
        given = y.to(sums.dtype).sum(0, keepdim=True) if given is None else given
        torch.testing.assert_close(rest, mean_less_codes(given, *codes, seed, **options))
        assert rest.dtype == sums.dtype
