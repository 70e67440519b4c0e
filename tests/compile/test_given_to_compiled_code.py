"""Compiled code in an eager checkpoint gets in replay what its guards ask for, whether it reads the data or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.compiled import Graphs
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import torch_remat as remat


def save(function: Callable[..., Any], name: str = "r") -> Callable[..., Any]:
    """A SAVE region."""
    return remat.region(function, name, recompute=False)


class Pair(NamedTuple):
    """Two tensors."""

    first: Tensor
    second: Tensor


def one_of_a_tuple(h: Tensor) -> Tensor:
    a, b = save(lambda u: (u.tanh(), u.exp()))(h)
    return (h * b).cos() + a


def one_of_a_list(h: Tensor) -> Tensor:
    a, b = save(lambda u: [u.tanh(), u.exp()])(h)
    return (h * b).cos() + a


def one_of_a_dict(h: Tensor) -> Tensor:
    made = save(lambda u: {"a": u.tanh(), "b": u.exp()})(h)
    return (h * made["b"]).cos() + made["a"]


def one_of_a_named_tuple(h: Tensor) -> Tensor:
    made = save(lambda u: Pair(u.tanh(), u.exp()))(h)
    return (h * made.second).cos() + made.first


def one_of_a_nest(h: Tensor) -> Tensor:
    a, more = save(lambda u: (u.tanh(), {"b": [u.exp()]}))(h)
    return (h * more["b"][0]).cos() + a


def both_are_added(h: Tensor) -> Tensor:
    a, b = save(lambda u: (u.tanh(), u.exp()))(h)
    return h.cos() + a + b


def without_a_gradient(h: Tensor) -> Tensor:
    return h.cos() + save(lambda u: u.detach().exp())(h)


def detached(h: Tensor) -> Tensor:
    return h.cos().sin() + save(torch.exp)(h).detach()


def a_mask(h: Tensor) -> Tensor:
    return h.cos() + save(lambda u: u > 0)(h)


def indices(h: Tensor) -> Tensor:
    values, places = save(lambda u: u.topk(2))(h)
    return h.cos().sin()[:, :2] + values + places


def over_a_part_that_saves_nothing(h: Tensor) -> Tensor:
    a, mask = save(lambda u: (u.exp(), u > 0))(h)
    torch._dynamo.graph_break()
    sums = a + mask
    torch._dynamo.graph_break()
    return h.cos().sin() + sums


BODIES = (
    *(one_of_a_tuple, one_of_a_list, one_of_a_dict, one_of_a_named_tuple, one_of_a_nest, both_are_added),
    *(without_a_gradient, detached, a_mask, indices, over_a_part_that_saves_nothing),
)


@pytest.mark.parametrize("function", BODIES)
def test_p1_what_is_only_added(graphs: Graphs, x: Tensor, function: Callable[[Tensor], Tensor]) -> None:
    """Nothing that backward needs is made from it; compiled code does not run with a stand-in for it."""

    def body(t: Tensor) -> Tensor:
        return function(t.sin())

    call = remat.checkpoint(region_name="b")(graphs.compile(body, fullgraph=False))
    for _ in range(3):
        output = call(x)
        assert torch.equal(output, body(x))
        (got,) = torch.autograd.grad(output.sum(), x)
        torch.testing.assert_close(got, torch.autograd.grad(body(x).sum(), x)[0], rtol=0, atol=1e-15)


def test_p3_what_compiled_code_leaves_in_its_container(graphs: Graphs, x: Tensor) -> None:
    """Its guards do not ask for it, so that it is not kept."""
    made: list[StorageWeakRef] = []

    def several(u: Tensor) -> dict[str, Tensor]:
        result = {"read": u + 1, "left": u + 2, "added": u + 3}
        made.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in result.values())
        return result

    def body(t: Tensor) -> Tensor:
        found = save(torch._dynamo.disable(several))(t.sin())
        return (t * found["read"]).cos() + found["added"]

    call = remat.checkpoint(region_name="b")(graphs.compile(body, fullgraph=False))
    for _ in range(3):
        made.clear()
        output = call(x)
        assert [reference.expired() for reference in made] == [False, True, False]
        output.sum().backward()


@pytest.mark.parametrize("eager_between", [False, True])
def test_p1_a_number_that_changes_in_code_that_saved_nothing(graphs: Graphs, x: Tensor, eager_between: bool) -> None:
    """Once it changes it is an input, and compiled code saves what it is multiplied with."""
    times = graphs.compile(lambda t, scale: t * scale, fullgraph=False)

    def body(t: Tensor, scale: float) -> Tensor:
        h = save(torch.exp)(t.sin())
        return times(h + 1 if eager_between else h, scale)

    call = remat.checkpoint(region_name="b")(body)
    for scale in (1.5, 1.5, 2.5, 3.5, 1.5):
        (got,) = torch.autograd.grad(call(x, scale).sum(), x)
        assert torch.equal(got, x.detach().sin().exp() * scale * x.detach().cos())
