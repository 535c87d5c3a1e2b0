"""`rmm-linear profile`: the comparison is what the converted model keeps, and a mistake is one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmm_linear import RMMConfig, convert_linears
from rmm_linear.cli import main
from rmm_linear.memory import SavedTensors

transformers = pytest.importorskip("transformers")
hf_models = pytest.importorskip("rmm_linear.integrations.hf_models")

CONFIGS = {
    "roberta": transformers.RobertaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=160, architectures=["RobertaForSequenceClassification"],
        attention_probs_dropout_prob=0.0,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=160, architectures=["GPT2LMHeadModel"]
    ),
    "bare": transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, config in CONFIGS.items():
        config.save_pretrained(tmp_path / name)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["profile", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_columns_are_what_the_models_keep(name, folder, capsys):
    found = json.loads(run(capsys, str(folder / name), "--batch", "4", "--seq", "64", "--ratio", "0.25", "--json"))
    columns = {column["name"]: column["bytes"] for column in found["columns"]}
    model = hf_models.build_model(str(folder / name))
    batch = hf_models.random_batch(model, batch=4, length=64)

    def kept() -> int:
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
def test_shapes_alone_tell_the_same(attention, folder, capsys):
    arguments = [str(folder / "roberta"), "--batch", "4", "--seq", "64", "--attention", attention, "--json"]
    real, meta = (json.loads(run(capsys, *arguments, *more)) for more in ([], ["--meta"]))
    if attention == "eager":
        # a fused kernel keeps what it likes, and torch chooses another one for other devices
        names = [column["name"] for column in meta["columns"]]
        assert meta["columns"] == [column for column in real["columns"] if column["name"] in names]
        assert len(names) >= 7
    assert {storage["device"] for storage in meta["report"]["storages"]} == {"meta"}


def test_a_model_that_reads_values_is_named(folder, capsys, monkeypatch):
    def reads(model, **batch):
        return batch["input_ids"].sum().item()

    monkeypatch.setattr("rmm_linear.cli.profile.profile", reads)
    assert main(["profile", str(folder / "bare"), "--meta"]) == 2
    assert "can't be run on shapes alone (Tensor.item() cannot be called on meta tensors)" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_text_and_its_options(folder, capsys):
    text = run(
        capsys, str(folder / "roberta"), "--layers", "3", "--dtype", "bfloat16", "--storage", "int4",
        "--ratio", "0.5,1", "--batch", "4",
    )  # fmt: skip
    assert "bfloat16, random weights and inputs: input_ids (4, 128), labels (4,)" in text
    assert "RobertaForSequenceClassification keeps" in text
    (line,) = [line for line in text.splitlines() if line.startswith("roberta.encoder.layer.*.intermediate.dense")]
    assert line.split()[2] == "3"
    for name in ("exact", "hadamard 0.5 in int4, every layer", "input in int4, where it frees", "gradient checkp"):
        assert any(row.startswith(name) for row in text.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # two of RoBERTa's positions are never used
        (["{}/roberta", "--seq", "160"], "can't be run on random tensors of 8 x 160 (index"),
        (["{}/roberta", "--seq", "1000"], "length=1000 is more than the model's 160 positions"),
    ],
)
def test_a_batch_that_the_model_does_not_take_is_one_line(arguments, message, folder, capsys):
    assert main(["profile", *(argument.format(folder) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_the_program_runs_by_itself(folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["kernels", *sys.path])}
    command = [sys.executable, "-m", "rmm_linear.cli", "profile", str(folder / "bare"), "--batch", "2", "--seq", "16"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "BertModel keeps" in done.stdout


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "rmm_linear.integrations.hf_models", raising=False)
    assert main(["profile", "some/model"]) == 2
    assert 'pip install "rmm-linear[hf]"' in capsys.readouterr().err


def test_attention_that_is_not_fused_here_is_named(folder, capsys):
    # GPT-2's attention has dropout, the RoBERTa's has none
    assert "attention is not fused here" in run(capsys, str(folder / "gpt2"), "--batch", "2", "--seq", "32")
    for arguments in (["roberta"], ["gpt2", "--attention", "eager"]):
        found = run(capsys, str(folder / arguments[0]), *arguments[1:], "--batch", "2", "--seq", "32")
        assert "not fused" not in found
