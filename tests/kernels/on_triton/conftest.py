"""Every Triton kernel against its plain-torch reference: on the GPU, or in Triton's interpreter on a CPU.

TRITON_INTERPRET=1 changes what `triton.jit` makes of a function at import and must not reach the rest of the suite:
`tests/kernels/test_interpreted.py` runs these files in processes of their own. Where there is a GPU, they are collected
as any others are.
"""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not IS_INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device():
    return torch.device("cpu" if IS_INTERPRETED else "cuda")
