"""accelerate: a script that trains a converted model on two ranks, and hooks that were there before the conversion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from rmm_linear import RMMConfig, RMMLinear, convert_linears

SCRIPT = Path(__file__).with_name("accelerated_training.py")
ROOT = SCRIPT.parents[2]


def run(*command: str) -> None:
    paths = [*map(str, (ROOT, ROOT / "kernels", ROOT / "tests" / "contracts")), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_launched_ranks_learn_and_hold_the_same_weights(tmp_path):
    run(str(SCRIPT), str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert (first["ranks"], first["kind"], first["sketched"]) == (2, "DistributedDataParallel", 12)
    for found in (first, second):
        assert sum(found["losses"][-5:]) < 0.8 * sum(found["losses"][:5])
    assert first["losses"] != second["losses"]
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


CONFIG = RMMConfig(ratio=0.25, min_rows=1)


def test_hooks_after_the_conversion_call_the_sketched_forward():
    model, x = convert_linears(two_layers(), config=CONFIG, target_modules=".*"), torch.randn(160, 16)
    for layer in model:
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        gradients.append([layer.weight.grad.clone() for layer in model if isinstance(layer, RMMLinear)])
    assert len(gradients[0]) == 2
    assert all(not torch.equal(one, other) for one, other in zip(*gradients, strict=True))
