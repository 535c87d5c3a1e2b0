"""One way of running a model's step, watched: a baseline that runs something else measures nothing."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config

from rmm_linear.compiler.backend import Group
from rmm_linear.errors import InfeasibleBudgetError
from rmm_linear.planning.graph import Graph
from rmm_linear.planning.strategies import get_strategy

COLUMNS = (
    *("method", "setting", "budget_bytes", "simulated_peak_bytes", "peak_bytes", "tensors_peak_bytes"),
    *("step_s", "step_s_q20", "step_s_q80", "rounds", "gradient_difference", "same_gradients", "compile_s", "note"),
)
# It is given, and not made by `backward`: it would count.
_TANGENT = torch.ones(())


class Watched:
    """A backend that counts what it is given.

    Args:
        backend: What compiles the graphs.

    Attributes:
        graphs: How many graphs there were.
        blocks: How many calls of torch.utils.checkpoint are in them.
        memory_budget: Torch's `activation_memory_budget` at the last of them.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self.graphs = self.blocks = 0
        self.memory_budget: float | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph."""
        checkpoint = torch.ops.higher_order.tag_activation_checkpoint
        self.graphs += 1
        self.blocks += sum(node.target is checkpoint for node in module.graph.nodes)
        self.memory_budget = functorch_config.activation_memory_budget
        return self._backend(module, inputs)


@dataclass
class Way:
    """A way of running a step.

    Attributes:
        model: Its own copy of the model.
        forward: Runs the forward pass, returns the loss.
        row: What is known of it so far.
        group: Counts the runs of plans; None for a rival.
        watched: What compiles it; None for eager mode.
        steps: How many steps ran.
    """

    model: nn.Module
    forward: Callable[[], Tensor]
    row: dict[str, Any]
    group: Group | None
    watched: Watched | None
    steps: int = 0

    def step(self) -> None:
        """Run a step, from no gradients to all."""
        self.model.zero_grad(set_to_none=True)
        loss = self.forward()
        loss.backward(_TANGENT)
        self.steps += 1

    def timed_step(self) -> None:
        """Run a step that leaves no gradients behind."""
        self.step()
        self.model.zero_grad(set_to_none=True)

    def check(self) -> None:
        """Fail if a step was compiled again, or ran without its plan: what was measured were something else."""
        assert self.watched is None or self.watched.graphs == 1, f"{self.watched.graphs} graphs"
        assert self.group is None or self.group.runs == self.steps, f"{self.group.runs} of {self.steps} steps by plan"


def with_own_code(function: Any) -> Callable[..., Any]:
    """Return a function that Dynamo tells apart: it keeps what it compiled, and counts it, by code object."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def least_bytes(graph: Graph) -> int:
    """Return the least budget that a plan was found for."""
    try:
        get_strategy("auto").plan(graph, 1)
    except InfeasibleBudgetError as error:
        return error.least_bytes
    raise AssertionError("no step fits a byte")
