"""`rmm-linear profile`: the comparison is what the converted model keeps, and a mistake is one line."""

import json
import os
import subprocess
import sys

import pytest
from tiny_transformers import SIZES

from rmm_linear import RMMConfig, convert_linears
from rmm_linear.memory import SavedTensors

transformers = pytest.importorskip("transformers")
hf_models = pytest.importorskip("rmm_linear.integrations.hf_models")

LONGER = SIZES | {"max_position_embeddings": 160}
CONFIGS = {
    "roberta": transformers.RobertaConfig(
        **LONGER, architectures=["RobertaForSequenceClassification"], attention_probs_dropout_prob=0.0
    ),
    "gpt2": transformers.GPT2Config(**LONGER, architectures=["GPT2LMHeadModel"]),
    "bare": transformers.BertConfig(**LONGER),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, config in CONFIGS.items():
        config.save_pretrained(tmp_path / name)
    return tmp_path


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_columns_are_what_the_models_keep(name, folder, answer):
    found = json.loads(answer("profile", folder / name, "--batch", "4", "--seq", "64", "--ratio", "0.25", "--json"))
    columns = {column["name"]: column["bytes"] for column in found["columns"]}
    model = hf_models.build_model(str(folder / name))
    batch = hf_models.random_batch(model, batch=4, length=64)

    def kept():
        with SavedTensors(model) as saved:
            model(**batch)
        return saved.bytes

    assert columns["exact"] == kept() == found["report"]["total_bytes"]
    convert_linears(model, config=RMMConfig(ratio=0.25))
    assert columns["hadamard 0.25, every layer"] == kept()
    assert columns["hadamard 0.25, where it frees anything"] <= columns["hadamard 0.25, every layer"]
    assert columns["gradient checkpointing"] < columns["exact"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_shapes_alone_tell_the_same(attention, folder, answer):
    arguments = ["profile", folder / "roberta", "--batch", "4", "--seq", "64", "--attention", attention, "--json"]
    real, meta = (json.loads(answer(*arguments, *more)) for more in ([], ["--meta"]))
    if attention == "eager":
        # a fused kernel keeps what it likes, and torch chooses another one for other devices
        names = [column["name"] for column in meta["columns"]]
        assert meta["columns"] == [column for column in real["columns"] if column["name"] in names]
        assert len(names) >= 7
    assert {storage["device"] for storage in meta["report"]["storages"]} == {"meta"}


def test_a_model_that_reads_values_is_named(folder, refused, monkeypatch):
    def reads(model, **batch):
        return batch["input_ids"].sum().item()

    monkeypatch.setattr("rmm_linear.cli.profile.profile", reads)
    error = refused("profile", folder / "bare", "--meta")
    assert "can't be run on shapes alone (Tensor.item() cannot be called on meta tensors)" in error


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_text_and_its_options(folder, answer):
    options = "--layers 3 --dtype bfloat16 --storage int4 --ratio 0.5,1 --batch 4"
    text = answer("profile", folder / "roberta", *options.split())
    assert "bfloat16, random weights and inputs: input_ids (4, 128), labels (4,)" in text
    assert "RobertaForSequenceClassification keeps" in text
    (line,) = [line for line in text.splitlines() if line.startswith("roberta.encoder.layer.*.intermediate.dense")]
    assert line.split()[2] == "3"
    for name in ("exact", "hadamard 0.5 in int4, every layer", "input in int4, where it frees", "gradient checkp"):
        assert any(row.startswith(name) for row in text.splitlines())


def test_a_batch_that_the_model_does_not_take_is_one_line(folder, refused):
    # two of RoBERTa's positions are never used
    assert "can't be run on random tensors of 8 x 160 (index" in refused("profile", folder / "roberta", "--seq", "160")


@pytest.mark.slow
def test_the_program_runs_by_itself(folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["kernels", *sys.path])}
    command = [sys.executable, "-m", "rmm_linear.cli", "profile", folder / "bare", "--batch", "2", "--seq", "16"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "BertModel keeps" in done.stdout


def test_without_transformers_it_says_what_to_install(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "rmm_linear.integrations.hf_models", raising=False)
    assert 'pip install "rmm-linear[hf]"' in refused("profile", "some/model")


def test_attention_that_is_not_fused_here_is_named(folder, answer):
    # GPT-2's attention has dropout, the RoBERTa's has none
    assert "attention is not fused here" in answer("profile", folder / "gpt2", "--batch", "2", "--seq", "32")
    for arguments in (["roberta"], ["gpt2", "--attention", "eager"]):
        found = answer("profile", folder / arguments[0], *arguments[1:], "--batch", "2", "--seq", "32")
        assert "not fused" not in found
