"""Published planners, one file a paper, behind one protocol."""

from rmm_linear.planning.strategies.auto import Auto
from rmm_linear.planning.strategies.base import Strategy
from rmm_linear.planning.strategies.chen2016_sqrt import ChenSqrt
from rmm_linear.planning.strategies.griewank2000_revolve import Revolve
from rmm_linear.planning.strategies.gruslys2016_bptt import GruslysBPTT
from rmm_linear.planning.strategies.hong2025_linear import HongLinear
from rmm_linear.planning.strategies.jain2020_checkmate import Checkmate, CheckmateRounding
from rmm_linear.planning.strategies.kirisame2021_dtr import Dtr, DtrEq, DtrLocal
from rmm_linear.planning.strategies.kusumoto2019_lower_sets import Kusumoto2019Approximate, Kusumoto2019Exact
from rmm_linear.planning.strategies.moccasin2023_cp import Moccasin
from rmm_linear.planning.strategies.patil2022_poet import Poet
from rmm_linear.planning.strategies.steiner2022_olla import Olla
from rmm_linear.planning.strategies.zhang2023_coop import Coop

_STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        *(Auto, Checkmate, CheckmateRounding, ChenSqrt, Coop, Dtr, DtrEq, DtrLocal, GruslysBPTT, HongLinear),
        *(Kusumoto2019Approximate, Kusumoto2019Exact, Moccasin, Olla, Poet, Revolve),
    )
}


def available_strategies() -> tuple[str, ...]:
    """Return the names of all strategies, sorted."""
    return tuple(sorted(_STRATEGIES))


def get_strategy(name: str) -> Strategy:
    """Make a strategy by its name, one of `available_strategies()`.

    Raises:
        ValueError: If there is none of this name.
    """
    if name not in _STRATEGIES:
        raise ValueError(f"strategy={name!r} is unknown; choose one of {', '.join(available_strategies())}")
    return _STRATEGIES[name]()
