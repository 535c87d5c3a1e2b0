"""Options by which commands name a model and the shape of its batch, and functions that make both."""

import argparse
import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_model_options(
    parser: argparse.ArgumentParser, *, batch: Callable[[str], int | str] = int, also: str = ""
) -> None:
    """Add the model's options, and `--json`; `batch` parses `--batch`, and `also` ends its help text."""
    parser.add_argument("model", help="a name on the hub, or a folder or JSON file with a model's configuration")
    parser.add_argument("--batch", type=batch, default=8, help=f"sequences, or images{also} (default: 8)")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence (default: 128)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of the model (default: float32)")
    parser.add_argument("--attention", help="attn_implementation of the model, such as sdpa or eager")
    parser.add_argument("--layers", type=int, help="number of layers in place of the model's own (num_hidden_layers)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def check_model_options(options: argparse.Namespace) -> None:
    """Refuse a missing path, numbers out of range, and a figure that can't be drawn, before a request to the hub."""
    name = options.model
    is_path = name.startswith((".", "/", "~")) or name.endswith(("/", ".json")) or name.count("/") > 1
    if is_path and not Path(name).exists():
        raise ValueError(f"there is no file or folder {name!r}")
    for each in ("batch", "seq", "layers"):
        value = getattr(options, each)
        if isinstance(value, int) and not 1 <= value <= 2**31:
            raise ValueError(f"--{each} {value} is {'below 1' if value < 1 else 'above 2**31'}")
    if getattr(options, "figure", None):
        _refuse_figure(Path(options.figure))


def _refuse_figure(path: Path) -> None:
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError("a figure needs matplotlib: pip install rmm-linear[report]") from error
    if not path.parent.is_dir():
        raise ValueError(f"--figure {path}: there is no folder {str(path.parent)!r}")
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"--figure {path}: choose a name that ends in one of {', '.join(sorted(known))}")


@contextlib.contextmanager
def hf_models() -> Iterator[ModuleType]:
    """Import `integrations.hf_models`, which takes seconds; transformers and the hub log only errors in the context."""
    models = importlib.import_module("rmm_linear.integrations.hf_models")
    with contextlib.ExitStack() as stack:
        for package, variable in (("transformers", "TRANSFORMERS_VERBOSITY"), ("huggingface_hub", "HF_HUB_VERBOSITY")):
            logs = importlib.import_module(f"{package}.utils.logging")
            if variable not in os.environ:
                stack.callback(logs.set_verbosity, logs.get_verbosity())
                logs.set_verbosity_error()
        yield models


def build_model(models: ModuleType, options: argparse.Namespace, *, device: str, caches: bool = True) -> nn.Module:
    """Make the model that the options describe; without `caches`, it keeps no keys and values for generation."""
    changes: dict[str, Any] = {"attn_implementation": options.attention} if options.attention else {}
    model: nn.Module = models.build_model(
        options.model, device=device, dtype=DTYPES[options.dtype], layers=options.layers, **changes
    )
    for module in () if caches else model.modules():
        config: Any = getattr(module, "config", None)  # decoders may have their own
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return model


def planning_heading(options: argparse.Namespace, batch: Mapping[str, Tensor], runs: str) -> str:
    """Return the heading of a plan: the model, the batch, and the way its steps run."""
    return f"{options.model}, {options.dtype}, {shapes_of(batch)}; steps {runs}; weights and the batch are not counted"


def shapes_of(batch: Mapping[str, Tensor]) -> str:
    """Return the names and shapes of a batch, such as "input_ids (8, 128)"."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
