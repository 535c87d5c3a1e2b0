"""Every strategy passes the contract."""

import pytest
from strategy_contract import StrategyContract

from rmm_linear.planning.strategies import auto, available_strategies, get_strategy


class TestChen2016(StrategyContract):
    def make(self):
        return get_strategy("chen2016_sqrt")


class TestGriewank2000(StrategyContract):
    def make(self):
        return get_strategy("griewank2000_revolve")


class TestGruslys2016(StrategyContract):
    def make(self):
        return get_strategy("gruslys2016_bptt")


class TestHong2025(StrategyContract):
    def make(self):
        return get_strategy("hong2025_linear")


class TestJain2020Checkmate(StrategyContract):
    small = True

    def make(self):
        return get_strategy("jain2020_checkmate")

    def claims_optimal(self, name, graph):
        # a chain has one order of first computations: that of the stages
        return "chain" in name


class TestJain2020Rounding(StrategyContract):
    small = True

    def make(self):
        return get_strategy("jain2020_rounding")


class TestKirisame2021(StrategyContract):
    def make(self):
        return get_strategy("kirisame2021_dtr")


class TestKirisame2021Eq(StrategyContract):
    def make(self):
        return get_strategy("kirisame2021_dtr_eq")


class TestKirisame2021Local(StrategyContract):
    def make(self):
        return get_strategy("kirisame2021_dtr_local")


class TestKusumoto2019Approximate(StrategyContract):
    def make(self):
        return get_strategy("kusumoto2019_approximate")


class TestKusumoto2019Exact(StrategyContract):
    small = True

    def make(self):
        return get_strategy("kusumoto2019_exact")


@pytest.mark.slow
class TestMoccasin2023(StrategyContract):
    small = True

    def make(self):
        pytest.importorskip("ortools")
        return get_strategy("moccasin2023_cp")


@pytest.mark.slow
class TestPatil2022(StrategyContract):
    small = True
    claims_optimal = TestJain2020Checkmate.claims_optimal

    def make(self):
        return get_strategy("patil2022_poet")


@pytest.mark.slow
class TestSteiner2022(StrategyContract):
    small = True

    def make(self):
        pytest.importorskip("ortools")
        return get_strategy("steiner2022_olla")


class TestZhang2023(StrategyContract):
    def make(self):
        return get_strategy("zhang2023_coop")


@pytest.fixture(scope="module")
def one_search_for_the_leanest_order():
    """A strategy that tells the least budget at each refusal looks at all orders of a graph once."""
    search, found = auto.leanest_order, {}

    def leanest_order(graph):
        if graph.fingerprint not in found:
            found[graph.fingerprint] = search(graph)
        return found[graph.fingerprint]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "leanest_order", leanest_order)
        yield


@pytest.mark.usefixtures("one_search_for_the_leanest_order")
class TestAuto(StrategyContract):
    small = True

    def make(self):
        return get_strategy("auto")


def test_every_strategy_has_its_contract():
    tested = {
        contract().make().name for contract in StrategyContract.__subclasses__() if contract.__module__ == __name__
    }
    assert tested == set(available_strategies())
