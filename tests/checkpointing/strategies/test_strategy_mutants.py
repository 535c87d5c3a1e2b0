"""Planners with a mistake, each of which the contract has to catch; and a perfect one, which has to pass."""

import random

import pytest
from strategy_contract import StrategyContract

from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.oracle import cheapest_order, leanest_order
from rmm_linear.planning.schedule import Schedule, Step
from rmm_linear.planning.simulate import Proposal, peak_and_cost
from rmm_linear.planning.strategies.base import Strategy, choose
from rmm_linear.planning.strategies.chen2016_sqrt import ChenSqrt

CHECKS = tuple(name for name in dir(StrategyContract) if name.startswith("test_"))
RUNS = "test_every_proposal_runs_and_takes_what_it_says"
BUDGET = "test_budget_is_respected"
BRUTE = "test_never_better_than_brute_force"
OPTIMAL = "test_optimal_where_it_claims_to_be"
MONOTONE = "test_larger_budgets_never_give_dearer_plans"
PLAIN = "test_nothing_is_computed_twice_where_there_is_room"
SAME = "test_deterministic"
LEAST = "test_infeasible_budget_names_the_least_feasible_one"
MISTAKE = "test_a_budget_that_is_no_number_of_bytes_is_refused"
JSON = "test_schedules_survive_json"


class Exhaustive(Strategy):
    """Every order there is: what no planner can beat."""

    name = "all orders"
    claims_optimal = True

    def orders(self, graph):
        peak = peak_and_cost(graph, range(len(graph.ops)))[0]
        least = leanest_order(graph).peak_bytes
        while peak >= least:
            best = cheapest_order(graph, peak)
            yield best.order
            peak = best.peak_bytes - 1


def over_budget(self, graph, budget_bytes):
    choose(graph, self.frontier(graph), budget_bytes, self.name)
    return choose(graph, self.frontier(graph), budget_bytes + budget_bytes // 10, self.name)


def leanest_where_even(self, graph, budget_bytes):
    schedule = ChenSqrt.plan(self, graph, budget_bytes)
    leanest = Schedule.from_order(graph, self.frontier(graph)[-1].order, strategy=self.name)
    return schedule if budget_bytes % 2 else leanest


def naming_a_byte_less(self, graph, budget_bytes):
    try:
        return ChenSqrt.plan(self, graph, budget_bytes)
    except InfeasibleBudgetError as error:
        least = error.least_bytes - 1
        raise InfeasibleBudgetError(f"{least}", budget_bytes=budget_bytes, least_bytes=least) from error


def freeing_outputs(self, graph, budget_bytes):
    schedule = ChenSqrt.plan(self, graph, budget_bytes)
    return Schedule((*schedule.steps, Step("free", graph.outputs[0])), schedule.graph, self.name)


def unsigned(self, graph, budget_bytes):
    return Schedule.from_order(graph, ChenSqrt.plan(self, graph, budget_bytes).order)


def understated(proposals):
    return tuple(Proposal(p.peak_bytes - 1, p.cost, p.order) for p in proposals)


def changed(**members):
    return type("Changed", (ChenSqrt,), members)


def ordering(change):
    """A planner whose orders are a function of the right ones."""
    return changed(orders=lambda self, graph: change(list(ChenSqrt.orders(self, graph))))


def proposing(change):
    return changed(frontier=lambda self, graph: change(ChenSqrt.frontier(self, graph)))


DRAW = random.Random(0)
# name -> strategy, checks that fail
MUTANTS = {
    "a tenth more than the budget": (changed(plan=over_budget), {BUDGET}),
    "the leanest plan at even budgets": (changed(plan=leanest_where_even), {MONOTONE, PLAIN}),
    "other orders each time": (ordering(lambda orders: [o for o in orders if DRAW.random() < 0.3]), {SAME}),
    # to leave out a second computation is no mistake: what it writes then stays
    "no third op": (ordering(lambda orders: [[op for op in o if op != 2] for o in orders]), {RUNS, BUDGET, BRUTE}),
    "the second op again": (ordering(lambda orders: [[*o[:2], *o] for o in orders]), {RUNS}),
    "a byte too little": (proposing(understated), {RUNS, BUDGET}),
    "never all kept": (proposing(lambda proposals: proposals[1:] or proposals), {PLAIN}),
    "segments called optimal": (changed(claims_optimal=True), {OPTIMAL}),
    "a least budget that is too small": (changed(plan=naming_a_byte_less), {LEAST}),
    "any budget": (changed(plan=lambda self, graph, b: ChenSqrt.plan(self, graph, max(1, int(b or 1)))), {MISTAKE}),
    "no signature": (changed(plan=unsigned), {JSON}),
    "outputs freed": (changed(plan=freeing_outputs), {BUDGET, BRUTE}),
}


def failing(strategy, checks=CHECKS):
    contract = type("Contract", (StrategyContract,), {"make": lambda self: strategy(), "small": True})
    failed = set()
    for check in checks:
        try:
            getattr(contract(), check)()
        except AssertionError:
            failed.add(check)
    return failed


@pytest.mark.parametrize("name", MUTANTS)
def test_the_contract_catches(name):
    mutant, checks = MUTANTS[name]
    assert failing(mutant, checks) == checks


def test_every_check_catches_some_mutant():
    assert set().union(*(checks for _, checks in MUTANTS.values())) == set(CHECKS)


@pytest.mark.slow
def test_the_search_over_all_orders_passes_and_is_optimal():
    assert failing(Exhaustive) == set()


def test_the_strategy_that_the_mutants_are_made_of_passes():
    assert failing(ChenSqrt) == set()
