"""Published planners, one file a paper, behind one protocol."""

from rmm_linear.checkpointing.strategies import auto as _auto
from rmm_linear.checkpointing.strategies.base import Proposal, Strategy, available_strategies, choose, get_strategy

__all__ = ["Proposal", "Strategy", "_auto", "available_strategies", "choose", "get_strategy"]
