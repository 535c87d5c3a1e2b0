"""Marks the randomised checks that test classes inherit from the contract."""

import pytest
from sketch_contract import SketchContract


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The contract itself does not import pytest, and so cannot carry its marks."""
    for item in items:
        owner = getattr(item, "cls", None)
        if owner is not None and issubclass(owner, SketchContract) and item.name in owner.montecarlo:
            item.add_marker(pytest.mark.montecarlo)
