"""The text by which torch finds compiled graphs on disk changes with the code that they were made by."""

import copy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rmm_linear import RMMConfig
from rmm_linear import fingerprint as sources
from rmm_linear.config import config_of
from rmm_linear.sketches import SKETCHES
from rmm_linear.sketches.hadamard import Hadamard


def _elsewhere() -> list[str]:
    """What another process makes of it, before and after it is told to interpret Triton's kernels."""
    code = (
        "import importlib, os\n"
        "from rmm_linear import backend, fingerprint\n"
        "from rmm_linear.sketches.hadamard import Hadamard\n"
        "from rmm_linear_kernels import interpreter\n"
        "print(fingerprint.fingerprint(Hadamard))\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "for module in (interpreter, backend, fingerprint):\n"
        "    importlib.reload(module)\n"
        "print(fingerprint.fingerprint(Hadamard))\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


class OfSomebody(Hadamard):
    """A sketch that this library has not got the code of."""


def test_sketches_of_the_library_are_found_again_by_another_process() -> None:
    # in the interpreter the ways are those of a GPU, or not, as is chosen
    assert _elsewhere() == [sources.fingerprint(Hadamard), "None"]


def test_nothing_tells_what_sketches_of_others_are_made_of() -> None:
    assert sources.fingerprint(OfSomebody) is None


def test_each_file_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of_all = sources._of_library()
    assert of_all == sources.fingerprint(Hadamard)
    monkeypatch.setattr(sources, "_LIBRARY", ("*.py",))
    assert sources._of_library() != of_all
    monkeypatch.setattr(sources, "_LIBRARY", ())
    monkeypatch.setattr(sources, "KERNELS_FOLDER", tmp_path)
    assert sources._of_library() is None


def test_a_configuration_is_what_its_key_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RMMConfig(ratio=0.3, storage="int8", keep_tokens=(0, -1))
    assert config_of(config.graph_key) == config
    assert config.graph_key == config.replace().graph_key != config.replace(ratio=0.31).graph_key
    found = sources.fingerprint(Hadamard)
    assert found is not None
    assert config.graph_key.startswith(found)
    monkeypatch.setitem(SKETCHES, "hadamard", OfSomebody)
    # not found on disk by another process
    assert not config.replace().graph_key.startswith(found)
    assert isinstance(config_of(config.replace().graph_key).sketch_object.inner.inner, OfSomebody)


def test_a_subclass_is_found_by_its_key() -> None:
    @dataclass(frozen=True)
    class Half(RMMConfig):
        """Adds a field."""

        extra: int = 0

    config, other = Half(ratio=0.25, extra=1), Half(ratio=0.25, extra=2)
    assert config_of(config.graph_key) is config
    assert config_of(other.graph_key) is other
    assert copy.copy(config) == config
    assert config.graph_key != RMMConfig(ratio=0.25).graph_key
