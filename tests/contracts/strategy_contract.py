"""StrategyContract: the test that every planner has to pass, for subclassing under pytest.

    class TestMyStrategy(StrategyContract):
        def make(self):
            return MyStrategy()

A planner that is wrong may well look right: its schedule runs, and takes a little more than it says, or a larger budget
gives a dearer plan. So each claim is checked on chains, U-shapes, stars and random layers with a backward pass, on some
without one, and on some whose ops may not run twice or draw random numbers:

1. Every proposal runs, computes what the plain program computes, and takes what it says; no plan exceeds its budget.
2. No plan is better than the best one there is, found by looking at all orders (`rmm_linear.planning.oracle`);
   where a strategy claims to be optimal it is as good, at every budget where the best plan changes.
3. A larger budget never gives a dearer plan, and the plain program's peak gives the plain program's time.
4. The same plan every time.
5. A budget that the strategy cannot meet raises `InfeasibleBudgetError`, which names the least one that it can.
6. Schedules survive JSON.

This is the half that needs no torch; that a schedule computes bit-identical gradients is the executor's to show.
The module needs pytest only to collect the subclasses.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar

from experiments.checkpointing.generators import chain, random_layers, star, u_shape, with_backward
from rmm_linear.errors import InfeasibleBudgetError, ScheduleError
from rmm_linear.planning.graph import Graph, Op, Storage
from rmm_linear.planning.oracle import cheapest_order, leanest_order
from rmm_linear.planning.schedule import Schedule
from rmm_linear.planning.simulate import Proposal, Simulation, simulate
from rmm_linear.planning.strategies.base import Strategy

# relative error of sums of costs in another order
_ROUNDING = 1e-9


def _tiny_graphs() -> Iterator[tuple[str, Graph]]:
    yield "uniform chain of 7", with_backward(chain([4] * 7))
    yield "chain of 6", with_backward(chain([5, 1, 8, 3, 2, 6], [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]))
    yield "chain of 1", with_backward(chain([3]))
    yield "U of 2 levels", with_backward(u_shape(2, size=8))
    yield "U of 3 levels", with_backward(u_shape(3, size=8, seed=1))
    yield "star of 4 arms", with_backward(star(4))
    for seed in range(4):
        yield f"random layers, seed {seed}", with_backward(random_layers(6 + seed % 2, seed=seed))
    yield "chain of 5 with effects", _with_effects(with_backward(chain([4, 2, 7, 1, 3])))
    yield "random layers with effects", _with_effects(with_backward(random_layers(6, seed=9)))
    yield "chain of 4 whose gradients go", _with_gradients(with_backward(chain([4, 2, 5, 3])))
    for sizes in ((8, 4, 2, 2, 4, 2, 1), (4, 8, 2, 1, 1, 1, 2)):
        yield f"effect beside the loss, {sizes[1]} bytes", effect_beside_the_loss(sizes)
    yield "forward chain", chain([3, 1, 4, 1, 5])
    yield "forward random layers", random_layers(7, seed=5)


def _large_graphs() -> Iterator[tuple[str, Graph]]:
    yield "uniform chain of 60", with_backward(chain([100] * 60))
    yield "chain of 53", with_backward(chain([1 + 37 * node % 101 for node in range(53)]))
    yield "U of 12 levels", with_backward(u_shape(12, size=1 << 14))
    yield "star of 23 arms", with_backward(star(23))
    yield "random layers of 36", with_backward(random_layers(36, seed=3, density=0.3))
    yield "random layers of 30 with effects", _with_effects(with_backward(random_layers(30, seed=4)))


@cache
def tiny_graphs() -> tuple[tuple[str, Graph], ...]:
    """Return graphs that are small enough to look at all orders.

    Returns:
        Names and graphs, of at most 7 forward ops; all have a backward pass but the last two.
    """
    return tuple(_tiny_graphs())


@cache
def large_graphs() -> tuple[tuple[str, Graph], ...]:
    """Return graphs as large as a planner still finishes within a second or so."""
    return tuple(_large_graphs())


def _with_effects(graph: Graph) -> Graph:
    """Let every third forward op draw random numbers, the second one run only once, and some hold temporaries."""
    ops = [
        replace(
            op,
            is_random=not op.is_backward and position % 3 == 0,
            is_recomputable=position != 1,
            temporary_bytes=position % 4,
        )
        for position, op in enumerate(graph.ops)
    ]
    return replace(graph, ops=tuple(ops))


def _with_gradients(graph: Graph) -> Graph:
    """Let each backward op write a parameter's gradient as well, which goes; its forward op reads the parameter."""
    storages, ops = list(graph.storages), list(graph.ops)
    for forward in range(graph.forward_count):
        backward = len(ops) - 1 - forward
        ops[forward] = replace(ops[forward], holds_back=(len(storages),))
        ops[backward] = replace(ops[backward], writes=(*ops[backward].writes, len(storages)))
        storages.append(Storage(f"gradient of a parameter of {ops[forward].name}", 3))
    gradients = tuple(range(len(graph.storages), len(storages)))
    return replace(graph, ops=tuple(ops), storages=tuple(storages), gradients=gradients)


def effect_beside_the_loss(sizes: Sequence[int], *, draws: bool = False) -> Graph:
    """Return a graph with a forward op that draws or may run once alone, and on which no result depends.

    The result may go when the forward pass ends.
    """
    ops = [Op("first", 1.0, (), (0,)), Op("effect", 1.0, (), (1,), is_recomputable=draws, is_random=draws)]
    ops += [Op("second", 1.0, (0,), (2,)), Op("loss", 1.0, (2,), (3,))]
    reads = ((1, 3), (2, 4), (0, 5))
    ops += [Op(f"backward {place}", 1.0, each, (4 + place,), is_backward=True) for place, each in enumerate(reads)]
    storages = tuple(Storage(str(place), size) for place, size in enumerate(sizes))
    return Graph(tuple(ops), storages, (6,), (3,))


class StrategyContract:
    """What a strategy must do. Subclass it with a name that pytest collects, and define `make`.

    Examples:
        >>> from rmm_linear.planning.strategies import get_strategy
        >>> class TestChen(StrategyContract):
        ...     def make(self):
        ...         return get_strategy("chen2016_sqrt")
        >>> TestChen().test_infeasible_budget_names_the_least_feasible_one()

    Attributes:
        small: Whether only tiny graphs are looked at, for planners that take long.
    """

    small: ClassVar[bool] = False

    _plans: ClassVar[dict[tuple[str, int], Schedule | InfeasibleBudgetError]] = {}
    _frontiers: ClassVar[dict[str, tuple[Proposal, ...]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # the checks share what they plan
        cls._plans, cls._frontiers = {}, {}

    def make(self) -> Strategy:
        """Return the strategy under test; to be defined by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has to define make(self)")

    def least_cost(self, graph: Graph, budget_bytes: int) -> float | None:
        """Return the least cost of all orders that the strategy may choose from; every order by default.

        Override it where a strategy claims to be optimal among fewer: it may be better than no order at all that fits,
        and has to be as good as what this returns.

        Returns:
            The cost, None if nothing fits.
        """
        best = _cheapest(graph, budget_bytes)
        return None if best is None else best.cost

    def claims_optimal(self, name: str, graph: Graph) -> bool:
        """Say whether the strategy claims to be optimal on a graph; override it where it does on some only.

        Returns:
            The strategy's own `claims_optimal`, if it has one.
        """
        return getattr(self.make(), "claims_optimal", False)

    # Step 1: what a strategy says is so.

    def test_every_proposal_runs_and_takes_what_it_says(self) -> None:
        """Every schedule is valid, and its peak and cost are those of the proposal."""
        for name, graph in self._graphs():
            for proposal in self._strategy().frontier(graph):
                taken = _taken(name, graph, Schedule.from_order(graph, proposal.order))
                assert taken.peak_bytes == proposal.peak_bytes, (
                    f"{name}: a proposal says {proposal.peak_bytes} bytes and takes {taken.peak_bytes}"
                )
                assert _equal(taken.cost, proposal.cost), (
                    f"{name}: a proposal says {proposal.cost} and takes {taken.cost}"
                )

    def test_budget_is_respected(self) -> None:
        """No plan's simulated peak exceeds its budget, at budgets on, below and above where plans change."""
        for name, graph, budget, schedule in self._schedules(self._graphs()):
            peak = _taken(name, graph, schedule).peak_bytes
            assert peak <= budget, f"{name}: a plan for {budget} bytes takes {peak}"

    # Step 2: compared with all orders there are.

    def test_never_better_than_brute_force(self) -> None:
        """No plan is cheaper than the cheapest order within its peak, and none leaner than the leanest."""
        for name, graph, _, schedule in self._schedules(tiny_graphs()):
            taken, least = _taken(name, graph, schedule), _least_peak(graph)
            assert taken.peak_bytes >= least, f"{name}: {taken.peak_bytes} bytes, and {least} are the least"
            best = _cheapest(graph, taken.peak_bytes)
            assert best is not None
            assert taken.cost >= best.cost * (1 - _ROUNDING), f"{name}: {taken.cost}, and {best.cost} is the least"

    def test_optimal_where_it_claims_to_be(self) -> None:
        """A plan is as cheap as the best one, at every budget from the least feasible one on."""
        for name, graph in tiny_graphs():
            if not self.claims_optimal(name, graph):
                continue
            for budget in range(_least_peak(graph), simulate(graph, Schedule.plain(graph)).peak_bytes + 1):
                best, schedule = self.least_cost(graph, budget), self._plan(graph, budget)
                if best is None and schedule is None:
                    continue
                assert schedule is not None, f"{name}: {budget} bytes can be met at a cost of {best}"
                cost = _taken(name, graph, schedule).cost
                assert best is not None, f"{name}: {budget} bytes cannot be met, and {cost} is claimed to"
                assert _equal(cost, best), f"{name}: a plan for {budget} bytes costs {cost}, and the best one {best}"

    # Step 3: what a budget buys.

    def test_larger_budgets_never_give_dearer_plans(self) -> None:
        """Cost falls, or stays, as the budget grows; and a budget above a feasible one is feasible."""
        for name, graph in self._graphs():
            cost = float("inf")
            for budget in self._budgets(graph):
                schedule = self._plan(graph, budget)
                if schedule is None:
                    assert cost == float("inf"), f"{name}: {budget} bytes are not enough, and fewer were"
                    continue
                now = sum(graph.ops[op].cost for op in schedule.order)
                assert now <= cost * (1 + _ROUNDING), f"{name}: {now} for {budget} bytes, and {cost} for fewer"
                cost = now

    def test_nothing_is_computed_twice_where_there_is_room(self) -> None:
        """The plain program's peak, and anything above, gives the plain program's time."""
        for name, graph in self._graphs():
            peak = simulate(graph, Schedule.plain(graph)).peak_bytes
            for budget in (peak, 2 * peak):
                schedule = self._plan(graph, budget)
                assert schedule is not None, f"{name}: the plain program fits {budget} bytes"
                cost = sum(graph.ops[op].cost for op in schedule.order)
                assert _equal(cost, graph.cost), f"{name}: {cost} where the plain program takes {graph.cost}"

    # Step 4.

    def test_deterministic(self) -> None:
        """Two strategies made anew give the same schedules, also for an equal graph that is another object."""
        for name, graph in self._graphs():
            ops, storages = (tuple(map(replace, parts)) for parts in (graph.ops, graph.storages))
            equal_graph = replace(graph, ops=ops, storages=storages)
            other = self.make()
            found = other.frontier(equal_graph)
            assert self._strategy().frontier(graph) == found, f"{name}: two frontiers of one graph"

            def known(graph: Graph, found: tuple[Proposal, ...] = found) -> tuple[Proposal, ...]:
                return found

            other.frontier = known  # type: ignore[method-assign]
            budget = self._budgets(graph)[-2]
            assert self._plan(graph, budget) == other.plan(equal_graph, budget), f"{name}: two plans for {budget} bytes"

    # Step 5.

    def test_infeasible_budget_names_the_least_feasible_one(self) -> None:
        """Too small a budget is refused with the least feasible one, which can be met; one byte less can't."""
        for name, graph in self._graphs():
            error = self._planned(graph, 1)
            assert isinstance(error, InfeasibleBudgetError), f"{name}: there is a plan for a budget of 1 byte"
            least = error.least_bytes
            assert error.budget_bytes == 1, f"{name}: the error names {error.budget_bytes} as the budget of 1 byte"
            assert str(least) in str(error), f"{name}: the message does not name {least}"
            assert self._plan(graph, least) is not None, f"{name}: {least} bytes are called feasible, and are not"
            assert self._plan(graph, least - 1) is None, f"{name}: {least} bytes are called the least, and are not"

    def test_a_budget_that_is_no_number_of_bytes_is_refused(self) -> None:
        """Zero, negative and fractional budgets are mistakes of the caller."""
        graph = with_backward(chain([4] * 3))
        for budget in (0, -1, 0.5, True, None):
            try:
                self.make().plan(graph, budget)  # type: ignore[arg-type]
            except InfeasibleBudgetError as error:
                raise AssertionError(f"budget_bytes={budget!r} is treated as a number of bytes") from error
            except ValueError:
                continue
            raise AssertionError(f"budget_bytes={budget!r} is accepted")

    # Step 6.

    def test_schedules_survive_json(self) -> None:
        """A schedule is the same after a round trip, names its strategy, and is bound to its graph."""
        for name, graph, budget, schedule in self._schedules(self._graphs()):
            again = Schedule.from_json(schedule.to_json())
            assert again == schedule, f"{name}: the schedule for {budget} bytes is another one after JSON"
            assert again.graph == graph.fingerprint, f"{name}: the schedule is not bound to its graph"
            assert again.strategy == self.make().name, f"{name}: the schedule does not name its strategy"

    # How the checks are made.

    def _graphs(self) -> Iterator[tuple[str, Graph]]:
        yield from tiny_graphs()
        if not self.small:
            yield from large_graphs()

    def _schedules(self, graphs: Iterable[tuple[str, Graph]]) -> Iterator[tuple[str, Graph, int, Schedule]]:
        """Names, graphs, budgets that can be met, and plans for them."""
        for name, graph in graphs:
            for budget in self._budgets(graph):
                schedule = self._plan(graph, budget)
                if schedule is not None:
                    yield name, graph, budget, schedule

    def _budgets(self, graph: Graph) -> list[int]:
        """Budgets from too small to plenty: where plans change, a byte beside, and a grid between."""
        plain = simulate(graph, Schedule.plain(graph)).peak_bytes
        budgets = {max(1, plain * part // 12) for part in range(1, 15)}
        if len(graph.storages) <= 20:
            least = _least_peak(graph)
            budgets |= {max(1, least - 1), least, least + 1, max(1, plain - 1), plain, plain + 1}
        return sorted(budgets)

    def _strategy(self) -> Strategy:
        """A new strategy that does not propose anew what this class has already seen for a graph."""
        strategy = self.make()
        propose = strategy.frontier

        def frontier(graph: Graph) -> tuple[Proposal, ...]:
            if graph.fingerprint not in self._frontiers:
                self._frontiers[graph.fingerprint] = propose(graph)
            return self._frontiers[graph.fingerprint]

        strategy.frontier = frontier  # type: ignore[method-assign]
        return strategy

    def _planned(self, graph: Graph, budget: int) -> Schedule | InfeasibleBudgetError:
        key = (graph.fingerprint, budget)
        if key not in self._plans:
            try:
                self._plans[key] = self._strategy().plan(graph, budget)
            except InfeasibleBudgetError as error:
                self._plans[key] = error
        return self._plans[key]

    def _plan(self, graph: Graph, budget: int) -> Schedule | None:
        planned = self._planned(graph, budget)
        return planned if isinstance(planned, Schedule) else None


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= _ROUNDING * max(abs(one), abs(other))


def _taken(name: str, graph: Graph, schedule: Schedule) -> Simulation:
    try:
        return simulate(graph, schedule)
    except ScheduleError as error:
        raise AssertionError(f"{name}: a schedule cannot run: {error}") from error


# several strategies are compared with the same optima, which take longer than most plans
_cheapest, _leanest = cache(cheapest_order), cache(leanest_order)


def _least_peak(graph: Graph) -> int:
    return _leanest(graph).peak_bytes
