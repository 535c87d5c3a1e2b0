"""Double checkpointing of a long sequence: Bencheikh et al. 2024 (arXiv 2412.11810).

The forward pass pages the state before every k1-th step out: to the host's memory, or to a disk. The backward pass
brings the last of these back, runs the k1 steps after it once more and keeps the state before every k2-th; then it runs
the k2 steps after the last of these with their graphs, goes back through them, and on to the state before. So a step
runs forward three times, and the local memory does not grow with the sequence: k1 / k2 states, and k2 states with the
tensors that autograd keeps of a step.
"""

from collections.abc import Iterator

from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.strategies.chain_reversal import Action, StepBytes


def actions(steps: int, host_every: int, local_every: int) -> Iterator[Action]:
    """Write the schedule, for spacings k1 and k2 that `check` lets pass."""
    starts = range(0, steps, host_every)
    yield from (Action("page", start) for start in starts[1:-1])
    for start in reversed(starts):
        if start:
            yield Action("hold", start)
        end = min(start + host_every, steps)
        inner = range(start, end, local_every)
        yield from (Action("hold", mark) for mark in inner[1:])
        for mark in reversed(inner):
            several = range(mark, min(mark + local_every, end))
            yield from (Action("store", step) for step in several)
            yield from (Action("reverse", step) for step in reversed(several))
            if mark:
                yield Action("release", mark)


def spacing_for_bytes(budget_bytes: int, steps: int, sizes: StepBytes) -> tuple[int, int]:
    """Return the spacing k1, k2 that pages the fewest states for a budget of local bytes.

    Raises:
        InfeasibleBudgetError: If not even one step fits.
    """
    state_bytes, of_step = sizes.state_bytes, sizes.state_bytes + sizes.internal_bytes
    # the state that a step starts from, and the one before it while steps run without a graph
    rest = budget_bytes - 2 * state_bytes
    best = (0, 0)
    local_every = 1
    while local_every * of_step <= rest and local_every <= steps:
        marks = (rest - local_every * of_step) // max(1, state_bytes)
        best = max(best, (local_every * min(max(1, marks), -(-steps // local_every)), -local_every))
        local_every += 1
    if not best[0]:
        raise InfeasibleBudgetError(
            f"{budget_bytes} bytes hold not even one step of double checkpointing, which takes"
            f" {2 * state_bytes + of_step}",
            budget_bytes=budget_bytes,
            least_bytes=2 * state_bytes + of_step,
        )
    return best[0], -best[1]


def check(host_every: int, local_every: int) -> None:
    """Refuse spacings that are no positive ints, or of which the first is no multiple of the second."""
    for name, value in (("host_every", host_every), ("local_every", local_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is no positive int; pass a number of steps")
    if host_every % local_every:
        raise ValueError(
            f"host_every={host_every} is no multiple of local_every={local_every}; pass one, such as"
            f" {host_every - host_every % local_every or local_every}"
        )
