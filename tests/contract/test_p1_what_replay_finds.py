"""P1: replay finds what forward found: leaves, captured variables, attributes, containers; or says that it cannot."""

from __future__ import annotations

import functools
import gc
import textwrap
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.alive import StorageTracker
from helpers.programs import Wrap, check, grads, leaf, saved
from torch import Tensor, nn

import torch_remat as remat
from torch_remat.errors import InternalError, InvalidTypeError, InvalidValueError, ModifiedError


class TestPositionsOfSaves:
    """Every save has a position, whoever is a leaf: a dead save at the end hides none that is missing."""

    @staticmethod
    def body(t: Tensor, factor: Tensor) -> Tensor:
        result = torch.tanh(torch.exp(torch.sin(t) * factor))
        torch.exp(result)  # saved, and gone with its node
        return result

    def test_a_leaf_that_is_captured_and_an_argument(self) -> None:
        x = leaf(3)
        check(lambda wrap: grads(wrap(lambda t: self.body(t, x))(x), x))

    def test_a_parameter_that_is_captured_and_an_argument_under_hooks(self) -> None:
        x, w = leaf(3), nn.Parameter(leaf(3).detach() + 1)

        def program(wrap: Wrap) -> list[Tensor]:
            with torch.autograd.graph.save_on_cpu():
                return grads(wrap(lambda t, v: self.body(t, w) * v)(x, w), x, w)

        check(program)

    @pytest.mark.parametrize("kind", ["parameter", "leaf", "new leaf"])
    def test_a_leaf_that_a_save_region_returns(self, kind: str) -> None:
        x = leaf(3)
        w = nn.Parameter(leaf(3).detach() + 1) if kind == "parameter" else leaf(3)

        def get(t: Tensor) -> Tensor:
            return (t.detach() * 2).requires_grad_() if kind == "new leaf" else w

        check(lambda wrap: grads(wrap(lambda t: self.body(t, saved(get, "get")(t)))(x), x))

    def test_a_view_made_under_no_grad_that_a_save_region_returns(self) -> None:
        x, w = leaf(4), leaf(3)
        cut = torch.no_grad()(lambda t: t[1:])

        def body(t: Tensor) -> Tensor:
            h = t * 2
            return self.body(saved(cut, "cut")(h), w) * h.sum()

        check(lambda wrap: grads(wrap(body)(x), x, w))

    @pytest.mark.parametrize("view", [lambda t: t.view_as(t), lambda t: t[0], lambda t: t.t()])
    def test_a_view_made_under_no_grad_of_an_argument_that_is_overwritten(self, view: Callable[..., Tensor]) -> None:
        """It is no view of the argument for autograd: no gradient goes through it."""
        x = leaf(2, 2)

        def overwrite(t: Tensor) -> Tensor:
            with torch.no_grad():
                return view(t.copy_(torch.ones_like(t)))

        def body(t: Tensor) -> Tensor:
            w = saved(overwrite, "overwrite")(t * 2)
            return torch.exp(w * w * t)

        check(lambda wrap: grads(wrap(body)(x), x))


class TestLeaves:
    """``is_leaf`` and ``grad_fn`` of what replay hands out are those of forward."""

    @pytest.mark.parametrize("hooks", [False, True], ids=["", "packed"])
    @pytest.mark.parametrize("given", ["leaf", "result"])
    @pytest.mark.parametrize("source", ["input", "save output"])
    def test_a_branch_on_being_a_leaf(self, source: str, given: str, hooks: bool) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            h = t if source == "input" else saved(torch.sin, "sin")(t)
            assert (h.grad_fn is None) is h.is_leaf
            return torch.exp(h * 1 if h.is_leaf else h * 2)

        def program(wrap: Wrap) -> list[Tensor]:
            call = wrap(body)
            return grads(call(x if given == "leaf" else x * 3), x)

        pair = (lambda t: t.clone(), lambda t: t)
        check(program, saved_tensors_hooks=pair if hooks else None)

    def test_a_hook_on_the_node_of_a_saved_output(self) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            h = saved(torch.sin, "sin")(t)
            h.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
            return torch.exp(h * 2)

        check(lambda wrap: grads(wrap(body)(x * 3), x))

    def test_a_gradient_inside_the_body_for_an_input_that_is_no_leaf(self) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(torch.sin(t).sum(), t)
            return torch.exp(t * force)

        check(lambda wrap: grads(wrap(body)(x * 2), x))


class TestCapturedVariables:
    """A variable that is bound to something else after forward: replay uses what forward found in it."""

    KINDS = (
        "function",
        "decorated",
        "module",
        "number",
        "partial",
        "method",
        "nested",
        "default",
        "list",
        "assigned by its own code",
        "argument",
        "argument in a list",
        "argument in a list with tensors",
        "argument of a partial",
        "partial among the arguments",
        "partial of a module",
        "partial that is a default",
    )

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_loop_variable(self, kind: str) -> None:
        layers = [nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)]
        x = leaf(2, 3)

        class Scored(nn.Module):
            def forward(self, t: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
                return torch.exp(torch.sin(score(t)))

        scored = Scored()

        def program(wrap: Wrap) -> list[Tensor]:
            h, calls = x, 0
            for index, layer in enumerate(layers):
                factors = [index + 1.0]

                def scaled(t: Tensor, scale: float) -> Tensor:
                    return torch.exp(torch.sin(layer(t))) * scale

                def inner(t: Tensor) -> Tensor:
                    return torch.exp(torch.sin(layer(t)))

                def decorated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
                    return functools.wraps(function)(lambda t: function(t) * 2)

                def bump() -> None:
                    nonlocal calls
                    calls += 1

                part = functools.partial(inner)

                class Holder:
                    def run(self, t: Tensor) -> Tensor:
                        return scaled(t, 2.0)

                bodies: dict[str, Callable[[Tensor], Tensor]] = {
                    "function": lambda t: inner(torch.sin(t)),
                    "decorated": decorated(lambda t: torch.exp(layer(t))),
                    "module": lambda t: torch.exp(torch.sin(layer(t))),
                    "number": lambda t: torch.exp(torch.sin(layers[index](t) * index)),
                    "partial": functools.partial(scaled, scale=2.0),
                    "nested": lambda t: [torch.exp(layer(t)) * k for k in (1, 2)][1],
                    "default": lambda t, layer=layer: torch.exp(torch.sin(layer(t))),
                    "list": lambda t: torch.exp(torch.sin(layer(t))) * factors[0],
                    "argument of a partial": functools.partial(lambda given, t: torch.exp(given(t)), inner),
                    "partial of a module": functools.partial(scored, score=inner),
                    "partial that is a default": lambda t, part=part: torch.exp(part(t)),
                    "assigned by its own code": lambda t: (bump(), torch.exp(torch.sin(layer(t))))[1],
                    "method": types.MethodType(lambda self, t: torch.exp(torch.sin(layer(t))), Holder()),
                }
                if kind in bodies:
                    h = wrap(bodies[kind])(h)
                elif kind == "argument":
                    h = wrap(scored)(h, score=inner)
                elif kind == "argument in a list":
                    h = wrap(lambda t, given: torch.exp(given["a"][0](t)))(h, {"a": [inner]})
                elif kind == "argument in a list with tensors":
                    h = wrap(lambda t, given: torch.exp(given[1](t) * given[0]))(h, [x, inner])
                else:
                    h = wrap(scored)(h, functools.partial(scaled, scale=1.5))
            return grads(h, x, *[parameter for layer in layers for parameter in layer.parameters()])

        check(program)

    def test_a_global_variable(self) -> None:
        x = leaf(2, 3)
        space: dict[str, Any] = {"torch": torch}
        exec("def make(): return lambda t: torch.exp(torch.sin(layer(t)))", space)

        def program(wrap: Wrap) -> list[Tensor]:
            torch.manual_seed(0)
            h = x
            for _ in range(3):
                space["layer"] = nn.Linear(3, 3, dtype=torch.float64)
                h = wrap(space["make"]())(h)
            return grads(h, x)

        check(program)

    def test_a_global_variable_beside_one_that_the_body_sets(self) -> None:
        x = leaf(3)
        space: dict[str, Any] = {"torch": torch}
        code = """
            def assign():
                global mode
                mode = 2.0
            def body(t):
                assign()
                return torch.exp(torch.sin(t) * mode * factor)
        """
        exec(textwrap.dedent(code), space)

        def program(wrap: Wrap) -> list[Tensor]:
            space["mode"], space["factor"] = 1.0, 1.5
            y = wrap(space["body"])(x)
            space["factor"] = 3.0
            return grads(y, x)

        check(program)

    def test_values_are_told_apart_by_identity(self) -> None:
        class Odd:
            def __init__(self, value: float) -> None:
                self.value = value

            def __eq__(self, other: object) -> bool:
                raise ValueError

        x, factor = leaf(3), Odd(1.5)

        def body(t: Tensor) -> Tensor:
            return torch.exp(torch.sin(t) * factor.value)

        y = remat.checkpoint()(body)(x)
        expected = grads(body(x), x)[1]
        factor = Odd(2.5)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected, rtol=0, atol=0)

    def test_nothing_is_held_once_backward_has_run(self) -> None:
        class Layer:
            def __call__(self, t: Tensor) -> Tensor:
                return torch.exp(t)

        layer = Layer()
        alive = weakref.ref(layer)
        y = remat.checkpoint()(lambda t: layer(torch.sin(t)))(leaf(3))
        layer = torch.exp  # type: ignore[assignment]
        y.sum().backward()
        assert alive() is None


class TestAttributes:
    """What user code has hung on a tensor is on replay's tensor."""

    @pytest.mark.parametrize("source", ["input", "save output", "packed input"])
    def test_a_simple_attribute(self, source: str) -> None:
        x = leaf(3)

        def double(t: Tensor) -> Tensor:
            made = t * 2
            made.scale = 3.0  # type: ignore[attr-defined]
            return made

        def body(t: Tensor) -> Tensor:
            h = saved(double, "double")(t) if source == "save output" else t
            return torch.exp(h * getattr(h, "scale", 1.0))

        pair = (lambda t: t.clone(), lambda t: t) if source == "packed input" else None
        check(lambda wrap: grads(wrap(body)(double(x)), x), saved_tensors_hooks=pair)

    def test_torch_functions_are_on_in_replay_whoever_calls_backward(self) -> None:
        class Unit(Tensor):
            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = super().__torch_function__(func, types, args, kwargs or {})
                return result * 2 if func is torch.sin else result

        x = leaf(3)

        def program(wrap: Wrap) -> list[Tensor]:
            y = wrap(lambda t: torch.exp(torch.sin(t) * t))((x * 1).as_subclass(Unit))
            x.grad = None
            y.sum().backward()  # of a subclass: torch functions are off meanwhile
            assert x.grad is not None
            return [y.detach().as_subclass(Tensor), x.grad.clone().as_subclass(Tensor)]

        check(program)


class AttributeDict(dict):  # type: ignore[type-arg]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Output(OrderedDict):  # type: ignore[type-arg]
    """As in a well-known library of models: the items are attributes, too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Pair(tuple):  # type: ignore[type-arg]
    note: Tensor


def pair(h: Tensor) -> Pair:
    made = Pair((h * 1, 3))
    made.note = h * 2
    return made


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "dict that is its attributes": lambda h: AttributeDict(h=h),
    "items and attributes": lambda h: Output(h=h),
    "namespace": lambda h: types.SimpleNamespace(h=h),
}


class TestContainers:
    @pytest.mark.parametrize("kind", CONTAINERS)
    def test_a_saved_output_that_is_reached_by_attribute_and_modified(self, kind: str) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            made = saved(lambda t: CONTAINERS[kind](torch.sin(t) * 2), "made")(t)
            made.h.mul_(2)
            return torch.exp(made.h * 3)

        check(lambda wrap: grads(wrap(body)(x), x))

    @pytest.mark.parametrize("kind", CONTAINERS)
    def test_an_input(self, kind: str) -> None:
        x = leaf(3)
        check(lambda wrap: grads(wrap(lambda d: torch.exp(torch.sin(d.h)))(CONTAINERS[kind](x * 2)), x))

    @pytest.mark.parametrize("kind", CONTAINERS)
    def test_what_replay_does_not_read_is_not_kept(self, kind: str) -> None:
        def body(t: Tensor) -> Tensor:
            made = saved(lambda t: CONTAINERS[kind](t * 2), "made")(t)
            return made.h + torch.exp(t)

        call = remat.checkpoint()(body)
        x = leaf(64)
        for _ in range(2):
            with StorageTracker() as tracker:
                tracker.ignore(x)
                output = call(x)
            gc.collect()  # a dict that is its own attributes is a cycle
            assert tracker.alive_bytes(without=output) == 0
            del output

    def test_attributes_beside_the_items_of_a_tuple(self) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            made = saved(pair, "pair")(torch.sin(t))
            made.note.mul_(2)
            return torch.exp(made.note * made[0]) * made[1]

        check(lambda wrap: grads(wrap(body)(x), x))

    @pytest.mark.parametrize("make", [iter, lambda parts: zip(parts), lambda parts: (one for one in parts)])
    def test_an_iterator_is_refused(self, make: Callable[[list[Any]], Any]) -> None:
        x = leaf(3)
        with pytest.raises(InvalidTypeError, match=r"c::parts.*\n*.*return a list"):
            remat.checkpoint(region_name="c")(lambda t: sum(saved(lambda t: make([t, t]), "parts")(t)))(x)
        with pytest.raises(InvalidTypeError, match="pass a list"):
            remat.checkpoint(region_name="c")(lambda parts: sum(parts))(make([x, x]))


class TestAfterTheLastSave:
    """Code that swallows every exception, the one that ends replay included."""

    def test_a_bare_except(self) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            try:
                return torch.exp(torch.sin(t))
            except:  # noqa: E722
                return torch.exp(torch.cos(torch.exp(t)))

        check(lambda wrap: grads(wrap(body)(x), x))


class TestChangedAbility:
    """A captured tensor that is frozen or unfrozen between forward and backward changes what replay saves."""

    @pytest.mark.parametrize("parameter", [False, True])
    def test_it_is_refused(self, parameter: bool) -> None:
        w = nn.Parameter(leaf(3).detach(), requires_grad=False) if parameter else leaf(3).detach()
        y = remat.checkpoint(region_name="c")(lambda t: torch.exp(torch.sin(t) * w))(leaf(3))
        w.requires_grad_(True)
        with pytest.raises(ModifiedError, match=r"w\.requires_grad"):
            y.sum().backward()


class TestPathsOfEqualStart:
    def test_an_early_exit_is_waited_for_and_learned(self) -> None:
        x = leaf(3)

        def body(t: Tensor, early: list[bool]) -> Tensor:
            a = saved(lambda t: t.sin() * 2, "sin")(t)
            return a + t if early[0] else torch.exp(a)

        failures = 0
        for step in range(8):
            try:
                remat.checkpoint()(functools.partial(body, early=Switch(step % 2 == 0)))(x).sum().backward()
            except remat.errors.PlaceholderError:
                failures += 1
        assert failures <= 1


class Switch:
    """A value that no key of a body sees."""

    __slots__ = ("value",)

    def __init__(self, value: bool) -> None:
        self.value = value

    def __getitem__(self, index: int) -> bool:
        return self.value


class TestSlips:
    """What is easily typed."""

    def test_the_arguments_beside_the_function(self) -> None:
        with pytest.raises(InvalidTypeError, match="takes the function alone"):
            remat.checkpoint(region_name="a")(torch.sin, leaf(3))  # type: ignore[call-arg]

    def test_an_argument_called_self(self) -> None:
        x = leaf(3)

        def body(t: Tensor, **options: Any) -> Tensor:
            return torch.exp(saved(lambda t, **more: t * more["self"], "s")(t, **options))

        check(lambda wrap: grads(wrap(body)(x, self=2.0), x))

    @pytest.mark.parametrize("device", ["meta", "banana"])
    def test_a_hook_for_a_generator_that_is_not_there(self, device: str) -> None:
        with pytest.raises(InvalidValueError, match=device):
            remat.GeneratorHook(device)

    def test_an_internal_error_says_what_it_says_once(self) -> None:
        import copy
        import pickle

        error = InternalError("oops")
        assert str(copy.copy(error)) == str(pickle.loads(pickle.dumps(error))) == str(error)
        assert str(error).count("internal error") == 1
