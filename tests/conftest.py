"""Fixtures of the whole suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Torch imports this when a dispatch mode first sees an operation. In the middle of a test that would leave frames, and
# the tensors in them, to the garbage collector.
import torch._dynamo
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch.utils import _python_dispatch

sys.path.insert(0, str(Path(__file__).parent))

import helpers.engine as engines
import helpers.limits as limits


@pytest.fixture(params=engines.ENGINES, ids=lambda engine: engine.name)
def engine(request: pytest.FixtureRequest) -> engines.EagerEngine:
    """The engine under test: contract tests run once for each."""
    if request.param is engines.COMPILED:
        request.getfixturevalue("fresh_compiler")
    return request.param


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of :func:`pytest_collection_modifyitems`."""
    config.addinivalue_line("markers", "compiled: a contract test on the compiled engine; most run with `-m compiled`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Contract tests on the compiled engine: expect the known failures; some run only when asked for."""
    left_out = []
    for item in items:
        if not hasattr(item, "callspec") or item.callspec.params.get("engine") is not engines.COMPILED:
            continue
        for mark in ("compiled", *map(_ignored, limits.WARNINGS)):
            item.add_marker(mark)
        name = limits.name_of(item.nodeid)
        reason = limits.reason_of(name)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        if not limits.is_run(name, asked="compiled" in config.getoption("markexpr")):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in gone]


def _ignored(warning: str) -> pytest.MarkDecorator:
    return pytest.mark.filterwarnings(warning)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code of another test, and none left."""
    torch._dynamo.reset()
    # One flag for all threads in torch 2.14: two that leave dispatch modes at once may leave it on.
    _python_dispatch._is_in_any_mode_without_ignore_compile_internals = False
    set_is_in_mode_without_ignore_compile_internals(False)
    with torch.inference_mode(False):  # a test that failed in it may have left it on, with its traceback
        yield
    torch._dynamo.reset()


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
