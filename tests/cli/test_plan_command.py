"""`rmm-linear plan`: the plan is the library's, and a mistake is one line."""

import json

import pytest
import torch
from tiny_transformers import SIZES

from rmm_linear.checkpointing import Schedule, capture, simulate

hf_models = pytest.importorskip("rmm_linear.integrations.hf_models")


OPTIONS = ("--batch", "4", "--seq", "48", "--strategy", "chen2016_sqrt")


def test_json_is_the_plan_of_the_real_model(gpt2_folder, answer):
    found = json.loads(answer("plan", gpt2_folder, *OPTIONS, "--budget", "70%", "--json"))
    model = hf_models.build_model(str(gpt2_folder))
    model.config.use_cache = False
    ids = torch.randint(0, 50, (4, 48))
    graph = capture(model, (), {"input_ids": ids, "labels": ids}).graph
    assert simulate(graph, Schedule.plain(graph)).peak_bytes == found["plain_peak_bytes"]
    schedule = Schedule.from_dict(found["schedule"])
    assert simulate(graph, schedule).peak_bytes == found["planned_peak_bytes"] <= found["budget_bytes"]
    assert simulate(graph, schedule).overhead == pytest.approx(found["overhead"])


def test_a_classifier_is_planned_with_its_labels(tmp_path, answer):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SIZES, architectures=["BertForSequenceClassification"])
    config.save_pretrained(tmp_path)
    assert "budget" in answer("plan", str(tmp_path), *OPTIONS, "--budget", "90%")


def test_a_decoder_with_its_own_configuration_is_planned_without_caches(tmp_path, answer):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    assert "decoder" in answer("plan", tmp_path, *OPTIONS, "--budget", "100%")
