"""A whole layer on Triton kernels: what a GPU runs, without one."""

import pytest
import torch
from operands import DTYPES, grid

import rmm_linear
from rmm_linear import RMMConfig, backend
from rmm_linear.functional import linear

ROWS, FEATURES, OUTPUTS = 132, 24, 20
# one of each kind; the interpreter takes seconds for a case
CASES = [
    (RMMConfig(ratio=0.4), torch.float32),
    (RMMConfig(ratio=0.4), torch.bfloat16),
    (RMMConfig(ratio=0.4, center=False), torch.float16),
    (RMMConfig(ratio=0.4, sketch="crs", center=False), torch.float32),
    (RMMConfig(ratio=0.4, sketch="rademacher"), torch.bfloat16),
    (RMMConfig(ratio=0.4, storage="int8"), torch.bfloat16),
    (RMMConfig(ratio=1.0, storage="int4"), torch.float16),
]
CONFIGS = [
    *(RMMConfig(ratio=0.4, sketch=sketch, center=center) for sketch in ("hadamard", "crs") for center in (False, True)),
    *(RMMConfig(ratio=0.4, sketch=sketch) for sketch in ("gaussian", "rademacher", "rows_without_replacement", "dct")),
    *(RMMConfig(ratio=ratio, storage=storage) for storage in ("int8", "int2") for ratio in (0.4, 1.0)),
    RMMConfig(ratio=0.4, keep_tokens=(0, -1)),
    RMMConfig(ratio=0.4, storage="int4", keep_tokens=(0, -1)),
]


def gradients(config, dtype, device, *, kernels):
    torch.manual_seed(0)
    x = (torch.randn(3, ROWS // 3, FEATURES) + torch.randn(FEATURES)).to(device, dtype).requires_grad_()
    weight = torch.randn(OUTPUTS, FEATURES).to(device, dtype).requires_grad_()
    offset = torch.randn(OUTPUTS).to(device, dtype).requires_grad_()
    g = (torch.randn(3, ROWS // 3, OUTPUTS) + torch.randn(OUTPUTS)).to(device, dtype)
    with rmm_linear.use_kernels(kernels):
        output = linear(x, weight, offset, config=config.replace(min_rows=1), seed=7)
        return output, *torch.autograd.grad(output, (x, weight, offset), g)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *CASES,
        *(
            pytest.param(config, dtype, marks=pytest.mark.slow)
            for config in CONFIGS
            for dtype in DTYPES
            if (config, dtype) not in CASES
        ),
    ],
    ids=str,
)
def test_gradients_are_those_of_plain_torch(config, dtype, device):
    """The same S: they differ by the rounding of the kernels alone."""
    found = gradients(config, dtype, device, kernels="triton")
    expected = gradients(config, dtype, device, kernels="torch")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    if config.storage is not None and config.ratio < 1 and dtype != torch.float32:
        # a value on the edge between two codes falls to either side
        tolerance = {"int8": 0.02, "int4": 0.2, "int2": 0.5}[config.storage]
    else:
        tolerance = 1e-5 if dtype == torch.float32 else 0.02 if dtype == torch.bfloat16 else 0.003
    for one, other in zip(found[2:], expected[2:], strict=True):
        assert one.dtype == other.dtype == dtype
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < tolerance, error


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # the second case launches all that the two others launch
        grid(RMMConfig(ratio=0.4), ["hadamard_sketch"] * 2),
        (RMMConfig(ratio=0.4, storage="int8"), ["hadamard_sketch", "quantize", "hadamard_sketch", "dequantize"]),
        grid(RMMConfig(ratio=1.0, storage="int8"), ["quantize", "dequantize"]),
        (RMMConfig(ratio=0.4, sketch="gaussian"), ["random_projection"] * 2),
        (RMMConfig(ratio=0.4, sketch="dct"), []),
    ],
    ids=str,
)
def test_kernels_of_a_step(config, expected, device, monkeypatch):
    launched, launcher = [], backend._launcher
    monkeypatch.setattr(backend, "_launcher", lambda name: launched.append(name) or launcher(name))
    gradients(config, torch.float32, device, kernels="triton")
    assert launched == expected
