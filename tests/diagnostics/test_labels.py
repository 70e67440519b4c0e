"""Replays and regions stand under their names in profiler traces, and cost nothing when no profiler runs."""

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_remat as remat
from torch_remat.runtime import labels


def body(x: Tensor) -> Tensor:
    h = remat.region(torch.nn.functional.gelu, "keep", recompute=False)(torch.sin(x))
    return remat.region(torch.tanh, "again", recompute=True)(h).exp()


def names(function: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return [event.name for event in profile.events() if event.name.startswith("torch_remat")]


def test_names_of_a_step(x: Tensor):
    call = remat.checkpoint(region_name="layers.0")(body)
    for _ in range(3):
        assert sorted(names(lambda: call(x).sum().backward())) == [
            "torch_remat.recompute: layers.0::again",
            "torch_remat.recompute: layers.0::again",
            "torch_remat.replay: layers.0",
            "torch_remat.save: layers.0::keep",
        ]


def test_gradients_under_a_profiler_are_eagers(x: Tensor):
    expected = torch.autograd.grad(body(x).sum(), x)[0]
    for _ in range(3):
        got: list[Tensor] = []
        names(lambda got=got: got.extend(torch.autograd.grad(remat.checkpoint()(body)(x).sum(), x)))
        assert torch.equal(got[0], expected)


def test_a_profiler_that_starts_between_forward_and_backward(x: Tensor):
    y = remat.checkpoint(region_name="b")(body)(x)
    assert "torch_remat.replay: b" in names(lambda: y.sum().backward())
    y = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        y = remat.checkpoint(region_name="b")(body)(x)
    y.sum().backward()


def test_no_label_is_made_without_a_profiler(x: Tensor, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any) -> Any:
        raise AssertionError("a label without a profiler")

    monkeypatch.setattr(labels, "wrapped", refuse)
    monkeypatch.setattr("torch_remat.runtime.forward.wrapped", refuse)
    monkeypatch.setattr("torch_remat.runtime.replay_frame.wrapped", refuse)
    monkeypatch.setattr("torch_remat.runtime.backward.label", refuse)
    for _ in range(2):
        remat.checkpoint()(body)(x).sum().backward()
