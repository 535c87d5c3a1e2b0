"""RMMCallback's monitor in a real Trainer."""

import json
from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tiny_trainer
from tiny_trainer import Reporter, make_model
from transformers import RobertaForSequenceClassification, TrainerCallback

from rmm_linear import PaddingGradientError, RMMCallback, RMMConfig

NOISE = {"rmm/relative_variance", "rmm/noise_ratio", "rmm/snr", "rmm/clip_fraction"}
LAYERS = 12


make_trainer = partial(tiny_trainer.make_trainer, padded=True, max_grad_norm=1e-3, max_steps=24)


def callback(storage=None, **options):
    config = RMMConfig(ratio=0.2, storage=storage, min_rows=1)
    # the pooler and the attention's output save nothing, and the callback would say so
    return RMMCallback(config=config, exclude_modules=["attention.output.dense"], **options)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_monitors_numbers_reach_every_reporter_and_the_file(tmp_path):
    reporter, watched = Reporter(), callback(monitor=4)
    trainer = make_trainer(tmp_path, watched, reporter)
    trainer.train()
    rows = reporter.rows(NOISE)
    assert [step for step, _ in rows][:2] == [1, 2]
    final = watched.monitor.noise()
    last = rows[-1][1]
    assert last["rmm/relative_variance"] == final.relative_variance > 0
    assert (last["rmm/noise_ratio"], last["rmm/snr"]) == (final.noise_ratio, final.snr)
    # a norm of 0.001 clips every step
    assert last["rmm/clip_fraction"] == 1.0
    records = lines(tmp_path / "rmm_noise.jsonl")
    # the layers but two, once in four steps each
    assert len(records) == 24 // 4 * (LAYERS - 2)
    assert {record["step"] for record in records} == set(range(24))
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_the_clip_fraction_is_that_of_the_norms_before_clipping(tmp_path):
    norms = []

    class Norms(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "grad_norm" in logs:
                norms.append(logs["grad_norm"])

    options = {"max_steps": 20, "learning_rate": 0.0}
    make_trainer(tmp_path, callback(), Norms(), max_grad_norm=1e3, **options).train()
    looked_at = norms[::10]
    reporter, watched = Reporter(), callback(monitor=True)
    make_trainer(tmp_path, watched, reporter, max_grad_norm=sum(looked_at) / 2, **options).train()
    assert watched.monitor.state_dict()["observed"] == 2
    assert reporter.rows(NOISE)[-1][1]["rmm/clip_fraction"] == 0.5


def test_training_is_bitwise_what_it_is_without_a_monitor(tmp_path):
    weights = []
    for options in ({}, {"monitor": 2}):
        trainer = make_trainer(tmp_path, callback("int4", **options), max_steps=6, model=make_model(dropout=0.1))
        trainer.train()
        weights.append(list(trainer.model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


@pytest.mark.parametrize("stop", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, stop):
    found = []
    for folder, steps in (("whole", (24,)), ("parts", (stop, 24))):
        for number, last in enumerate(steps):
            made = callback(monitor=5)
            trainer = make_trainer(
                tmp_path / folder, made, max_steps=24, model=make_model(dropout=0.1), save_strategy="steps",
                save_steps=stop,
            )  # fmt: skip
            if last < 24:
                trainer.add_callback(StopAt(last))
            trainer.train(resume_from_checkpoint=number > 0)
        found.append((list(trainer.model.parameters()), made))
    (weights, whole), (other_weights, parts) = found
    assert all(torch.equal(*pair) for pair in zip(weights, other_weights, strict=True))
    assert whole.monitor.state_dict() == parts.monitor.state_dict()
    assert lines(tmp_path / "whole" / "rmm_noise.jsonl") == lines(tmp_path / "parts" / "rmm_noise.jsonl")


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def test_padding_is_left_out_and_its_first_step_checked(tmp_path):
    config = RMMConfig(ratio=0.3, min_rows=1, skip_padding=True)
    made = RMMCallback(config=config, exclude_modules=["attention.output.dense"], monitor=2)
    trainer = make_trainer(tmp_path, made, max_steps=2)
    trainer.train()
    rows = {record["rows"] for record in lines(tmp_path / "rmm_noise.jsonl")}
    assert all(row < 8 * 32 for row in rows)

    class Mean(RobertaForSequenceClassification):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            states = self.roberta(input_ids, attention_mask=attention_mask).last_hidden_state
            return {"loss": states.square().mean()}

    torch.manual_seed(1)
    with pytest.raises(PaddingGradientError):
        make_trainer(tmp_path, RMMCallback(config=config), model=Mean(make_model().config), max_steps=1).train()


def test_a_half_written_line_does_not_stop_a_resumption(tmp_path):
    # a run of its own begins a file of its own
    for _ in range(2):
        make_trainer(tmp_path, callback(monitor=2), max_steps=4, save_strategy="steps", save_steps=2).train()
    assert lines(tmp_path / "rmm_noise.jsonl")[0]["step"] == 0
    with (tmp_path / "rmm_noise.jsonl").open("a") as file:
        file.write('{"step": 8, "layer": "roberta.enc')
    make_trainer(tmp_path, callback(monitor=2), max_steps=4).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    assert {record["step"] for record in lines(tmp_path / "rmm_noise.jsonl")} == {0, 1, 2, 3}


@pytest.mark.parametrize("max_norm", [0.3, 1.0])
def test_steps_clipped_in_bfloat16_count_as_clipped(tmp_path, max_norm):
    reporter = Reporter()
    model = make_model().to(torch.bfloat16)
    with torch.no_grad():
        model.classifier.out_proj.weight.mul_(500)
    trainer = make_trainer(
        tmp_path, callback(monitor=True), reporter, model=model, max_grad_norm=max_norm, max_steps=12
    )
    trainer.train()
    assert min(logs["grad_norm"] for _, logs in reporter.logs if "grad_norm" in logs) > 1.1 * max_norm
    assert reporter.rows(NOISE)[-1][1]["rmm/clip_fraction"] == 1.0
