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
    assert " passed" in interpreted(path, tmp_path, "-m", "not slow")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in FILES if "mark.slow" in path.read_text()], ids=lambda path: path.stem
)
def test_kernels_equal_their_twins_in_more_cases(path, tmp_path):
    """Without what is drawn thousands of times: it takes an hour there, and is shown of the twins."""
    assert " passed" in interpreted(path, tmp_path, "-m", "slow and not montecarlo")


def interpreted(path: Path, cache: Path, *options: str) -> str:
    """What pytest says of a file's tests; they all pass, and none is skipped."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'rmm-linear[kernels]'")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    return done.stdout
