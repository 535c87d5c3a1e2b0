"""A folder with the configuration of a small model."""

from pathlib import Path

import pytest


@pytest.fixture
def gpt2_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPT-2 of one layer; no hub is asked."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=4096, architectures=["GPT2LMHeadModel"]
    )
    config.save_pretrained(tmp_path / "gpt2-small")
    return tmp_path / "gpt2-small"
