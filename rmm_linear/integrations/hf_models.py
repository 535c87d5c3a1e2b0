"""Models of transformers from their configurations alone, and random batches for them: for `rmm-linear profile`.

Weights are random: the bytes that a model keeps depend on its code, shapes and dtypes, not on values.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.errors import first_line

try:
    import huggingface_hub
    import transformers
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]
    from transformers import AutoConfig, AutoModel
except ImportError as error:
    raise ImportError('models by name need transformers: pip install "rmm-linear[hf]"') from error

# Much shorter than the retries of the hub's own client.
_PATIENCE_S = 5
# Names of the number of layers of a stack in configurations.
_STACKS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def build_model(
    name: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, layers: int | None = None, **changes: Any
) -> nn.Module:
    """Make a model in training mode with random weights, of the class in its configuration, or the base model.

    `name` is a name on the hub, or a folder or JSON file with a model's configuration; weights are not read. `layers`
    is the depth of its stacks, encoder and decoder, and `changes` are values of the configuration.

    Raises:
        ValueError: If there is no such configuration, or transformers makes no model of it.
    """
    path = Path(name)
    try:
        if path.is_file():
            values = {**json.loads(path.read_text(encoding="utf-8")), **changes}
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        else:
            config = _config(name, changes)
        for stack in _STACKS if layers is not None else ():
            if hasattr(config, stack):
                setattr(config, stack, layers)
        names = [each for each in (getattr(config, "architectures", None) or []) if hasattr(transformers, each)]
        make = getattr(transformers, names[0])._from_config if names else AutoModel.from_config
        with torch.device(device):
            model: nn.Module = make(config, dtype=dtype)
    except Exception as error:
        raise ValueError(
            f"transformers makes no model of {name!r} ({first_line(error)}); pass a name on the hub, or a folder with a"
            " config.json"
        ) from error
    return model.train()


def _config(name: str, changes: dict[str, Any]) -> Any:
    """The configuration in a folder, in the hub's cache, or on the hub, which gets one request with a short timeout."""
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
    """Make a batch of sequences of this length, or of images, with labels if the model computes a loss.

    Raises:
        ValueError: If the model takes neither tokens nor images, the length exceeds the model's positions, or the
            batch has more numbers than memory.
    """
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    main = getattr(model, "main_input_name", "input_ids")
    is_of_images = main == "pixel_values"
    if is_of_images:
        # convolutional networks take any size, and name none
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        shape: tuple[int, ...] = (batch, getattr(config, "num_channels", 3), height, width)
    elif main == "input_ids":
        most = getattr(text, "max_position_embeddings", None)
        if isinstance(most, int) and 0 < most < length:
            raise ValueError(f"length={length} is more than the model's {most} positions; pass fewer")
        shape = batch, length
    else:
        raise ValueError(
            f"the {type(model).__name__} takes {main!r}; only models of tokens and of images have random batches,"
            " call rmm_linear.memory.profile(model, ...) with a batch of your own"
        )
    try:
        if is_of_images:
            values = torch.randn(shape, device=device)
        else:
            values = torch.randint(0, text.vocab_size, shape, device=device)
    except RuntimeError as error:
        numbers = " x ".join(map(str, shape))
        raise ValueError(f"no memory for {numbers} random numbers ({first_line(error)}); pass fewer") from error
    # no attention mask: without a mask no token is padding, and on the meta device a mask has no values to read
    if type(model).__name__.endswith("TokenClassification"):
        return {main: values, "labels": values % config.num_labels}
    of_tokens = not is_of_images and not type(model).__name__.endswith(("SequenceClassification", "MultipleChoice"))
    labels = values if of_tokens else torch.zeros(batch, dtype=torch.long, device=device)
    has_labels = "labels" in inspect.signature(model.forward).parameters
    return {main: values} | ({"labels": labels} if has_labels else {})
