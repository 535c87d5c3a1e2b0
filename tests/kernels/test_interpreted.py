"""Runs the Triton kernels' tests in Triton's interpreter, which needs no GPU, in processes of their own.

Of cases alike, `make test` runs some: of each kernel every dtype, a round shape, a ragged one and a tiny one. Those
that are marked `grid` are left to `make check`, and to GPUs, which run all.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "on_triton").glob("test_*.py"))


def test_kernels_equal_their_references(tmp_path):
    # one process for all: it takes seconds to begin
    assert " passed" in interpreted(FILES, tmp_path, "-m", "not slow and not grid")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in FILES if re.search(r"mark\.(slow|grid)", path.read_text())], ids=lambda path: path.stem
)
def test_kernels_equal_their_references_in_more_cases(path, tmp_path):
    """Without what is drawn thousands of times: it takes an hour there, and is shown of the references."""
    assert " passed" in interpreted([path], tmp_path, "-m", "(slow or grid) and not montecarlo")


def interpreted(paths, cache, *options):
    """What pytest says of files' tests; they all pass, and none is skipped."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'rmm-linear[kernels]'")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *map(str, paths)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    return done.stdout
