"""P1: tensors from outside that replay reads are watched wherever a path leads; what SAVE regions hand on, too."""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import ModifiedError
from torch_remat.runtime.body_key import body_key
from torch_remat.runtime.plan import Registry

TABLE = torch.ones(3, dtype=torch.float64)


def tensor() -> Tensor:
    """Three numbers."""
    return torch.randn(3, dtype=torch.float64)


def save(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A SAVE region."""
    return remat.region(function, name, recompute=False)


@pytest.fixture(name="x")
def fixture_x() -> Tensor:
    """The input."""
    return tensor().requires_grad_()


def calls(body: Callable[..., Any], x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Output and gradient of one call."""
    output = body(x, *args)
    return output, torch.autograd.grad(output.sum(), x)[0]


def same(body: Callable[..., Any], x: Tensor, *args: Any, times: int = 3) -> None:
    """The checkpoint of ``body`` gives its numbers, in the first and in later calls."""
    checkpointed = remat.checkpoint(region_name="c")(body)
    for _ in range(times):
        for ours, plain in zip(calls(checkpointed, x, *args), calls(body, x, *args), strict=True):
            assert torch.equal(ours, plain)


def refused(body: Callable[..., Any], x: Tensor, change: Callable[[], Any], named: str, *args: Any) -> None:
    """A change between forward and backward is refused, in the first and in later calls; without one all is well."""
    checkpointed = remat.checkpoint(region_name="c")(body)
    for _ in range(2):
        output = checkpointed(x, *args)
        change()
        with pytest.raises(ModifiedError, match=named):
            output.sum().backward()
        same(body, x, *args, times=1)


class Masked(torch.nn.Module):
    """Reads a plain attribute, of itself and of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = tensor()
        self.tables = {"a": [tensor()]}
        self.inner = torch.nn.Module()
        self.inner.shift = tensor()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Reads all three."""
        return torch.exp(x + self.mask + self.tables["a"][0] + self.inner.shift)  # type: ignore[operator]


class TestP1AttributesOfModules:
    """Neither parameter nor buffer: a mask, a rotary table, a scale."""

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda m: m.mask.add_(1), id="modified"),
            pytest.param(lambda m: setattr(m, "mask", tensor()), id="replaced"),
            pytest.param(lambda m: m.tables["a"][0].add_(1), id="item modified"),
            pytest.param(lambda m: m.tables.update(a=[tensor()]), id="item replaced"),
            pytest.param(lambda m: setattr(m.inner, "shift", tensor()), id="of a submodule replaced"),
        ],
    )
    def test_p1_changed_before_backward(self, x: Tensor, change: Callable[[Any], Any]) -> None:
        module = Masked()
        refused(module, x, lambda: change(module), r"mask|tables\['a'\]\[0\]|inner\.shift")

    @pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
    def test_p1_a_fused_step_before_backward(self, x: Tensor, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        """Fused kernels move no version counter."""
        module, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        parameters = [module.weight, other.weight]
        steps = [optimizer([parameter], lr=0.1, fused=True) for parameter in parameters]
        for parameter in (*parameters, module.bias):
            parameter.grad = torch.ones_like(parameter)

        def body(t: Tensor) -> Tensor:
            return torch.exp(torch.sin(module(t)))

        refused(body, x.float(), steps[0].step, "module.weight")
        output = remat.checkpoint(region_name="c")(body)(x.float())
        steps[1].step()  # of parameters that the body does not read
        output.sum().backward()

    def test_p1_a_mask_for_each_microbatch(self, x: Tensor) -> None:
        module = Masked()
        checkpointed = remat.checkpoint(region_name="c")(module)
        outputs = []
        for _ in range(2):
            module.mask = tensor()
            outputs.append(checkpointed(x))
        with pytest.raises(ModifiedError, match="mask"):
            outputs[0].sum().backward()
        outputs[1].sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, outputs[1])

    def test_p1_saved_and_replaced(self, x: Tensor) -> None:
        module = Masked()

        def body(t: Tensor) -> Tensor:
            return torch.sin(t) * module.mask  # nothing reads the mask but the save

        refused(body, x, lambda: setattr(module, "mask", tensor()), "module.mask")

    def test_p1_modules_of_a_loop(self, x: Tensor) -> None:
        modules = [Masked() for _ in range(3)]

        def stack(wrap: Callable[..., Any]) -> Tensor:
            h = x
            for module in modules:
                h = wrap(lambda t: module(t) * 0.01)(h)
            return torch.autograd.grad(h.sum(), x)[0]

        assert torch.equal(stack(remat.checkpoint(region_name="c")), stack(lambda function: function))

    def test_p1_found_by_code(self, x: Tensor) -> None:
        class Global(torch.nn.Module):
            def forward(self, t: Tensor) -> Tensor:
                return torch.exp(t + TABLE)

        refused(Global(), x, lambda: TABLE.add_(0.1), "TABLE")

    def test_p1_defaults_and_keywords(self, x: Tensor) -> None:
        default, keyword = tensor(), tensor()

        def body(t: Tensor, u: Tensor, default: Tensor = default) -> Tensor:
            return torch.exp(t + default + u)

        for change in (default, keyword):
            refused(functools.partial(body, u=keyword), x, functools.partial(change.add_, 1), "'u'|__defaults__")


class TestP1LedToByArguments:
    """What only an argument leads to."""

    @pytest.mark.parametrize("what", ["bias", "buffer"])
    def test_p1_module(self, x: Tensor, what: str) -> None:
        module = torch.nn.Linear(3, 3).double()
        module.register_buffer("buffer", tensor())

        def body(t: Tensor, m: Any) -> Tensor:
            return torch.exp(m(t) + m.buffer)

        def change() -> None:
            with torch.no_grad():
                getattr(module, what).add_(1)

        refused(body, x, change, rf"input 1\.{what}", module)

    @pytest.mark.parametrize("how", ["modified", "replaced"])
    @pytest.mark.parametrize("kind", ["object", "slots", "object in a list"])
    def test_p1_object(self, x: Tensor, kind: str, how: str) -> None:
        class Slots:
            __slots__ = ("table",)

        class Plain:
            table: Tensor

        held: Any = Slots() if kind == "slots" else Plain()
        held.table = tensor()

        def body(t: Tensor, u: Any) -> Tensor:
            return torch.exp(t + (u[0] if isinstance(u, list) else u).table)

        def change() -> None:
            if how == "modified":
                held.table.add_(1)
            else:
                held.table = tensor()

        refused(body, x, change, r"input 1.*table", [held] if kind == "object in a list" else held)

    def test_p1_set(self, x: Tensor) -> None:
        held = tensor()
        refused(lambda t, u: torch.exp(t + next(iter(u))), x, lambda: held.add_(1), "input 1", {held})


class TestP1PickedByAnInteger:
    """A small integer among the arguments says what the body reads."""

    @pytest.mark.parametrize("kind", ["list", "modules"])
    def test_p1_each_watches_its_own(self, x: Tensor, kind: str) -> None:
        table: Any = [tensor() for _ in range(3)]
        if kind == "modules":
            table = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3)).double()

        def body(t: Tensor, index: int) -> Tensor:
            return torch.exp(table[index](t) if kind == "modules" else t + table[index])

        for _ in range(2):
            outputs = [remat.checkpoint(region_name="c")(body)(x, index) for index in range(3)]
            with torch.no_grad():
                (table[1].bias if kind == "modules" else table[1]).add_(1)
            for index in (0, 2):
                torch.autograd.grad(outputs[index].sum(), x)
            with pytest.raises(ModifiedError, match="table"):
                outputs[1].sum().backward()

    def test_p3_more_combinations_than_the_registry_holds(self) -> None:
        """Then the values of integers count no more; nothing is kept for it."""
        registry = Registry(per_code=4)
        known = [registry.known(body_key(calls, [one, two])) for one in range(5) for two in range(5)]
        assert all(one.trusted for one in known)
        assert len({id(one) for one in known}) == 5
        assert body_key(calls, [True]) != body_key(calls, [1])
        assert body_key(calls, [1000]) == body_key(calls, [1001])

    @pytest.mark.parametrize("kind", ["argument", "configuration"])
    def test_p1_branches_of_layers(self, x: Tensor, kind: str) -> None:
        @dataclasses.dataclass
        class Config:  # compared by its fields, hence without a hash
            mode: str

        def layer(config: Config) -> Callable[..., Tensor]:
            def body(t: Tensor, index: int) -> Tensor:
                a, b = save(lambda u: (u.sin() * 2, u.cos() * 2), "two")(t)
                first = index % 2 == 0 if kind == "argument" else config.mode == "a"
                return torch.exp((a if first else b) * 2) * 0.1

            return body

        def stack(wrap: Callable[..., Any]) -> Tensor:
            h = x
            for index in range(4):
                mode = "ab"[index % 2] if kind == "configuration" else "a"
                h = wrap(layer(Config(mode)))(h, index if kind == "argument" else 0)
            return torch.autograd.grad(h.sum(), x)[0]

        for _ in range(3):
            assert torch.equal(stack(remat.checkpoint(region_name="c")), stack(lambda function: function))


@functools.cache
def memoised(tag: str) -> Tensor:
    """A table that whoever asks first makes."""
    return torch.linspace(0.1, 1, 3, dtype=torch.float64) * len(tag)


@dataclasses.dataclass
class Held:
    """A container among the arguments."""

    h: Any


class Storing(torch.nn.Module):
    """Attention that stores its weights beside its output."""

    def attend(self, t: Tensor) -> Tensor:
        """Stores."""
        self.w = torch.sin(t)
        return torch.cos(t)

    def forward(self, t: Tensor) -> Tensor:
        """Recomputed code reads what the region has stored."""
        return torch.exp(save(self.attend, "attend")(torch.tanh(t)) * 2 + self.w * 3)


class TestP1HandedOnBesideTheOutputs:
    """A SAVE region that leaves a tensor somewhere for recomputed code."""

    PLACES = ("dict", "list", "object", "variable", "argument", "empty argument", "dataclass argument", "constant")

    @pytest.mark.parametrize("place", PLACES)
    def test_p1_gone_with_the_body(self, x: Tensor, place: str) -> None:
        def into(holder: Any, t: Tensor) -> None:
            made = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) if place == "constant" else torch.exp(t)
            if isinstance(holder, dict):
                holder["h"] = made
            elif isinstance(holder, list):
                holder[0] = made
            else:
                holder.h = made

        def body(t: Tensor, given: Any) -> Tensor:
            h = t * 2
            if place == "variable":

                def assign() -> None:
                    nonlocal h
                    h = torch.sin(h)

                save(assign, "a")()
                return torch.exp(h * 3)
            holder: Any = {"h": h}
            if place == "list":
                holder = [h]
            elif place == "object":
                holder = types.SimpleNamespace(h=h)
            elif place.endswith("argument"):
                holder = given
            save(into, "a")(holder, h)
            if isinstance(holder, (dict, list)):
                return torch.exp(t * (holder[0] if isinstance(holder, list) else holder["h"]))
            return torch.exp(t * holder.h)

        makers = {"argument": lambda: {"h": x * 2}, "empty argument": dict, "dataclass argument": lambda: Held(x * 2)}
        checkpointed = remat.checkpoint(region_name="c")(body)
        for _ in range(3):
            output = checkpointed(x, makers.get(place, lambda: None)())
            with pytest.raises(ModifiedError, match=r"region c::a .*\n.*return the tensor from the region"):
                output.sum().backward()

    def test_p1_attribute(self, x: Tensor) -> None:
        module = Storing()
        same(module, x)
        checkpointed = remat.checkpoint(region_name="c")(module)
        for _ in range(2):
            outputs = [checkpointed(x), checkpointed(x)]
            with pytest.raises(ModifiedError, match="w, which"):
                outputs[0].sum().backward()
            outputs[1].sum().backward()

    def test_p1_attribute_in_the_very_first_calls(self, x: Tensor) -> None:
        checkpointed = remat.checkpoint(region_name="c")(Storing())
        first, second = checkpointed(x), checkpointed(x)
        with pytest.raises(ModifiedError, match="w, which"):
            first.sum().backward()
        second.sum().backward()

    def test_p1_attribute_and_container(self, x: Tensor) -> None:
        """That a path leads to the tensor does not say that the body takes it."""
        owner = Storing()

        def attend(state: dict[str, Tensor]) -> None:
            owner.w = state["h"] = torch.sin(state["h"])

        def body(t: Tensor) -> Tensor:
            state = {"h": t * 2}
            save(attend, "a")(state)
            return torch.exp(state["h"] * 3)

        for _ in range(3):
            with pytest.raises(ModifiedError, match="region c::a"):
                remat.checkpoint(region_name="c")(body)(x).sum().backward()

    def test_p1_caches_are_no_fault(self, x: Tensor) -> None:
        tag = f"{id(x)}"

        class Lazy(torch.nn.Module):
            table: Tensor | None = None

            def build(self, t: Tensor) -> Tensor:
                if self.table is None:
                    self.table = torch.linspace(0, 1, 3, dtype=torch.float64).sin()
                return t * self.table * memoised(tag)

            def forward(self, t: Tensor) -> Tensor:
                h = save(self.build, "build")(t)
                return torch.exp(h * self.table + memoised(tag))

        module = Lazy()
        checkpointed = remat.checkpoint(region_name="c")(module)
        outputs = [checkpointed(x), checkpointed(x)]
        got = [torch.autograd.grad(output.sum(), x)[0] for output in outputs]
        assert torch.equal(got[0], got[1])
        assert torch.equal(got[0], calls(module, x)[1])
        same(module, x)

    def test_p1_what_replay_does_not_read_is_no_fault(self, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            aux: list[Tensor] = []

            def expert(u: Tensor, aux: list[Tensor]) -> Tensor:
                aux.append(u.pow(2).sum())
                return torch.sin(u)

            h = save(expert, "one")(t, aux)
            h = save(expert, "two")(torch.exp(h), aux)
            return h * 2 + sum(aux)

        same(body, x)

    def test_p1_part_of_the_backward(self, x: Tensor) -> None:
        """A replay that ends before the tensor is read has nothing to find."""
        module = Storing()

        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            return torch.exp(t), module(t)

        for _ in range(2):
            first, second = remat.checkpoint(region_name="c")(body)(x)
            first.sum().backward(retain_graph=True)
            second.sum().backward(retain_graph=True)
            second.sum().backward()

    def test_p1_buffer_that_a_region_updates_after_it_was_read(self, x: Tensor) -> None:
        buffer = tensor()

        def update(t: Tensor) -> Tensor:
            buffer.add_(1)
            return torch.cos(t)

        def before(t: Tensor) -> Tensor:
            a = torch.exp(t + buffer)
            return a + save(update, "update")(t)

        def after(t: Tensor) -> Tensor:
            a = save(update, "update")(t)
            return torch.exp(a + buffer)

        for _ in range(2):
            with pytest.raises(ModifiedError, match="Region c::update"):
                remat.checkpoint(region_name="c")(before)(x).sum().backward()
            ours = calls(remat.checkpoint(region_name="c")(after), x)
            buffer.sub_(1)
            for one, plain in zip(ours, calls(after, x), strict=True):
                assert torch.equal(one, plain)

    def test_p5_stored_tensors_die_with_their_graph(self, x: Tensor) -> None:
        """The tape watches a tensor that has a graph of its own, and does not hold it."""
        module = Storing()
        checkpointed = remat.checkpoint(region_name="c")(module)
        gc.collect()
        gc.disable()
        try:
            stored = []

            def step(backward: bool) -> None:
                output = checkpointed(x)
                stored.append(weakref.ref(module.w))
                if backward:
                    output.sum().backward()

            for backward in (True, True, False, False):
                step(backward)
            del module.w
            assert [one() for one in stored] == [None] * 4
        finally:
            gc.enable()


class TestP1RunningStatistics:
    """A batch norm updates them and tells nobody: its schema does not say so, and no version counter moves."""

    @pytest.fixture(name="x")
    def fixture_x(self) -> Tensor:
        """A batch."""
        return torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()

    @pytest.mark.parametrize("times", [1, 2])
    def test_p1_of_recomputed_norms_that_nobody_else_reads(self, x: Tensor, times: int) -> None:
        norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)

        def body(t: Tensor) -> Tensor:
            for _ in range(times):
                t = norm(torch.sin(t))
            return torch.exp(t)

        same(body, x)

    @pytest.mark.parametrize(
        "read",
        [
            pytest.param(lambda norm, t: norm(t).exp().cos() * norm.running_mean, id="saved afterwards"),
            pytest.param(lambda norm, t: norm(t).exp() * norm.running_mean.cos(), id="read afterwards"),
            pytest.param(lambda norm, t: t * norm.running_mean * norm(t).exp(), id="saved before"),
            pytest.param(lambda norm, t: t * norm.running_mean.cos() * norm(t).exp(), id="read before"),
        ],
    )
    def test_p1_read_beside_the_norm(self, x: Tensor, read: Callable[..., Tensor]) -> None:
        norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)
        for _ in range(2):
            with pytest.raises(ModifiedError, match="reads it, too"):
                remat.checkpoint(region_name="c")(lambda t: read(norm, t))(x)

    def test_p1_read_after_a_norm_in_a_save_region(self, x: Tensor) -> None:
        def step(wrap: Callable[..., Any]) -> list[Tensor]:
            norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)

            def body(t: Tensor) -> Tensor:
                return remat.region(norm, "norm", recompute=False)(torch.sin(t)).exp() * norm.running_mean.cos()

            return [torch.autograd.grad(wrap(body)(x).sum(), x)[0] for _ in range(3)]

        assert all(map(torch.equal, step(remat.checkpoint(region_name="c")), step(lambda body: body)))


class TestP1WhatIsAlive:
    """A term that the first call drops: what it reads is of no interest there, and is later."""

    def test_p1_a_term_that_a_number_turns_on(self, x: Tensor) -> None:
        class Block(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mask = tensor()
                self.step = 0

            def forward(self, t: Tensor) -> Tensor:
                term = torch.sin(t * self.mask)
                result = torch.exp(t)
                return result + term if self.step > 1 else result

        module = Block()
        checkpointed = remat.checkpoint(region_name="c")(module)
        for module.step in range(4):
            expected = torch.autograd.grad(module(x).sum(), x)[0]
            output = checkpointed(x)
            mask, module.mask = module.mask, tensor()
            if module.step > 1:
                with pytest.raises(ModifiedError, match="mask"):
                    output.sum().backward()
                module.mask = mask
                output = checkpointed(x)
            assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)
