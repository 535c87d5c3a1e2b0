"""Every sketch of the library passes the contract, as it is and centred."""

import pytest
import torch

from rmm_linear.sketches import (
    CRS,
    DCT,
    DFT,
    WTACRS,
    Centered,
    Gaussian,
    Hadamard,
    Rademacher,
    RowsWithoutReplacement,
)
from rmm_linear.sketches.contract import SketchContract

# the row counts at which the contract looks whether a sketch is exact at ratio 1
TRIED = (1, 2, 12, 37, 64, 67, 128)


class Centring:
    """Puts centring around the sketch of another contract, with other data and draws.

    S is that of the sketch inside, to the bit, whose contract measures its mean.
    """

    seed = 1
    reads_every_row = True

    def make(self, ratio):
        return Centered(super().make(ratio))

    def test_dense_is_the_inner_sketch_s(self):
        sketch, (x, _), seeds = self.make(0.5), self._pair(67), torch.arange(50)
        assert torch.equal(sketch.dense(x, seeds), sketch.inner.dense(x - x.mean(0), seeds))

    @pytest.mark.grid
    def test_mean_of_s_s_transposed_is_identity(self):
        super().test_mean_of_s_s_transposed_is_identity()


class CentringWhatLooksAtNoData(Centring):
    def test_dense_is_the_inner_sketch_s(self):
        sketch, (x, _), seeds = self.make(0.5), self._pair(67), torch.arange(50)
        assert torch.equal(sketch.dense(x, seeds), sketch.inner.dense(x, seeds))


class TestGaussian(SketchContract):
    def make(self, ratio):
        return Gaussian(ratio=ratio)


class TestRademacher(SketchContract):
    unit_diagonal = True

    def make(self, ratio):
        return Rademacher(ratio=ratio)


class TestDCT(SketchContract):
    exact_rows = TRIED

    def make(self, ratio):
        return DCT(ratio=ratio)


class TestDFT(SketchContract):
    exact_rows = TRIED

    def make(self, ratio):
        return DFT(ratio=ratio)


class TestHadamard(SketchContract):
    unit_diagonal = True
    exact_rows = (1, 2, 12, 64, 128)

    def make(self, ratio):
        return Hadamard(ratio=ratio)


class TestRowsWithoutReplacement(SketchContract):
    exact_rows = TRIED
    reads_every_row = False

    def make(self, ratio):
        return RowsWithoutReplacement(ratio=ratio)


class TestCRS(SketchContract):
    identity_draws = 360_000

    def make(self, ratio):
        return CRS(ratio=ratio)


class TestWTACRS(SketchContract):
    exact_rows = TRIED
    identity_draws = 360_000

    def make(self, ratio):
        return WTACRS(ratio=ratio)


class TestCenteredGaussian(CentringWhatLooksAtNoData, TestGaussian):
    exact_rows = (1,)


@pytest.mark.grid
class TestCenteredRademacher(CentringWhatLooksAtNoData, TestRademacher):
    exact_rows = (1,)


@pytest.mark.grid
class TestCenteredDCT(CentringWhatLooksAtNoData, TestDCT):
    pass


class TestCenteredDFT(CentringWhatLooksAtNoData, TestDFT):
    pass


class TestCenteredHadamard(CentringWhatLooksAtNoData, TestHadamard):
    pass


class TestCenteredRowsWithoutReplacement(CentringWhatLooksAtNoData, TestRowsWithoutReplacement):
    exact_by_symmetry = (2,)


class TestCenteredCRS(Centring, TestCRS):
    exact_by_symmetry = (2,)
    exact_rows = (1,)


class TestCenteredWTACRS(Centring, TestWTACRS):
    exact_by_symmetry = (2,)
