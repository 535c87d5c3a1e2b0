"""Tiny runs on the demo data."""

import pytest

from experiments.glue import demo, demo_pretraining, training


@pytest.fixture(scope="module")
def tiny_demo():
    """Let runs on the demo data see 80 sentences, and make its model a small one."""
    splits = demo.demo_splits(80, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "demo_splits", lambda: splits)
        patch.setattr(demo, "HIDDEN_SIZE", 32)
        patch.setattr(demo_pretraining, "STEPS", 3)
        yield
