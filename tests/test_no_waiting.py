"""No step of plain torch makes a GPU's stream wait for the host: shown without a GPU, on tensors without memory.

The twins run as they do on a GPU where there are no kernels for them. `tests/test_cuda.py` asks torch itself, on one.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rmm_linear import RMMConfig, RMMLinear, use_kernels
from rmm_linear.sketches import STORAGES, available_sketches

ROWS, FEATURES, OUT = 300, 32, 16


class Waits(TorchDispatchMode):
    """What a GPU would wait for: numbers asked of it, sizes that depend on them, and copies from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        devices = {leaf.device for leaf in tree_leaves((args, kwargs, results)) if isinstance(leaf, Tensor)}
        # a number that is assigned to one place, and not to a slice, is a tensor of the host's on a GPU
        is_of_one_place = name == "copy_" and args[0].dim() == 0
        if len(devices) > 1 or is_of_one_place or name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.found.append(name)
        return results


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The ways of a GPU, and operators called as functions."""
    for place in ("rmm_linear.ops", "rmm_linear.ops.dispatch", "rmm_linear.ops.grad_weight"):
        monkeypatch.setattr(f"{place}.is_for_kernels", lambda g: True)
    monkeypatch.setattr("rmm_linear.ops.registration._is_watched", lambda: False)
    monkeypatch.setattr("rmm_linear.ops.registration._are_plain", lambda arguments: True)


def waits(**options: Any) -> list[str]:
    """Of a step."""
    dtype = options.pop("dtype", torch.bfloat16)
    layer = RMMLinear(FEATURES, OUT, config=RMMConfig(min_rows=1, **options), device="meta", dtype=dtype)
    x = torch.randn(ROWS, FEATURES, device="meta", dtype=dtype, requires_grad=True)
    g = torch.randn(ROWS, OUT, device="meta", dtype=dtype)
    with use_kernels("torch"), Waits() as found:
        layer(x).backward(g)
    return found.found


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("storage", [None, *STORAGES])
@pytest.mark.parametrize("sketch", available_sketches())
def test_no_step_waits(sketch, storage, center, as_on_a_gpu):
    assert waits(sketch=sketch, storage=storage, center=center, ratio=0.3) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sketch", available_sketches())
def test_no_step_waits_in_any_dtype(sketch, dtype, as_on_a_gpu):
    assert waits(sketch=sketch, ratio=0.3, dtype=dtype) == []


@pytest.mark.parametrize("storage", STORAGES)
def test_no_step_of_low_bits_alone_waits(storage, as_on_a_gpu):
    assert waits(storage=storage, ratio=1.0) == []


@pytest.mark.parametrize("rows", [5, 24, 80, 144, 200, 256])
def test_no_order_of_the_matrix_waits(rows, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROWS", rows)
    assert waits(ratio=0.3) == []


def test_what_would_wait_is_seen():
    x = torch.empty(8, device="meta")
    with Waits() as found:
        x[:1] = 0
        x[2:4] = x[0]
        x[0] = 0
        x.copy_(torch.ones(8))
        with pytest.raises((RuntimeError, NotImplementedError)):
            x.sum().item()
    assert found.found == ["copy_", "copy_"]
