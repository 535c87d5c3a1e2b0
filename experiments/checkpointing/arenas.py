"""How small an arena may be: DTR where memory has addresses, beside Coop."""

from rmm_linear.checkpointing import Graph
from rmm_linear.planning.simulate import peak_and_cost
from rmm_linear.planning.strategies.zhang2023_coop import CoopRun


class DtrInArena(CoopRun):
    """DTR in the same arena: it evicts the storage of the least h, wherever that lies, until a hole fits."""

    def _to_evict(self, size_bytes: int) -> list[int] | None:
        may_go = [index for index in self._live if self._may_go(index)]
        return [min(may_go, key=lambda index: (self._h(index), index))] if may_go else None


def least_arena(graph: Graph, kind: type[CoopRun]) -> tuple[float, float]:
    """Scan arenas from the plain peak, and a half more, downwards: that one is met does not say that larger ones are.

    Args:
        graph: The graph.
        kind: The policy.

    Returns:
        The least arena in which the policy ends, as a part of the plain peak, infinity if it ends in none; and the mean
        part of the arena that is free where it fails, 0 if it never does.
    """
    plain_bytes = peak_and_cost(graph, range(len(graph.ops)))[0]
    least, free = float("inf"), []
    for arena_bytes in (plain_bytes * part // 40 for part in range(60, 0, -1)):
        run = kind(graph, arena_bytes)
        if run.run():
            least = arena_bytes / plain_bytes
        else:
            free.append(run.arena.free_bytes / arena_bytes)
    return least, sum(free) / max(1, len(free))
