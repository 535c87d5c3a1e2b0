"""The examples in the docstrings run, and print what they say."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import rmm_linear

NEEDS = {"rmm_linear.integrations.hf_trainer": "transformers"}


def modules():
    names = [info.name for info in pkgutil.walk_packages(rmm_linear.__path__, "rmm_linear.")]
    return ["rmm_linear", *names, "sketch_contract"]


@pytest.mark.parametrize("name", modules())
def test_examples_print_what_they_say(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    torch.manual_seed(0)
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_the_public_functions_have_examples():
    import rmm_linear.functional

    public = (rmm_linear.convert_linears, rmm_linear.RMMConfig, rmm_linear.RMMLinear, rmm_linear.functional.linear)
    finder = doctest.DocTestFinder(recurse=False)
    assert all(finder.find(function)[0].examples for function in public)
