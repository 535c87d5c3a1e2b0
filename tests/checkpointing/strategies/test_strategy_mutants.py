"""Planners with a mistake, each of which the contract has to catch; and a perfect one, which has to pass."""

import itertools
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


class OverBudget(ChenSqrt):
    """Plans for a tenth more than it is given."""

    def plan(self, graph, budget_bytes):
        choose(graph, self.frontier(graph), budget_bytes, self.name)
        return choose(graph, self.frontier(graph), budget_bytes + budget_bytes // 10, self.name)


class NotMonotone(ChenSqrt):
    """Takes the leanest plan at budgets of an even number of bytes."""

    def plan(self, graph, budget_bytes):
        schedule = super().plan(graph, budget_bytes)
        if budget_bytes % 2:
            return schedule
        return Schedule.from_order(graph, self.frontier(graph)[-1].order, strategy=self.name)


class Random(ChenSqrt):
    """Proposes some of the orders, others each time."""

    draw = random.Random(0)

    def orders(self, graph):
        return [order for order in super().orders(graph) if self.draw.random() < 0.3]


class DropsAnOp(ChenSqrt):
    """Never computes the third op. (To leave out a second computation is no mistake: what it writes then stays.)"""

    def orders(self, graph):
        for order in super().orders(graph):
            yield [op for op in order if op != 2]


class Understates(ChenSqrt):
    """Counts a byte too little for each proposal."""

    def frontier(self, graph):
        return tuple(Proposal(p.peak_bytes - 1, p.cost, p.order) for p in super().frontier(graph))


class ForgetsThePlainProgram(ChenSqrt):
    """Never proposes to keep everything."""

    def frontier(self, graph):
        proposals = super().frontier(graph)
        return proposals[1:] or proposals


class ClaimsToBeOptimal(ChenSqrt):
    """Segments, called the best orders there are."""

    claims_optimal = True


class ComputesWhatMayNotBe(ChenSqrt):
    """Runs the second op again."""

    def orders(self, graph):
        for order in super().orders(graph):
            yield [order[0], *order] if len(graph.ops) < 2 else [order[0], order[1], *order]


class NamesTooLittle(ChenSqrt):
    """Names a byte less than the least feasible budget."""

    def plan(self, graph, budget_bytes):
        try:
            return super().plan(graph, budget_bytes)
        except InfeasibleBudgetError as error:
            least = error.least_bytes - 1
            raise InfeasibleBudgetError(f"{least}", budget_bytes=budget_bytes, least_bytes=least) from error


class TakesAnything(ChenSqrt):
    """Makes a number of bytes of whatever it is given."""

    def plan(self, graph, budget_bytes):
        return super().plan(graph, max(1, int(budget_bytes or 1)))


class Anonymous(ChenSqrt):
    """Does not sign its schedules."""

    def plan(self, graph, budget_bytes):
        return Schedule.from_order(graph, super().plan(graph, budget_bytes).order)


class FreesOutputs(ChenSqrt):
    """Counts and schedules without what it has to return: leaner than any order can be."""

    def plan(self, graph, budget_bytes):
        schedule = super().plan(graph, budget_bytes)
        return Schedule((*schedule.steps, Step("free", graph.outputs[0])), schedule.graph, self.name)


MUTANTS = {
    OverBudget: {BUDGET},
    NotMonotone: {MONOTONE, PLAIN},
    Random: {SAME},
    DropsAnOp: {RUNS, BUDGET, BRUTE},
    Understates: {RUNS, BUDGET},
    ForgetsThePlainProgram: {PLAIN},
    ClaimsToBeOptimal: {OPTIMAL},
    ComputesWhatMayNotBe: {RUNS},
    NamesTooLittle: {LEAST},
    TakesAnything: {MISTAKE},
    Anonymous: {JSON},
    FreesOutputs: {BUDGET, BRUTE},
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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_contract_catches(mutant):
    assert failing(mutant, MUTANTS[mutant]) == MUTANTS[mutant]


def test_every_check_catches_some_mutant():
    assert set(itertools.chain.from_iterable(MUTANTS.values())) == set(CHECKS)


@pytest.mark.slow
def test_the_search_over_all_orders_passes_and_is_optimal():
    assert failing(Exhaustive) == set()


def test_the_strategy_that_the_mutants_are_made_of_passes():
    assert failing(ChenSqrt) == set()
