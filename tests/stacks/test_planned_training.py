"""Planned models under the trainers that people use: the losses are those of the plain model, to the bit."""

import inspect

import pytest
import torch

pytest.importorskip("transformers")

from test_trainers import arguments
from tiny_models import CONFIG, batch_of, llama, roberta
from tiny_text import sentences, tokenizer
from torch import nn
from torch.utils.data import DataLoader

from rmm_linear import RMMCallback
from rmm_linear.checkpointing import checkpoint_model, checkpoint_sequential, remove_checkpointing


def planned(kind) -> nn.Module:
    model = kind()
    checkpoint_model(model, batch_of(kind), budget="100%", strategy="chen2016_sqrt")
    return model


def rows_of(kind) -> list[dict[str, torch.Tensor]]:
    batch = batch_of(kind)
    return [{name: value[number] for name, value in batch.items()} for number in range(4)]


def assert_same_training(plain: nn.Module, model: nn.Module) -> None:
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_a_planned_model_keeps_the_signature_of_its_forward():
    model, plain = roberta(), roberta()
    checkpoint_model(model, batch_of(roberta), budget="100%", strategy="chen2016_sqrt")
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model.forward.__name__ == "forward"
    assert model.forward.__qualname__ == plain.forward.__qualname__
    assert model.forward.__module__ == plain.forward.__module__
    assert model.forward.__doc__ == plain.forward.__doc__
    assert model.forward.__wrapped__.__func__ is plain.forward.__func__
    remove_checkpointing(model)
    assert inspect.ismethod(model.forward)


def test_a_forward_of_the_instance_keeps_its_signature_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = model.forward

    def forward(hidden):
        return before(hidden)

    model.forward = forward
    checkpoint_sequential(model, torch.randn(2, 4), budget="100%")
    assert list(inspect.signature(model.forward).parameters) == ["hidden"]
    assert remove_checkpointing(model).forward is forward


def test_a_models_config_is_followed():
    model, plain = planned(roberta), roberta()
    for each in (model, plain):
        each.config.output_hidden_states = True
    for found, expected in zip(*(each(**batch_of(roberta)).hidden_states for each in (model, plain)), strict=True):
        assert torch.equal(found, expected)
    for each in (model, plain):
        each.config.output_hidden_states = False
    assert model(**batch_of(roberta)).hidden_states is None
    assert len(vars(model)["forward"].run.plans) == 2


def trained_by_transformers(model: nn.Module, folder, callbacks=()) -> nn.Module:
    datasets = pytest.importorskip("datasets")
    from transformers import Trainer, TrainingArguments

    columns = {name: value.tolist() for name, value in batch_of(roberta).items()}
    trainer = Trainer(
        model,
        TrainingArguments(**{**arguments(folder), "per_device_train_batch_size": 4, "max_steps": 2}),
        train_dataset=datasets.Dataset.from_dict(columns),
        callbacks=list(callbacks),
    )
    trainer.train()
    return model


def test_trainer_of_transformers(tmp_path):
    trained = [trained_by_transformers(model, tmp_path) for model in (roberta(), planned(roberta))]
    assert_same_training(*trained)


def test_trainer_of_transformers_with_the_callback(tmp_path):
    with pytest.warns(UserWarning, match="a planned model keeps what its plan says"):
        trained = [
            trained_by_transformers(model, tmp_path, [RMMCallback(config=CONFIG)])
            for model in (planned(roberta), roberta())
        ]
    # the sketches are drawn in the same order
    assert_same_training(*trained)


@pytest.mark.parametrize("options", [{"monitor": True}, pytest.param({"noise_target": 0.1}, marks=pytest.mark.slow)])
def test_what_needs_to_see_each_layer_is_refused_on_a_planned_model(tmp_path, options):
    with pytest.raises(ValueError, match=r"see nothing .* in a planned model"):
        trained_by_transformers(planned(roberta), tmp_path, [RMMCallback(config=CONFIG, **options)])


@pytest.mark.slow
def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    trained = []
    for model in (llama(), planned(llama)):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(rows_of(llama), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        trained.append(accelerator.unwrap_model(model))
    assert_same_training(*trained)


@pytest.mark.slow
def test_lightning(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch, number):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trained = []
    for model in (llama(), planned(llama)):
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Module(model), DataLoader(rows_of(llama), batch_size=2))
        trained.append(model)
    assert_same_training(*trained)


@pytest.mark.slow
def test_trl(tmp_path):
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    trained = []
    for model in (llama(), planned(llama)):
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(
                max_length=32,
                bf16=False,
                gradient_checkpointing=False,
                **{**arguments(tmp_path), "max_steps": 1, "per_device_train_batch_size": 4},
            ),
            train_dataset=datasets.Dataset.from_list([{"text": text} for text in sentences(4)]),
            processing_class=tokenizer(),
        )
        trainer.train()
        trained.append(model)
    assert_same_training(*trained)
