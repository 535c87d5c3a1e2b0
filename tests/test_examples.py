"""Each script of examples/ runs and does what it says."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def main_of(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # torch.compile finds the module by its name
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.main


def test_there_is_a_test_for_each():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"plain_loop", "byte_budget", "trainer", "lora"}


def test_plain_loop():
    assert main_of("plain_loop")() < 0.2, "the loss begins at 1"


def test_byte_budget():
    main = main_of("byte_budget")
    assert main(steps=1, budget="60%") <= 0.6 * main(steps=1, budget="100%")


def test_trainer():
    pytest.importorskip("transformers")
    logged = main_of("trainer")(steps=10)
    assert logged["rmm/kept_mib"] < logged["rmm/exact_mib"]
    assert logged["rmm/relative_variance"] > 0


def test_lora():
    pytest.importorskip("peft")
    exact, sketched = main_of("lora")(steps=1)
    assert sketched < 0.95 * exact
