"""Plan a graph within a budget: look on disk first, ask a strategy, and refuse in the user's unit."""

from dataclasses import replace

from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.budget import Budget, refusal
from rmm_linear.planning.graph import Graph
from rmm_linear.planning.plan import CheckpointPlan
from rmm_linear.planning.relaxation import least_extra_cost, relaxations
from rmm_linear.planning.simulate import plain_peak_bytes, simulate
from rmm_linear.planning.stored_plans import store_plan, stored_plan
from rmm_linear.planning.strategies import get_strategy


def plan_graph(graph: Graph, budget: Budget, strategy: str) -> CheckpointPlan:
    """Plan a graph within a budget, by one of `available_strategies()`.

    Raises:
        InfeasibleBudgetError: If the strategy finds no schedule that fits; it names the least that was found.
    """
    plain_bytes = plain_peak_bytes(graph)
    budget_bytes = budget.in_bytes(plain_bytes)
    schedule, is_planned = stored_plan(graph, strategy, budget_bytes)
    if not is_planned:
        try:
            planned = get_strategy(strategy).plan(graph, budget_bytes)
        except InfeasibleBudgetError as error:
            if schedule is None:
                text = refusal(budget, plain_bytes, error.least_bytes, strategy)
                raise InfeasibleBudgetError(text, budget_bytes=budget_bytes, least_bytes=error.least_bytes) from None
        else:
            store_plan(graph, strategy, budget_bytes, planned)
            if schedule is None or simulate(graph, planned).cost <= simulate(graph, schedule).cost:
                schedule = planned
    assert schedule is not None, "it was planned, or refused"
    plan = CheckpointPlan.of(graph, schedule, budget_bytes)
    if graph.page_cost is not None:
        return replace(plan, no_bound="the linear program knows no paging")
    try:
        extra = least_extra_cost(relaxations(graph), budget_bytes)
    except (ImportError, TimeoutError) as error:
        return replace(plan, no_bound=str(error))
    return replace(plan, least_overhead=extra / graph.cost)
