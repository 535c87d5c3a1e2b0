"""Models of transformers with few layers, made on the spot, and options of short trainings."""

from typing import Any

import pytest
import torch
from torch import nn

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def tiny(name: str, *, dropout: float = 0.0, seed: int = 0, **changes: Any) -> nn.Module:
    """A model of transformers in training mode, by the name of its class, with the weights of a seed."""
    kind = getattr(pytest.importorskip("transformers"), name)
    config = kind.config_class(**{**SIZES, **changes})
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float) and key not in changes:
            setattr(config, key, dropout)
    torch.manual_seed(seed)
    return kind(config).train()


def trainer_options(folder: Any, **changes: Any) -> dict[str, Any]:
    """Arguments of a short training on a CPU, which writes and shows nothing."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "dataloader_pin_memory": False,
        **changes,
    }
