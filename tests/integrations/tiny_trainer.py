"""A Trainer of a RoBERTa of two layers, its data, and a callback that collects each log."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_transformers import tiny, trainer_options
from transformers import Trainer, TrainerCallback, TrainingArguments


def make_model(dropout=0.0, attention="sdpa", layers=2):
    changes = {"hidden_size": 16, "num_hidden_layers": layers, "attn_implementation": attention}
    return tiny("RobertaForSequenceClassification", dropout=dropout, seed=1, **changes)


def make_data(examples=48, length=32, *, padded=False):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(5, 50, (examples, length), generator=generator)
    masks = torch.ones_like(ids)
    if padded:
        masks *= torch.arange(length) < torch.randint(8, length + 1, (examples, 1), generator=generator)
    return [
        {"input_ids": row, "attention_mask": mask, "labels": int(row[0] > 27)}
        for row, mask in zip(ids, masks, strict=True)
    ]


def make_trainer(folder, *callbacks, model=None, model_init=None, padded=False, **changes):
    trainer = Trainer(
        make_model() if model is None and model_init is None else model,
        TrainingArguments(**trainer_options(folder, **changes)),
        model_init=model_init,
        train_dataset=make_data(padded=padded),
        eval_dataset=make_data(16),
        callbacks=list(callbacks),
    )
    # the last of the default callbacks, which prints each log
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class Reporter(TrainerCallback):
    """Collects what reaches it, like the callbacks of TensorBoard and the others."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))

    def rows(self, keys):
        return [(step, logs) for step, logs in self.logs if logs.keys() >= keys]
