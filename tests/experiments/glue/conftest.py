"""Tiny runs on the demo data."""

import pytest

from experiments.glue import demo, demo_pretraining, training


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs on the demo data see 80 sentences, and make its model a small one."""
    splits = demo.demo_splits(80, 40)
    monkeypatch.setattr(training, "demo_splits", lambda: splits)
    monkeypatch.setattr(demo, "HIDDEN_SIZE", 32)
    monkeypatch.setattr(demo_pretraining, "STEPS", 3)
