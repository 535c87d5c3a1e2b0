"""SHA-256 of the data, models and weights of a run."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import DatasetDict
from torch import nn

import rmm_linear

from .settings import RunSettings, is_local_model

_MODEL_SUFFIXES = (".json", ".txt", ".model", ".safetensors", ".bin")


def sources(settings: RunSettings) -> dict[str, str | None]:
    """Return the version of this library, and SHA-256 of data and model files, None where they are not here."""
    found: dict[str, str | None] = {"data files": None, "model files": None, "rmm_linear": rmm_linear.__version__}
    if settings.data not in ("hub", "demo"):
        task = settings.task_description
        folder = Path(settings.data) / task.folder
        found["data files"] = _files_fingerprint([folder / "train.tsv", folder / task.dev_file])
    if is_local_model(settings.model):
        files = (path for path in Path(settings.model).iterdir() if path.suffix in _MODEL_SUFFIXES)
        found["model files"] = _files_fingerprint(sorted(files))
    return found


def _files_fingerprint(paths: Sequence[Path]) -> str | None:
    """SHA-256 over names and contents; None where a file is missing, for reading it raises the error."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names and bytes of all parameters: equal if and only if two models are bitwise equal."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def data_fingerprint(splits: DatasetDict) -> str:
    """SHA-256 over all rows of the splits `train` and `validation`."""
    digest = hashlib.sha256()
    for split in ("train", "validation"):
        for column in splits[split].column_names:
            digest.update(f"{split}/{column}{list(splits[split][column])!r}".encode())
    return digest.hexdigest()
