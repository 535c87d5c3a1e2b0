"""The text by which torch finds compiled graphs on disk changes with the code that they were made by."""

import os
import subprocess
import sys

import pytest

from rmm_linear import RMMConfig
from rmm_linear.ops import sources
from rmm_linear.sketches import SKETCHES, Sketch
from rmm_linear.sketches.hadamard import Hadamard


def _elsewhere(expression: str, **changes: str) -> str:
    """What another process makes of it."""
    code = f"from rmm_linear.ops import sources\nfrom rmm_linear.sketches.hadamard import Hadamard\nprint({expression})"
    environment = os.environ | changes
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


class OfSomebody(Hadamard):
    """A sketch that this library has not got the code of."""


def test_sketches_of_the_library_are_found_again_by_another_process() -> None:
    assert sources.fingerprint(Hadamard) == _elsewhere("sources.fingerprint(Hadamard)")
    # whose ways are those of a GPU, or not, as is chosen
    assert _elsewhere("sources.fingerprint(Hadamard)", TRITON_INTERPRET="1") == "None"


def test_nothing_tells_what_sketches_of_others_are_made_of() -> None:
    assert sources.fingerprint(OfSomebody) is None


def test_each_file_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = sources._of_library()
    assert of_all == sources.fingerprint(Hadamard)
    monkeypatch.setattr(sources, "_LIBRARY", ("*.py", "sketches/*.py"))
    assert sources._of_library() != of_all
    monkeypatch.setattr(sources, "_LIBRARY", ())
    monkeypatch.setattr(sources, "_KERNELS", ())
    assert sources._of_library() is None


def test_a_configuration_is_what_its_key_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RMMConfig(ratio=0.3, storage="int8", keep_tokens=(0, -1))
    assert config.graph_key is not None
    assert RMMConfig.from_graph_key(config.graph_key) == config
    assert config.graph_key == config.replace().graph_key != config.replace(ratio=0.31).graph_key
    monkeypatch.setitem(SKETCHES, "hadamard", OfSomebody)
    assert isinstance(config.replace().sketch_object, Sketch)
    assert config.replace().graph_key is None
