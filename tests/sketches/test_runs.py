"""Which sketches take rows in runs, and that these make of them what they make of a matrix."""

from dataclasses import dataclass

import pytest
import torch

from rmm_linear import available_sketches, ops
from rmm_linear.config import RMMConfig
from rmm_linear.sketches import Centered, Hadamard, LowBit

X = torch.randn(8, 33, 6)[:, 1:]
G, SEED = torch.randn(8 * 32, 5), torch.tensor(3)
TAKING = {
    "plain": Hadamard(0.3),
    "centred": Centered(Hadamard(0.3)),
    "int8": LowBit(Hadamard(0.5), "int8"),
    "centred int8": Centered(LowBit(Hadamard(0.5), "int8")),
    "centred int2": Centered(LowBit(Hadamard(0.1), "int2")),
}


@pytest.mark.parametrize("is_on_a_gpu", [False, True])
@pytest.mark.parametrize("sketch", TAKING.values(), ids=TAKING)
def test_they_are_what_a_matrix_is(sketch, is_on_a_gpu, monkeypatch):
    assert sketch.takes_runs()
    monkeypatch.setattr(ops, "is_for_kernels", lambda g: is_on_a_gpu)
    runs = ops.in_runs(X)
    assert runs.dim() == 3
    found, expected = sketch.compress(runs, SEED), sketch.compress(X.reshape(-1, 6), SEED)
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)
    for one, other in zip(sketch.backward(G, found), sketch.backward(G, expected), strict=True):
        assert torch.equal(one, other)


@dataclass(frozen=True)
class MyHadamard(Hadamard):
    pass


@dataclass(frozen=True)
class MyCentered(Centered):
    pass


@dataclass(frozen=True)
class MyLowBit(LowBit):
    pass


def test_all_others_are_given_matrices():
    """Subclasses as well: what they have made their own may want one."""
    for sketch in (
        MyHadamard(0.3),
        MyCentered(Hadamard(0.3)),
        Centered(MyHadamard(0.3)),
        MyLowBit(Hadamard(0.3), "int8"),
    ):
        assert not sketch.takes_runs()
    assert not LowBit(None, "int8").takes_runs()
    for name in available_sketches():
        assert RMMConfig(ratio=0.3, sketch=name).sketch_object.takes_runs() == (name == "hadamard")
