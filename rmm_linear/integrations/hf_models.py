"""Models of transformers from their configurations alone, and random batches for them: for `rmm-linear profile`.

Weights are random: what a model keeps for its backward pass depends on shapes, dtypes and its code, and on no value.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    import huggingface_hub
    import transformers
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]
    from transformers import AutoConfig, AutoModel
except ImportError as error:
    raise ImportError('models by name need transformers: pip install "rmm-linear[hf]"') from error

# The hub's own client tries for much longer.
_PATIENCE_S = 5
# What configurations call the number of layers of a stack.
_STACKS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def build_model(
    name: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, layers: int | None = None, **changes: Any
) -> nn.Module:
    """Make a model with random weights, in training mode, of the class that its configuration names, or the bare one.

    `name` is one on the hub, or a folder or JSON file with a model's configuration; weights are not read. `layers` is
    the depth of its stacks, encoder and decoder, and `changes` are values of the configuration.

    Raises:
        ValueError: If there is no such configuration, or no class for it.
    """
    path = Path(name)
    try:
        if path.is_file():
            values = {**json.loads(path.read_text(encoding="utf-8")), **changes}
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        else:
            config = _config(name, changes)
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{name!r} is no configuration of a model ({reason}); pass a name on the hub, or a folder with a"
            " config.json"
        ) from error
    for stack in _STACKS if layers is not None else ():
        if hasattr(config, stack):
            setattr(config, stack, layers)
    names = [each for each in (getattr(config, "architectures", None) or []) if hasattr(transformers, each)]
    make = getattr(transformers, names[0])._from_config if names else AutoModel.from_config
    with torch.device(device):
        model: nn.Module = make(config, dtype=dtype)
    return model.train()


def _config(name: str, changes: dict[str, Any]) -> Any:
    """The configuration in a folder, or in the hub's cache, or on the hub: which is asked once, and not for long."""
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True, **changes)
    except OSError:
        if Path(name).exists():
            raise
    try:
        get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:
        raise OSError(f"the hub can't be reached ({error}), and {name!r} is not in its cache") from error
    return AutoConfig.from_pretrained(name, **changes)


def random_batch(model: nn.Module, *, batch: int, length: int, device: str = "cpu") -> dict[str, Tensor]:
    """Make a batch of sequences of some length, or of images, with labels if the model computes a loss.

    Raises:
        ValueError: If the model takes neither tokens nor images, or the length is more than it has positions for.
    """
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        values = {main: torch.randn(batch, getattr(config, "num_channels", 3), height, width, device=device)}
        return values | _labels(model, torch.zeros(batch, dtype=torch.long, device=device))
    if main != "input_ids":
        raise ValueError(
            f"the {type(model).__name__} takes {main!r}; only models of tokens and of images have random batches,"
            " call rmm_linear.memory.profile(model, ...) with one of your own"
        )
    most = getattr(text, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < length:
        raise ValueError(f"length={length} is more than the model's {most} positions; pass fewer")
    ids = torch.randint(0, text.vocab_size, (batch, length), device=device)
    # no attention mask: models read its values, and none is one without padding
    if type(model).__name__.endswith("TokenClassification"):
        return {main: ids, "labels": ids % config.num_labels}
    of_tokens = not type(model).__name__.endswith(("SequenceClassification", "MultipleChoice"))
    return {main: ids} | _labels(model, ids if of_tokens else torch.zeros(batch, dtype=torch.long, device=device))


def _labels(model: nn.Module, labels: Tensor) -> dict[str, Tensor]:
    return {"labels": labels} if "labels" in inspect.signature(model.forward).parameters else {}
