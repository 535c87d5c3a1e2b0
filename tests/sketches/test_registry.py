"""The registry of sketches, and how ratios become ranks."""

import math
import pickle
from dataclasses import FrozenInstanceError, dataclass
from fractions import Fraction

import pytest
import torch

from rmm_linear import RMMConfig
from rmm_linear.sketches import SKETCHES, Centered, Gaussian, Hadamard, available_sketches, register

NAMES = ("crs", "dct", "dft", "gaussian", "hadamard", "rademacher", "rows_without_replacement", "wta_crs")


def test_all_sketches_are_registered_under_their_names():
    assert available_sketches() == NAMES
    assert {name: sketch.name for name, sketch in SKETCHES.items()} == {name: name for name in NAMES}


def test_a_taken_name_is_refused_and_the_registry_unchanged():
    @dataclass(frozen=True)
    class Impostor(Gaussian):
        name = "hadamard"

    with pytest.raises(ValueError, match="'hadamard' is taken by Hadamard"):
        register(Impostor)
    assert register(Hadamard) is SKETCHES["hadamard"] is Hadamard


def test_a_dense_sketch_with_an_s_of_its_own_has_a_gradient_of_that_s():
    class RowsInReverse(Gaussian):
        def project(self, y, seed, mean, *, gradient):
            return super().project(y.flip(0), seed, mean, gradient=gradient)

    x, g, seed = torch.randn(512, 8), torch.randn(512, 8), torch.tensor(1)
    (gradient, _), (expected, _) = (
        sketch.backward(upstream, sketch.compress(rows, seed))
        for sketch, rows, upstream in ((RowsInReverse(0.5), x, g), (Gaussian(0.5), x.flip(0), g.flip(0)))
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-3)


def test_a_third_party_sketch_is_reachable_by_name(monkeypatch):
    monkeypatch.setattr("rmm_linear.sketches.base.SKETCHES", SKETCHES)

    @dataclass(frozen=True)
    class Mine(Gaussian):
        name = "mine"

    register(Mine)
    try:
        assert RMMConfig(sketch="mine", ratio=0.25, center=False).sketch_object == Mine(ratio=0.25)
        assert "mine" in available_sketches()
    finally:
        del SKETCHES["mine"]


@pytest.mark.parametrize("name", NAMES)
def test_sketches_are_values(name):
    """Equal if they do the same, hashable, immutable, and picklable: they sit in configurations."""
    sketch = SKETCHES[name](ratio=0.3)
    for made in (sketch, Centered(sketch)):
        twin = pickle.loads(pickle.dumps(made))
        assert twin == made
        assert hash(twin) == hash(made)
        assert made.ratio == 0.3
        with pytest.raises(FrozenInstanceError):
            made.ratio = 0.5
    assert sketch != SKETCHES[name](ratio=0.4)
    assert sketch != Centered(sketch)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hadamard"])
def test_rank_is_the_rounded_share_and_at_least_one(name):
    for ratio in (0.3, 0.9, 0.01, 1 / 7, 1e-6, 1.0):
        sketch = SKETCHES[name](ratio=ratio)
        for rows in (*range(200), 7919, 104_729):
            exact = Fraction(ratio).limit_denominator(10**6) * rows
            expected = min(rows, max(1, math.floor(exact + Fraction(1, 2))))
            assert sketch.rank(rows) == expected, (ratio, rows)
            assert Centered(sketch).rank(rows) == expected
