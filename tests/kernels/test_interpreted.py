"""Runs the Triton kernels' tests in Triton's interpreter, which needs no GPU, each file in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "on_triton").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_equal_their_twins(path, tmp_path):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'rmm-linear[kernels]'")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
