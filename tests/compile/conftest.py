"""Tests of ``torch.compile``: the contract suite of the eager runtime is inherited, on the compiled engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.compiled import COMPILED, LIMITS, Graphs
from helpers.engine import EagerEngine

_HERE = Path(__file__).parent

# Dynamo and AOTAutograd look at gradients of tensors that have none to look at, and warn of themselves.
_FILTERS = (
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let torch's compiler warn of its own doings in the tests of this folder; expect the known failures."""
    for item in items:
        if _HERE in item.path.parents:
            for one in _FILTERS:
                item.add_marker(pytest.mark.filterwarnings(one))
            if item.path.name == "test_contract.py":
                for name, reason in LIMITS.items():
                    if item.name == name:
                        item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture
def engine() -> EagerEngine:
    """The engine under test."""
    return COMPILED


@pytest.fixture
def graphs() -> Graphs:
    """A backend whose graphs can be read."""
    return Graphs()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """No compiled code of another test, and none left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
