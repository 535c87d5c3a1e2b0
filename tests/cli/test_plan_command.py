"""`rmm-linear plan`: the plan is the library's, and a mistake is one line."""

import json
import re

import pytest
import torch

from rmm_linear.checkpointing import Schedule, capture, simulate
from rmm_linear.cli import main

hf_models = pytest.importorskip("rmm_linear.integrations.hf_models")


@pytest.fixture
def folder(gpt2_folder):
    return str(gpt2_folder)


OPTIONS = ("--batch", "4", "--seq", "48", "--strategy", "chen2016_sqrt")


def run(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_json_is_the_plan_of_the_real_model(folder, capsys):
    found = json.loads(run(capsys, folder, *OPTIONS, "--budget", "70%", "--json"))
    model = hf_models.build_model(folder)
    model.config.use_cache = False
    ids = torch.randint(0, 50, (4, 48))
    graph = capture(model, (), {"input_ids": ids, "labels": ids}).graph
    assert simulate(graph, Schedule.plain(graph)).peak_bytes == found["plain_peak_bytes"]
    schedule = Schedule.from_dict(found["schedule"])
    assert simulate(graph, schedule).peak_bytes == found["planned_peak_bytes"] <= found["budget_bytes"]
    assert simulate(graph, schedule).overhead == pytest.approx(found["overhead"])


def test_a_classifier_is_planned_with_its_labels(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=64, architectures=["BertForSequenceClassification"])
    config.save_pretrained(tmp_path)
    assert "budget" in run(capsys, str(tmp_path), *OPTIONS, "--budget", "90%")


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_told_in_percent_with_one_that_is_not(folder, capsys):
    assert main(["plan", folder, *OPTIONS, "--budget", "1%"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    found = re.search(r"within 1% = [\d.]+ KiB; the least that was found takes ([\d.]+)% = ([\d.]+) KiB, of the", error)
    assert found, error
    plan = json.loads(run(capsys, folder, *OPTIONS, "--budget", f"{found[1]}%", "--json"))
    assert plan["planned_peak_bytes"] / 2**10 == pytest.approx(float(found[2]), abs=0.006)
