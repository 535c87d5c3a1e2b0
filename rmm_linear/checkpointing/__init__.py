"""Plan which tensors a training step keeps and which it computes again, and run the plan."""

from rmm_linear.checkpointing.bptt import bptt_checkpoint
from rmm_linear.checkpointing.planned import (
    PlannedStep,
    apply_schedule,
    capture,
    checkpoint_model,
    checkpoint_step,
    remove_checkpointing,
)
from rmm_linear.compiler.joint_graph import Capture
from rmm_linear.planning.graph import Graph, Op, Storage
from rmm_linear.planning.plan import CheckpointPlan
from rmm_linear.planning.schedule import Schedule, Step, validate
from rmm_linear.planning.simulate import Simulation, simulate
from rmm_linear.planning.strategies import available_strategies, get_strategy

__all__ = [
    "Capture",
    "CheckpointPlan",
    "Graph",
    "Op",
    "PlannedStep",
    "Schedule",
    "Simulation",
    "Step",
    "Storage",
    "apply_schedule",
    "available_strategies",
    "bptt_checkpoint",
    "capture",
    "checkpoint_model",
    "checkpoint_step",
    "get_strategy",
    "remove_checkpointing",
    "simulate",
    "validate",
]
