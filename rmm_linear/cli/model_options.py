"""A model by name and a batch for it: options that commands share, and what they stand for."""

import argparse
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.cli.model_names import checked

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_model_options(
    parser: argparse.ArgumentParser, *, batch: Callable[[str], int | str] = int, also: str = ""
) -> None:
    """Describe the model's options, and `--json`.

    Args:
        parser: The command's.
        batch: Reads `--batch`.
        also: What else `--batch` may be.
    """
    parser.add_argument("model", help="a name on the hub, or a folder or JSON file with a model's configuration")
    parser.add_argument("--batch", type=batch, default=8, help=f"sequences, or images{also} (default: 8)")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence (default: 128)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of the model (default: float32)")
    parser.add_argument("--attention", help="attn_implementation of the model, such as sdpa or eager")
    parser.add_argument("--layers", type=int, help="as if the model had so many layers (num_hidden_layers)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def checked_model(options: argparse.Namespace) -> str:
    """Check the model's options.

    Returns:
        The name.

    Raises:
        ValueError: If there is no such path, or a number of sequences, tokens and layers is below 1.
    """
    name = checked(options.model)
    for each in ("batch", "seq", "layers"):
        value = getattr(options, each)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"--{each} {value} is below 1")
    return name


def refuse_figure(path: Path) -> None:
    """Refuse what can't be drawn to, before the minutes that a plan may take.

    Raises:
        ValueError: If there is no folder for it, or its name ends in no known format.
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError("a figure needs matplotlib: pip install rmm-linear[report]") from error
    if not path.parent.is_dir():
        raise ValueError(f"--figure {path}: there is no folder {str(path.parent)!r}")
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"--figure {path}: choose a name that ends in one of {', '.join(sorted(known))}")


def hf_models() -> ModuleType:
    """Load what makes models: after all that can be refused without it, for it takes seconds.

    Raises:
        ImportError: If transformers is not installed.
    """
    return importlib.import_module("rmm_linear.integrations.hf_models")


def build_model(options: argparse.Namespace, name: str, *, device: str) -> nn.Module:
    """Make the model that the options describe."""
    changes: dict[str, Any] = {"attn_implementation": options.attention} if options.attention else {}
    model: nn.Module = hf_models().build_model(
        name, device=device, dtype=DTYPES[options.dtype], layers=options.layers, **changes
    )
    return model


def planning_model(options: argparse.Namespace, name: str) -> nn.Module:
    """Make the model for a plan: weights without contents, since planning needs the shapes alone."""
    model = build_model(options, name, device="meta")
    config: Any = model.config
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return model


def planning_heading(options: argparse.Namespace, batch: Mapping[str, Tensor]) -> str:
    """Say what a plan is for."""
    return f"{options.model}, {options.dtype}, {shapes_of(batch)}; weights and the batch are not counted"


def shapes_of(batch: Mapping[str, Tensor]) -> str:
    """Such as "input_ids (8, 128)"."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
