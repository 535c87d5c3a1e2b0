"""Every strategy passes the contract."""

import sys
from functools import cache

import pytest
from strategy_contract import StrategyContract

from experiments.checkpointing.generators import chain, with_backward
from rmm_linear.planning.strategies import auto, available_strategies, get_strategy

SMALL = {"small": True}
# a chain has one order of first computations: that of the stages
OPTIMAL_ON_CHAINS = {**SMALL, "claims_optimal": lambda self, name, graph: "chain" in name}
SLOW = {"pytestmark": pytest.mark.slow}
CONTRACTS = {
    "chen2016_sqrt": {},
    "griewank2000_revolve": {},
    "gruslys2016_bptt": {},
    "hong2025_linear": {},
    "jain2020_checkmate": OPTIMAL_ON_CHAINS,
    "jain2020_rounding": SMALL,
    "kirisame2021_dtr": {},
    "kirisame2021_dtr_eq": {},
    "kirisame2021_dtr_local": {},
    "kusumoto2019_approximate": {},
    "kusumoto2019_exact": SMALL,
    "moccasin2023_cp": SMALL | SLOW,
    "patil2022_poet": OPTIMAL_ON_CHAINS | SLOW,
    "steiner2022_olla": SMALL | SLOW,
    "zhang2023_coop": {},
    "auto": {**SMALL, "pytestmark": pytest.mark.usefixtures("one_search_for_the_leanest_order")},
}


def contract_of(name, attributes):
    def make(self):
        if name in ("moccasin2023_cp", "steiner2022_olla"):
            pytest.importorskip("ortools")
        return get_strategy(name)

    return type(f"Test_{name}", (StrategyContract,), {"make": make, **attributes})


globals().update({f"Test_{name}": contract_of(name, attributes) for name, attributes in CONTRACTS.items()})


@pytest.fixture(scope="module")
def one_search_for_the_leanest_order():
    """A strategy that tells the least budget at each refusal looks at all orders of a graph once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "leanest_order", cache(auto.leanest_order))
        yield


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("jain2020_checkmate", "scipy.optimize"),
        ("moccasin2023_cp", "ortools.sat.python"),
        ("steiner2022_olla", "ortools.sat.python"),
    ],
)
def test_the_extra_is_named_where_a_solver_is_missing(name, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"rmm-linear\[plan\]"):
        get_strategy(name).plan(with_backward(chain([4] * 3)), 10)


def test_every_strategy_has_its_contract():
    assert CONTRACTS.keys() == set(available_strategies())
    assert all(get_strategy(name).name == name for name in CONTRACTS)
