"""P1: a module's switches choose what a body does: a task, an adapter, a cache, training or evaluation."""

from __future__ import annotations

import copy
import gc
import textwrap
import weakref
from typing import Any

import pytest
import torch
from helpers.programs import grads, leaf
from torch import Tensor, nn

import torch_remat as remat
from torch_remat.errors import ModifiedError
from torch_remat.runtime.body_key import body_key


def save(function: Any, name: str) -> Any:
    return remat.region(function, name, recompute=False)


class Heads(nn.Module):
    """Two SAVE regions, of which a switch picks the one that recomputed code reads; an adapter that may be on."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, dtype=torch.float64)
        self.two = nn.Linear(3, 3, dtype=torch.float64)
        self.adapter = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.inner = nn.Module()
        self.inner.task = "first"
        self.on = False
        self.extra: Any = None
        self.step = 0
        self.rate = 0.0

    def forward(self, t: Tensor) -> Tensor:
        one, two = save(self.one, "one")(t), save(self.two, "two")(t)
        h = (one if self.inner.task == "first" else two) * 2
        if self.on:
            h = h + self.adapter
        if self.extra is not None:
            h = h + self.extra
        if self.training:
            h = h * 1.5
        return torch.exp(h) + (one + two)


def gradients(wrap: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    output = wrap(module)(x)
    return [output.detach(), *torch.autograd.grad(output.sum(), (x, module.one.weight, module.two.weight))]


def same(module: nn.Module, x: Tensor) -> None:
    found = gradients(remat.checkpoint(region_name="c"), module, x)
    for one, other in zip(found, gradients(lambda function: function, module, x), strict=True):
        assert torch.equal(one, other)


class TestP1Switches:
    """Whatever is switched, the next call runs by a plan of its own; the same state again, by the same plan."""

    def test_p1_a_task_that_alternates(self) -> None:
        module, x = Heads(), leaf(2, 3)
        for step in range(6):
            module.inner.task = ("first", "second", "third")[step % 3]
            same(module, x)

    def test_p1_evaluation_of_a_part(self) -> None:
        module, x = Heads(), leaf(2, 3)
        for step in range(4):
            module.train(step % 2 == 0)
            same(module, x)

    @pytest.mark.parametrize("what", ["adapter", "extra"])
    def test_p1_what_is_switched_on_later_is_watched(self, what: str) -> None:
        module, x = Heads(), leaf(2, 3)
        same(module, x)
        if what == "adapter":
            module.on = True
        else:
            module.extra = torch.ones(3, dtype=torch.float64)
        for _ in range(2):
            same(module, x)
            output = remat.checkpoint(region_name="c")(module)(x)
            with torch.no_grad():
                (module.adapter if what == "adapter" else module.extra).add_(1)
            with pytest.raises(ModifiedError, match=what):
                output.sum().backward()

    @pytest.mark.parametrize("below", [False, True], ids=["the module", "a module below"])
    def test_p1_training_switched_between_forward_and_backward(self, below: bool) -> None:
        class Outer(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, t: Tensor) -> Tensor:
                return self.inner(t) * 2

        module = Heads()
        outer, x = Outer(module), leaf(2, 3)
        for first in (True, False, True):
            outer.train(first)
            expected = torch.autograd.grad(outer(x).sum(), x)[0]
            output = remat.checkpoint(region_name="c")(outer)(x)
            (module if below else outer).train(not first)
            assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)
            assert module.training is not first

    @pytest.mark.parametrize("how", ["bound method", "closure", "argument"])
    def test_p1_through_an_object(self, how: str) -> None:
        class Trainer:
            def __init__(self, model: nn.Module) -> None:
                self.model = model

            def run(self, t: Tensor) -> Tensor:
                return self.model(t)

        trainer, x = Trainer(Heads()), leaf(2, 3)
        bodies = {"bound method": trainer.run, "closure": lambda t: trainer.model(t), "argument": Trainer.run}
        body, given = bodies[how], (trainer, x) if how == "argument" else (x,)
        for step in range(6):
            trainer.model.inner.task = ("first", "second")[step % 2]
            trainer.model.train(step % 3 == 0)
            expected = torch.autograd.grad(body(*given).sum(), x)[0]
            output = remat.checkpoint(region_name="c")(body)(*given)
            trainer.model.train(step % 3 != 0)
            assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


def key(module: nn.Module) -> Any:
    return body_key(module, [])


class TestP1KeysOfModules:
    """What makes another key, and what does not."""

    def test_p1_counters_and_schedules_make_none(self) -> None:
        module = Heads()
        before = key(module)
        module.step, module.rate = 7, 0.25
        assert key(module) == before

    def test_p1_attributes_and_modules_that_come_and_go(self) -> None:
        module = Heads()
        keys = [key(module)]
        module.late = True
        keys.append(key(module))
        module.late = False
        keys.append(key(module))
        module.inner.more = nn.Identity()
        keys.append(key(module))
        del module.late
        keys.append(key(module))
        assert all(one != other for index, one in enumerate(keys) for other in keys[:index])
        assert key(module) == keys[-1]

    def test_p1_equal_modules_share_one(self) -> None:
        module = Heads()
        other = copy.deepcopy(module)
        assert key(module) == key(other)
        other.on = True
        assert key(module) != key(other)
        module.on = True
        assert key(module) == key(other)

    def test_p1_a_name_for_each_step_makes_no_end_of_keys(self) -> None:
        module = Heads()
        keys = []
        for step in range(200):
            module.inner.task = f"step {step}"
            keys.append(key(module))
        assert len({hash(one.details) for one in keys}) < 100
        assert keys[-1] == keys[-2]

    @pytest.mark.parametrize("value", [torch.ones(2), [1], nn.Identity], ids=["tensor", "list", "class"])
    def test_p1_what_takes_the_place_of_none_counts_by_its_type(self, value: Any) -> None:
        module = Heads()
        before = key(module)
        module.extra = value
        assert key(module) != before
        assert key(module) == key(module)

    @pytest.mark.parametrize("way", ["argument", "function", "in a list"])
    def test_p1_through_a_weak_proxy(self, way: str) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).eval()
        proxy = weakref.proxy(module)
        held = [proxy]
        bodies: dict[str, Any] = {
            "argument": lambda call, t: call(lambda one, t: torch.exp(one(t)))(proxy, t),
            "function": lambda call, t: call(proxy)(t).exp(),
            "in a list": lambda call, t: call(lambda t: torch.exp(held[0](t)))(t),
        }
        for _ in range(2):
            x = torch.ones(2, 3, requires_grad=True)
            results = [grads(bodies[way](call, x), x) for call in (remat.checkpoint(), lambda function: function)]
            for ours, expected in zip(*results, strict=True):
                assert torch.equal(ours, expected)

    def test_p1_circles_and_crowds_of_modules(self) -> None:
        module = Heads()
        module.inner.parent = module
        crowd = nn.ModuleList(nn.Identity() for _ in range(1000))
        for one in (module, crowd):
            before = key(one)
            assert key(one) == before
            one.training = False
            assert key(one) != before

    def test_p5_no_module_is_kept_alive(self) -> None:
        module = Heads()
        same(module, leaf(2, 3))
        module.extra = [module]  # leads back
        same_key = key(module)
        assert same_key == key(module)
        reference = weakref.ref(module)
        del module, same_key
        gc.collect()
        assert reference() is None

    @pytest.mark.parametrize("captured", [True, False])
    def test_p5_no_module_with_parametrizations_is_kept_alive(self, captured: bool) -> None:
        """Each has a class of its own, which leads to it. Equal ones are one body."""
        keys = []
        for _ in range(2):
            module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
            body = (lambda t, module=module: torch.exp(module(t))) if captured else module
            remat.checkpoint()(body)(torch.ones(2, 3)).exp().sum().backward()
            keys.append(key(module))
            reference = weakref.ref(module)
            del module, body
            gc.collect()
            assert reference() is None
        assert keys[0] == keys[1]


def test_what_the_globals_of_a_body_hold_tells_bodies_apart() -> None:
    """A script's functions, modules and flags are its globals."""
    space: dict[str, Any] = {"torch": torch, "remat": remat, "flag": False, "module": nn.Linear(3, 3)}
    exec("def helper(t): return t\ndef body(t): return module(helper(t)) if flag else t", space)
    keys = [body_key(space["body"], [])]
    for name, value in (("flag", True), ("module", nn.LayerNorm(3)), ("helper", lambda t: t * 2)):
        space[name] = value
        keys.append(body_key(space["body"], []))
    space["module"].eval()
    keys.append(body_key(space["body"], []))
    assert len(set(keys)) == len(keys)
    assert body_key(space["body"], []) == keys[-1]


def test_a_global_flag_picks_what_is_read() -> None:
    x = leaf(3)
    space: dict[str, Any] = {"torch": torch, "save": save, "first": True}
    code = """
        def body(t):
            one, two = save(torch.sin, "one")(t), save(torch.cos, "two")(t)
            return torch.exp((one if first else two) * 2) + one + two
    """
    exec(textwrap.dedent(code), space)
    for first in (True, False, True):
        space["first"] = first
        (expected,) = torch.autograd.grad(space["body"](x).sum(), x)  # outside of a checkpoint regions do nothing
        (found,) = torch.autograd.grad(remat.checkpoint()(space["body"])(x).sum(), x)
        assert torch.equal(found, expected)


def test_a_term_that_is_off_while_its_weight_is_zero() -> None:
    x = leaf(3)

    def body(t: Tensor, weight: float) -> Tensor:
        h = save(lambda u: u * 3, "make")(t)
        read = (h if weight > 0 else t) * 2
        save(lambda u: u.add_(1), "shift")(h)
        return torch.exp(h * 0.1) + torch.sin(read)

    for weight in (0.0, 0.5, 0.25, 0.0):
        (expected,) = torch.autograd.grad(body(x, weight).sum(), x)
        (found,) = torch.autograd.grad(remat.checkpoint()(body)(x, weight).sum(), x)
        assert torch.equal(found, expected)
    assert body_key(body, [x, 0.5]) == body_key(body, [x, 0.25]) != body_key(body, [x, -0.5])
