"""Tests of ``torch.compile``. The contract suite of the eager runtime runs on the compiled engine where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.compiled import Graphs
from helpers.limits import WARNINGS

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch's compiler warn of its own doings in the tests of this folder."""
    for item in items:
        if _HERE in item.path.parents:
            for one in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(one))


@pytest.fixture
def graphs() -> Graphs:
    """A backend whose graphs can be read."""
    return Graphs()


@pytest.fixture(autouse=True)
def _fresh(fresh_compiler: None) -> None:
    """No compiled code of another test, and none left."""
