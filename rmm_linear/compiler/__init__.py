"""Planned training steps as a backend of torch.compile."""

import torch._dynamo

from rmm_linear.compiler.backend import Options, plans, rmm_linear

__all__ = ["Options", "plans", "rmm_linear"]

# an entry point names it where the package is installed, and not where its sources are found by their path
if "rmm_linear" not in torch._dynamo.list_backends():
    torch._dynamo.register_backend(rmm_linear)
