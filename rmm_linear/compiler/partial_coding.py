"""Chooses by a linear program which tensors of a step are coded, and which tensors are computed again."""

from dataclasses import replace

from rmm_linear.compiler.joint_graph import Capture
from rmm_linear.planning.coding import Bits
from rmm_linear.planning.relaxation import least_extra_cost, relaxations

_Costs = dict[tuple[str, int], float]


class PartialCoding:
    """Chooses among the codes of a step.

    Codes are priced by captures that have one code of each kind: so much more than the exact step it costs, for each
    byte of its tensor. Together they cost as much as the step with codes of all tensors costs more, or less.

    `coded` is the step with codes of all tensors. `costs` has the step's time with the code of one tensor alone, by
    its name and bits; new times are added.

    Raises:
        ImportError: If scipy, which solves the linear program, is not installed.
    """

    def __init__(self, exact: Capture, coded: Capture, bits: Bits, costs: _Costs) -> None:
        # no capture, for the fitted model holds these numbers
        self._bits, self._plain_cost = bits, exact.graph.cost
        self._all = frozenset(tensor.name for tensor in coded.coding.coded)
        self._programs = relaxations(exact.graph, coded.coding, _prices(exact, coded, bits, costs))

    def least_cost(self, budget_bytes: int) -> float:
        """Return a bound: no mixture of these codes and of recomputation costs less, by the prices of the codes.

        It is infinite if nothing fits.
        """
        return self._plain_cost + least_extra_cost(self._programs, budget_bytes)

    def choose(self, budget_bytes: int) -> Bits | None:
        """Choose the tensors that are worth their codes, for a budget at the moments that the program looks at.

        Return the bits of their codes; None if none are, or all, or nothing fits.
        """
        solved = [program.solve(budget_bytes) for program in self._programs]
        found = [each for each in solved if each is not None]
        if not found or len(found) < len(solved):
            return None
        coded = max(found, key=lambda each: each.extra_cost).coded
        return replace(self._bits, only=coded) if coded and coded != self._all else None


def _prices(exact: Capture, coded: Capture, bits: Bits, costs: _Costs) -> dict[str, float]:
    assert exact.rewritten is not None
    uncoded_cost, tensors = _uncoded_cost(exact, bits, costs), coded.coding.coded
    alone = {memory.codes[0] for memory in coded.coding.freed if len(memory.codes) == 1}
    prices: dict[str, float] = {}
    for kind in dict.fromkeys(tensor.kind for tensor in tensors):
        own = [tensor for tensor in tensors if tensor.kind == kind]
        # a code may free memory together with others alone
        price = (coded.graph.cost - uncoded_cost) / sum(tensor.tensor_bytes for tensor in tensors)
        largest = max((each for each in own if each.name in alone), key=lambda each: each.tensor_bytes, default=None)
        if largest is not None:
            one = largest.name, largest.bits
            if one not in costs:
                costs[one] = exact.rewritten(replace(bits, only=frozenset([largest.name])), None).graph.cost
            price = (costs[one] - uncoded_cost) / largest.tensor_bytes
        prices |= {tensor.name: max(0.0, price) * tensor.tensor_bytes for tensor in own}
    # codes may share ops
    extra_cost = max(0.0, coded.graph.cost - uncoded_cost)
    share = min(1.0, extra_cost / (sum(prices.values()) or 1.0))
    return {name: share * price for name, price in prices.items()}


def _uncoded_cost(exact: Capture, bits: Bits, costs: _Costs) -> float:
    """Cost of the step without codes whose backward pass casts weights again, as steps with codes do under autocast."""
    assert exact.rewritten is not None
    if not any(op.kind == "aten._to_copy" and not op.reads for op in exact.graph.ops):
        return exact.graph.cost
    if ("", 0) not in costs:
        costs["", 0] = exact.rewritten(replace(bits, only=frozenset()), None).graph.cost
    return costs["", 0]
