"""Every sketch of the library passes the contract, as it is and centred."""

import pytest
import torch
from sketch_contract import SketchContract

from rmm_linear.sketches import (
    CRS,
    DCT,
    DFT,
    SKETCHES,
    WTACRS,
    Centered,
    Gaussian,
    Hadamard,
    Rademacher,
    RowsWithoutReplacement,
)


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
        seen = x - x.mean(0) if self.looks_at_data else x
        assert torch.equal(sketch.dense(x, seeds), sketch.inner.dense(seen, seeds))

    @pytest.mark.grid
    def test_mean_of_s_s_transposed_is_identity(self):
        super().test_mean_of_s_s_transposed_is_identity()


@pytest.mark.grid
def mean_of_s_s_transposed_in_more_cases(self):
    SketchContract.test_mean_of_s_s_transposed_is_identity(self)


BY_NORM = {"identity_draws": 360_000}
# columns of orthogonal matrices vary less: the contract refuses draws that are too few for what it promises to see
LESS_NOISE = {"gradient_draws": 7_000}
IN_MORE_CASES = {"test_mean_of_s_s_transposed_is_identity": mean_of_s_s_transposed_in_more_cases}
# sketch -> knobs of its contract
CONTRACTS = {
    Gaussian: {},
    Rademacher: IN_MORE_CASES,
    DCT: LESS_NOISE | IN_MORE_CASES,
    DFT: LESS_NOISE | {"identity_draws": 20_000},
    Hadamard: LESS_NOISE | {"identity_draws": 20_000},
    RowsWithoutReplacement: LESS_NOISE | {"reads_every_row": False},
    CRS: BY_NORM,
    WTACRS: BY_NORM | IN_MORE_CASES,
}
# S depends on the data
BY_DATA = (CRS, WTACRS)
# of two of a kind, one is centred in `make test`
ALIKE = (Rademacher, DCT)


def contract_of(sketch, knobs):
    return type(
        f"Test{sketch.__name__}",
        (SketchContract,),
        {"make": lambda self, ratio: sketch(ratio=ratio), "__module__": __name__, **knobs},
    )


for sketch, knobs in CONTRACTS.items():
    plain = contract_of(sketch, knobs)
    namespace = {"looks_at_data": sketch in BY_DATA, "__module__": __name__}
    around = type(f"TestCentered{sketch.__name__}", (Centring, plain), namespace)
    globals()[plain.__name__] = plain
    globals()[around.__name__] = pytest.mark.grid(around) if sketch in ALIKE else around
# or they would be collected twice
del plain, around


def test_every_sketch_has_a_contract():
    assert set(CONTRACTS) == set(SKETCHES.values())
