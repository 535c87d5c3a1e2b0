"""Memory for results: as torch's own way gives it, and in that way where somebody looks on."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear_kernels import allocation
from rmm_linear_kernels.allocation import empty

SIZES = ((), (0,), (5,), (3, 4), (1, 4), (0, 4), (4, 0), (2, 3, 4))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_what_new_empty_makes(sizes, dtype, device):
    like = torch.randn(2, 3, device=device)
    found, expected = empty(like, sizes, dtype), like.new_empty(sizes, dtype=dtype)
    for name in ("shape", "dtype", "device", "layout", "requires_grad"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.stride() == expected.stride()
    assert found.data_ptr() % 64 == 0


@pytest.mark.parametrize("like_grad", [False, True])
def test_nobody_is_asked_where_nobody_looks_on(like_grad, monkeypatch):
    like = torch.randn(2, 3, requires_grad=like_grad)
    assert allocation._on_cpu is not None
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: pytest.fail("the long way"))
    assert not empty(like, (2, 3), torch.float32).requires_grad


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_it():
    with Seen() as seen:
        empty(torch.randn(2), (2, 3), torch.float32)
    assert seen.names[-1] == "new_empty"


def test_deterministic_algorithms_fill_it(nan_poison):
    assert empty(torch.randn(2), (2, 3), torch.float32).isnan().all()


class OnAGPU:
    """What is asked of a tensor on some GPU."""

    is_cuda, is_cpu = True, False

    def __init__(self, number):
        self.number = number

    def get_device(self):
        return self.number

    def new_empty(self, sizes, dtype):
        return "by torch", sizes, dtype


def test_memory_of_the_current_gpu_and_of_another_one(monkeypatch):
    monkeypatch.setattr(allocation, "_on_cuda", lambda sizes, strides, dtype: ("at once", sizes, strides, dtype))
    monkeypatch.setattr(allocation, "_current_device", lambda: 1)
    assert empty(OnAGPU(1), (2, 3), torch.int64) == ("at once", (2, 3), (3, 1), torch.int64)
    assert empty(OnAGPU(0), (2, 3), torch.int64) == ("by torch", (2, 3), torch.int64)
    for missing in ("_on_cuda", "_current_device"):
        with monkeypatch.context() as patch:
            patch.setattr(allocation, missing, None)
            assert empty(OnAGPU(1), (2, 3), torch.int64) == ("by torch", (2, 3), torch.int64)


def test_without_the_function_of_a_version_and_elsewhere_it_is_new_empty(monkeypatch):
    assert empty(torch.empty(2, device="meta"), (2, 3), torch.float32).device.type == "meta"
    monkeypatch.setattr(allocation, "_on_cpu", None)
    assert empty(torch.randn(2), (2, 3), torch.float32).shape == (2, 3)
