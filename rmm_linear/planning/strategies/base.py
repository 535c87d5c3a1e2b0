"""The protocol of strategies, which propose orders of computation for a graph.

The published planners minimise a model of the memory that is simpler than the simulator's. So the simulator decides:
a strategy proposes orders, for every value of its own parameter (number of segments, slots, cap of the dynamic
program), the simulator measures each proposal, and `plan` returns the cheapest one that fits the budget. A plan hence
never takes more than its budget, a larger budget never gives a dearer plan, and the least budget that a strategy can
meet is known; another strategy may go below it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.graph import Graph
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import Proposal, peak_and_cost


class Strategy(ABC):
    """A published way to plan recomputation.

    Attributes:
        name: Its name for `get_strategy`: the paper's first author, year, and method.
        pages: Whether orders may load paged storages.
    """

    name: ClassVar[str]
    pages: ClassVar[bool] = False

    @abstractmethod
    def orders(self, graph: Graph) -> Iterable[Sequence[int]]:
        """Propose orders of computation: indices of ops, with repetitions. Each can run; the plain one may be missing.

        The graph may have backward ops or none.
        """

    def frontier(self, graph: Graph) -> tuple[Proposal, ...]:
        """Return the proposals that no other one beats in both peak and cost, the plain program among them."""
        orders = dict.fromkeys(map(tuple, (range(len(graph.ops)), *self.orders(graph))))
        proposals = (Proposal(*peak_and_cost(graph, order), order) for order in orders)
        best: list[Proposal] = []
        for proposal in sorted(proposals, key=lambda p: (p.cost, p.peak_bytes, p.order)):
            if not best or proposal.peak_bytes < best[-1].peak_bytes:
                best.append(proposal)
        return tuple(best)

    def plan(self, graph: Graph, budget_bytes: int) -> Schedule:
        """Return the cheapest schedule that this strategy knows whose simulated peak is at most the budget.

        Raises:
            InfeasibleBudgetError: If there is none; it names the least that this strategy found.
        """
        return choose(graph, self.frontier(graph), budget_bytes, self.name)


def choose(graph: Graph, frontier: Sequence[Proposal], budget_bytes: int, strategy: str, proof: str = "") -> Schedule:
    """Return the cheapest proposal of a strategy's frontier that fits a budget, as a schedule.

    The strategy goes by its name, and the proof is the bound that its solver proved, as a sentence.

    Raises:
        ValueError: If the budget is no positive number of bytes.
        InfeasibleBudgetError: If no proposal fits.
    """
    checked_budget(budget_bytes)
    fitting = [proposal for proposal in frontier if proposal.peak_bytes <= budget_bytes]
    if not fitting:
        error = refusal(strategy, budget_bytes, min(proposal.peak_bytes for proposal in frontier))
        raise error
    best = min(fitting, key=lambda proposal: (proposal.cost, proposal.peak_bytes))
    return Schedule.from_order(graph, best.order, strategy=strategy, proof=proof)


def refusal(strategy: str, budget_bytes: int, least_bytes: int) -> InfeasibleBudgetError:
    """Return the error of a strategy that found no schedule within a budget."""
    text = f"{strategy} found no schedule within {budget_bytes} bytes; the least that was found takes"
    return InfeasibleBudgetError(f"{text} {least_bytes} bytes", budget_bytes=budget_bytes, least_bytes=least_bytes)


def checked_budget(budget_bytes: int) -> int:
    """Return a budget.

    Raises:
        ValueError: If it is no positive number of bytes.
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes <= 0:
        raise ValueError(f"budget_bytes={budget_bytes!r} is not a positive int; pass a number of bytes")
    return budget_bytes
