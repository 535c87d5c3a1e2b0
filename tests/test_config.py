"""RMMConfig: validated once, immutable, the same after a round trip; and the text by which torch finds its graphs."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from rmm_linear import RMMConfig
from rmm_linear import fingerprint as sources
from rmm_linear.config import config_of
from rmm_linear.sketches import SKETCHES
from rmm_linear.sketches.hadamard import Hadamard

RATIOS = (0, -0.1, 1.5, float("nan"), float("inf"), "0.5", None, True)
TOKENS = (0, "0", (0.5,), (True,), (0, 0), None, (1 << 31,))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        *(({"ratio": ratio}, r"not in \(0, 1\]; pass") for ratio in RATIOS),
        *(({"keep_tokens": tokens}, "keep_tokens=.*pass") for tokens in TOKENS),
        *(({"storage": storage}, "unknown; choose one of int8, int4, int2, or None") for storage in ("int5", 8, [""])),
        ({"sketch": "hadamrd"}, "'hadamrd' is unknown; choose one of .*hadamard"),
        ({"sketch": None}, "unknown"),
        ({"sketch": "centered"}, "unknown"),
        ({"center": 1}, "center=1 is not a bool"),
        ({"skip_padding": "yes"}, "skip_padding='yes' is not a bool"),
        ({"min_rows": -1}, "min_rows=-1"),
        ({"min_rows": 2.5}, "min_rows=2.5"),
    ],
    ids=str,
)
def test_bad_knobs_are_named_with_their_remedies(knobs, message):
    with pytest.raises(ValueError, match=message):
        RMMConfig(**knobs)


def test_unknown_knobs_and_recipes_are_named():
    with pytest.raises(TypeError, match="rho"):
        RMMConfig.from_dict({"rho": 0.5})
    with pytest.raises(TypeError, match="rho"):
        RMMConfig().replace(rho=0.5)
    with pytest.raises(ValueError, match="recipe 'best' is unknown; choose one of default"):
        RMMConfig.from_recipe("best")


@pytest.mark.parametrize("recipe", ["default", "fast", "paper"])
def test_recipes_round_trip(recipe):
    config = RMMConfig.from_recipe(recipe, ratio=0.2)
    assert config.ratio == 0.2
    for other in (
        RMMConfig.from_dict(json.loads(json.dumps(config.to_dict()))),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ):
        assert other == config
        assert hash(other) == hash(config)
        assert other.sketch_object == config.sketch_object


def test_the_paper_recipe_is_a_dense_gaussian_for_every_layer():
    assert RMMConfig.from_recipe("paper") == RMMConfig(ratio=0.5, sketch="gaussian", center=False, min_rows=1)


def test_it_is_frozen_and_hides_the_sketch():
    config = RMMConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ratio = 0.1
    expected = (
        "RMMConfig(ratio=0.5, sketch='hadamard', center=True, min_rows=128, storage=None, skip_padding=False,"
        " keep_tokens=(), share_sketch=True)"
    )
    assert repr(config) == expected


def test_saved_bytes_are_the_inputs_where_nothing_is_sketched():
    config = RMMConfig(ratio=0.5, center=False, min_rows=100)
    assert config.saved_bytes(99, 8, torch.bfloat16) == 99 * 8 * 2
    assert config.saved_bytes(128, 8, torch.bfloat16) == 64 * 8 * 2 + 8
    assert config.replace(center=True).saved_bytes(128, 8, torch.bfloat16) == 64 * 8 * 2 + 8 + 8 * 4
    assert config.replace(ratio=1.0).saved_bytes(128, 8, torch.float32) == 128 * 8 * 4


def test_equal_configurations_have_one_hash():
    """Made, changed and changed back, copied or loaded; and one that differs in any knob has another."""
    config = RMMConfig(ratio=0.3, keep_tokens=[0])
    others = (RMMConfig(ratio=0.3, keep_tokens=(0,)), config.replace(ratio=0.5).replace(ratio=0.3))
    for other in (*others, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert (other, hash(other)) == (config, hash(config))
    changes = {"ratio": 0.4, "sketch": "crs", "center": False, "min_rows": 1, "storage": "int8"}
    changes |= {"skip_padding": True, "keep_tokens": (), "share_sketch": False}
    assert len({config, *(config.replace(**{name: value}) for name, value in changes.items())}) == 9


def _elsewhere():
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


def test_sketches_of_the_library_are_found_again_by_another_process():
    # in the interpreter the ways are those of a GPU, or not, as is chosen
    assert _elsewhere() == [sources.fingerprint(Hadamard), "None"]


def test_nothing_tells_what_sketches_of_others_are_made_of():
    assert sources.fingerprint(OfSomebody) is None


def test_each_file_counts(monkeypatch, tmp_path):
    of_all = sources._of_library()
    assert of_all == sources.fingerprint(Hadamard)
    monkeypatch.setattr(sources, "_LIBRARY", ("*.py",))
    assert sources._of_library() != of_all
    monkeypatch.setattr(sources, "_LIBRARY", ())
    monkeypatch.setattr(sources, "KERNELS_FOLDER", tmp_path)
    assert sources._of_library() is None


def test_a_configuration_is_what_its_key_says(monkeypatch):
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


def test_a_subclass_is_found_by_its_key():
    @dataclass(frozen=True)
    class Half(RMMConfig):
        """Adds a field."""

        extra: int = 0

    config, other = Half(ratio=0.25, extra=1), Half(ratio=0.25, extra=2)
    assert config_of(config.graph_key) is config
    assert config_of(other.graph_key) is other
    assert copy.copy(config) == config
    assert config.graph_key != RMMConfig(ratio=0.25).graph_key
