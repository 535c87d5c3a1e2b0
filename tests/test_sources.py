"""The text by which torch finds compiled graphs on disk changes with the code that they were made by."""

import subprocess
import sys

import pytest

from rmm_linear import RMMConfig, sources
from rmm_linear.sketches import SKETCHES, Sketch
from rmm_linear.sketches.hadamard import Hadamard


def _elsewhere(expression: str) -> str:
    """What another process makes of it."""
    code = f"from rmm_linear import sources\nfrom rmm_linear.sketches.hadamard import Hadamard\nprint({expression})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class OfSomebody(Hadamard):
    """A sketch that this library has not got the code of."""


def test_sketches_of_the_library_are_found_again_by_another_process() -> None:
    assert sources.fingerprint(Hadamard) == _elsewhere("sources.fingerprint(Hadamard)")


def test_sketches_of_others_are_found_again_in_this_process_alone() -> None:
    own = sources.fingerprint(OfSomebody)
    assert own == sources.fingerprint(OfSomebody) != sources.fingerprint(Hadamard)
    assert own != _elsewhere("sources.fingerprint(type('OfSomebody', (), {'__module__': 'theirs'}))")
    # a class that was written anew has the name of the one before
    assert own != sources.fingerprint(type("OfSomebody", (Hadamard,), {"__module__": OfSomebody.__module__}))


def test_each_file_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = sources._of_library.__wrapped__()
    monkeypatch.setattr(sources, "_LIBRARY", ("*.py", "sketches/*.py"))
    assert sources._of_library.__wrapped__() != of_all
    monkeypatch.setattr(sources, "_LIBRARY", ())
    monkeypatch.setattr(sources, "_KERNELS", ())
    # nothing to read: what is found again is of this process
    assert sources._of_library.__wrapped__() is None
    monkeypatch.setattr(sources, "_of_library", lambda: None)
    assert sources.fingerprint(Hadamard) == sources.fingerprint(Hadamard) != sources.fingerprint(OfSomebody)


def test_a_configuration_is_what_its_key_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RMMConfig(ratio=0.3, storage="int8", keep_tokens=(0, -1))
    assert RMMConfig.from_graph_key(config.graph_key) == config
    assert config.graph_key == config.replace().graph_key != config.replace(ratio=0.31).graph_key
    monkeypatch.setitem(SKETCHES, "hadamard", OfSomebody)
    assert isinstance(config.replace().sketch_object, Sketch)
    assert config.replace().graph_key != config.graph_key
    with pytest.raises(ValueError, match="'hadamard' is not the one that a compiled layer was configured with"):
        RMMConfig.from_graph_key(config.graph_key)
