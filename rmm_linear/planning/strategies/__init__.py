"""Published planners, one file a paper, behind one protocol."""

from rmm_linear.planning.strategies import (
    auto,
    chen2016_sqrt,
    griewank2000_revolve,
    gruslys2016_bptt,
    hong2025_linear,
    jain2020_checkmate,
    kirisame2021_dtr,
    kusumoto2019_lower_sets,
    moccasin2023_cp,
    patil2022_poet,
    steiner2022_olla,
    zhang2023_coop,
)
from rmm_linear.planning.strategies.base import Proposal, Strategy, available_strategies, choose, get_strategy

__all__ = [
    "Proposal",
    "Strategy",
    "auto",
    "available_strategies",
    "chen2016_sqrt",
    "choose",
    "get_strategy",
    "griewank2000_revolve",
    "gruslys2016_bptt",
    "hong2025_linear",
    "jain2020_checkmate",
    "kirisame2021_dtr",
    "kusumoto2019_lower_sets",
    "moccasin2023_cp",
    "patil2022_poet",
    "steiner2022_olla",
    "zhang2023_coop",
]
