"""Planned training steps as a backend of torch.compile."""

from rmm_linear.compiler.backend import Options, plans, rmm_linear

__all__ = ["Options", "plans", "rmm_linear"]
