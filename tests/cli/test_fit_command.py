"""`rmm-linear fit`: what `fit` finds for shapes alone, the largest batch of a budget, and mistakes in one line."""

import json
import re

import pytest
import torch

from rmm_linear import fit
from rmm_linear.cli import main
from rmm_linear.errors import InfeasibleBudgetError

hf_models = pytest.importorskip("rmm_linear.integrations.hf_models")


OPTIONS = ("--batch", "8", "--seq", "48")


def fitted(folder, batch, budget, noise=0.0):
    model = hf_models.build_model(str(folder))
    model.config.use_cache = False
    ids = torch.randint(0, 50, (batch, 48))
    return fit(model, {"input_ids": ids, "labels": ids}, budget, noise)


@pytest.mark.slow
def test_json_is_what_fit_finds_for_the_real_model(gpt2_folder, answer):
    found = json.loads(answer("fit", gpt2_folder, *OPTIONS, "--budget", "90%", "--noise", "0", "--json"))
    expected = fitted(gpt2_folder, 8, "90%")
    assert found["exact_peak_bytes"] == expected.plain_bytes
    assert found["budget_bytes"] == expected.budget_bytes
    assert found["options"] == expected.options
    (way,) = found["ways"]
    assert way["name"] == found["chosen"] == "exact"
    assert way["peak_bytes"] == expected.plan.peak_bytes <= found["budget_bytes"]
    assert way["time"] == pytest.approx(expected.chosen.time)


@pytest.mark.slow
def test_text_has_each_way_with_its_peak_and_time_and_says_that_no_noise_was_measured(gpt2_folder, answer, tmp_path):
    figure = tmp_path / "fit.png"
    text = answer("fit", gpt2_folder, *OPTIONS, "--budget", "70%", "--figure", str(figure))
    assert "is not measured here: the fastest way is taken" in text
    assert re.search(r"^exact +[\d.]+ +\d\.\d{3} +0$", text, re.MULTILINE)
    assert re.search(r"^8 bits.* +[\d.]+ +\d\.\d{3} +not measured$", text, re.MULTILINE)
    assert figure.stat().st_size > 10_000


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not(gpt2_folder, answer):
    text = answer("fit", gpt2_folder, "--batch", "max", "--seq", "48", "--budget", "1MiB", "--noise", "0", "--json")
    found = json.loads(text)
    assert fitted(gpt2_folder, found["batch"], "1MiB").plan.peak_bytes <= 2**20
    with pytest.raises(InfeasibleBudgetError):
        fitted(gpt2_folder, found["batch"] + 1, "1MiB")


def test_a_batch_that_is_no_number_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "roberta-base", "--budget", "1GiB", "--batch", "many"])
    assert capsys.readouterr().err.endswith("argument --batch: 'many' is neither a number nor 'max'\n")


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["8", "max"])
def test_a_budget_that_is_too_small_is_told_with_the_least(gpt2_folder, refused, batch):
    error = refused("fit", gpt2_folder, "--batch", batch, "--seq", "48", "--budget", "100kB", "--noise", "0")
    least = re.search(r"fit found no schedule within 100 kB; the least that was found takes ([\d.]+) kB$", error)
    assert least, error
    assert float(least[1]) > 100
