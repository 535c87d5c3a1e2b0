"""Train with the Trainer of transformers: one callback converts the model, and logs kept bytes and noise."""

import tempfile

import torch
from transformers import RobertaConfig, RobertaForSequenceClassification, Trainer, TrainingArguments

from rmm_linear import RMMCallback, RMMConfig


def main(steps: int = 20) -> dict[str, float]:
    """Fine-tune a small RoBERTa on random tokens; returns the last values that the callback logged."""
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, num_labels=2
    )
    tokens = torch.randint(3, 100, (64, 32))
    data = [{"input_ids": row, "labels": int(row[0] > 50)} for row in tokens]
    # 8 bits for each number of the inputs of linear layers, and no other noise
    callback = RMMCallback(config=RMMConfig(ratio=1.0, storage="int8"), monitor=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=16, logging_steps=5, report_to="none", use_cpu=True
        )
        trainer = Trainer(RobertaForSequenceClassification(config), arguments, train_dataset=data, callbacks=[callback])
        trainer.train()
    logged: dict[str, float] = {}
    for record in trainer.state.log_history:
        logged.update({name: value for name, value in record.items() if name.startswith("rmm/")})
    return logged


if __name__ == "__main__":
    print(main())
