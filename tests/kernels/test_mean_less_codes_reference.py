"""What codes take off the mean, in plain torch, against the sketch as a matrix."""

import pytest
import torch

from rmm_linear_kernels.hadamard_sketch.reference import hadamard_dense
from rmm_linear_kernels.low_bit.reference import dequantize, quantize
from rmm_linear_kernels.mean_less_codes.reference import mean_less_codes


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
