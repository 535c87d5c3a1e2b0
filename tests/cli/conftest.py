"""A folder with the configuration of a small model, and commands: their answers, and the lines that refuse them."""

import pytest

from rmm_linear.cli import main


@pytest.fixture
def answer(capsys):
    """Run a command; the function returns its answer."""

    def run(*arguments):
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Run a command that is a mistake; the function returns the one line that tells of it."""

    def run(*arguments):
        assert main([*map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("rmm-linear: error: ")
        assert error.count("\n") == 1
        return error

    return run


@pytest.fixture
def gpt2_folder(tmp_path, monkeypatch):
    """A GPT-2 of one layer; no hub is asked."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=4096, architectures=["GPT2LMHeadModel"]
    )
    config.save_pretrained(tmp_path / "gpt2-small")
    return tmp_path / "gpt2-small"
