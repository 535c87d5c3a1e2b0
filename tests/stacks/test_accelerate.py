"""accelerate: a script that trains a converted model on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).with_name("accelerated_training.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.slow
def test_two_launched_ranks_learn_and_hold_the_same_weights(tmp_path):
    paths = [*map(str, (ROOT, ROOT / "kernels", ROOT / "tests" / "contracts")), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert (first["ranks"], first["kind"], first["sketched"]) == (2, "DistributedDataParallel", 12)
    for found in (first, second):
        assert sum(found["losses"][-5:]) < 0.8 * sum(found["losses"][:5])
    assert first["losses"] != second["losses"]
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
