"""Fixtures of the whole suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import helpers.engine as engines


@pytest.fixture(params=engines.ENGINES, ids=lambda engine: engine.name)
def engine(request: pytest.FixtureRequest) -> engines.EagerEngine:
    """The engine under test: contract tests run once for each."""
    return request.param


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts with one thread, one seed and the default hook stacks, and must leave the grad mode alone."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled(), "the test left grad mode off"
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "the test left a saved-tensors hook"


@pytest.fixture
def x() -> torch.Tensor:
    """A small leaf that requires grad."""
    return torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
