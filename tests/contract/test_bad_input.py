"""Bad input: an error at the earliest line, of the documented type, naming checkpoint and region, with the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compare import compare, raised
from helpers.engine import EagerEngine
from helpers.events import under
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import RematError, SavesDriftError


class TestBadOptions:
    """Options of ``checkpoint`` are checked when it is built."""

    def test_bad_checkpoint_without_the_options_call(self, x: Tensor) -> None:
        with pytest.raises(TypeError) as caught:
            remat.checkpoint(torch.sin)  # type: ignore[misc]
        assert "remat.checkpoint(" in str(caught.value) or "checkpoint()" in str(caught.value)

        with pytest.raises(TypeError):

            @remat.checkpoint  # type: ignore[misc]
            def body(t: Tensor) -> Tensor:
                return t

    @pytest.mark.parametrize(
        ("options", "error", "phrase"),
        [
            ({"unknown": 1}, TypeError, "unknown"),
            ({"preserve_rng_state": True}, NotImplementedError, "does not preserve torch's RNG state"),
            ({"determinism_check": "always"}, ValueError, "determinism_check should be one of"),
            ({"determinism_check": None}, ValueError, "determinism_check should be one of"),
            ({"saved_tensors_hooks": (lambda t: t,)}, (TypeError, ValueError), "saved_tensors_hooks"),
            ({"saved_tensors_hooks": (lambda t: t,) * 3}, (TypeError, ValueError), "saved_tensors_hooks"),
            ({"saved_tensors_hooks": (1, 2)}, (TypeError, ValueError), "saved_tensors_hooks"),
            ({"saved_tensors_hooks": 5}, (TypeError, ValueError), "saved_tensors_hooks"),
            ({"recompute_state_hooks": 5}, (TypeError, ValueError), "recompute_state_hooks"),
            ({"recompute_state_hooks": (object(),)}, (TypeError, ValueError), "state hook"),
            ({"recompute_state_hooks": (lambda: None, lambda s: None)}, (TypeError, ValueError), "state hook"),
            ({"region_name": 3}, (TypeError, ValueError), "region_name"),
            ({"region_name": ""}, (TypeError, ValueError), "region_name"),
        ],
        ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
    )
    def test_bad_option(self, options: dict[str, Any], error: Any, phrase: str, x: Tensor) -> None:
        with pytest.raises(error, match=phrase):
            remat.checkpoint(**options)
        compare(lambda t: torch.exp(torch.sin(t)), [x])

    def test_bad_option_rng_message_shows_the_hook(self) -> None:
        with pytest.raises(NotImplementedError, match="recompute_state_hooks") as caught:
            remat.checkpoint(preserve_rng_state=True)
        assert "GeneratorHook" in str(caught.value)

    def test_bad_function(self) -> None:
        with pytest.raises(TypeError):
            remat.checkpoint(region_name="block")(5)  # type: ignore[arg-type]

    @pytest.mark.parametrize("determinism_check", ["default", "none"])
    def test_good_options(self, x: Tensor, determinism_check: str) -> None:
        options = {"determinism_check": determinism_check, "preserve_rng_state": False, "recompute_state_hooks": ()}
        compare(lambda t: torch.exp(torch.sin(t)), [x], options=options)
        compare(lambda t: torch.exp(torch.sin(t)), [x], options={"region_name": None})

    def test_good_user_keywords_never_collide(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor, *, region_name: str, recompute: int, fn: str) -> Tensor:
            assert (region_name, recompute, fn) == ("mine", 1, "too")
            return torch.exp(torch.sin(t))

        compare(body, [x], kwargs={"region_name": "mine", "recompute": 1, "fn": "too"}, engine=engine)

    def test_good_decorator_on_functions_and_methods(self, x: Tensor) -> None:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))

            @remat.checkpoint(region_name="forward")
            def forward(self, t: Tensor) -> Tensor:
                """Documented."""
                return torch.exp(remat.region(torch.sin, "sin", recompute=False)(t * self.weight))

        model = Model()
        model(x).sum().backward()
        assert model.weight.grad is not None
        assert Model.forward.__doc__ == "Documented."
        assert Model.forward.__name__ == "forward"


class TestBadRegion:
    """Arguments of ``region`` are checked when it is built; names when it is called."""

    @pytest.mark.parametrize(
        ("args", "kwargs", "error", "phrase"),
        [
            ((5, "name"), {"recompute": True}, RuntimeError, "expects a function as its first argument"),
            ((None, "name"), {"recompute": True}, RuntimeError, "expects a function as its first argument"),
            ((torch.sin, ""), {"recompute": True}, ValueError, "must be non-empty"),
            ((torch.sin, None), {"recompute": True}, ValueError, "must be non-empty"),
            ((torch.sin, 7), {"recompute": True}, (TypeError, ValueError), "name"),
            ((torch.sin, "name"), {"recompute": 1}, RuntimeError, "expects recompute to be a bool"),
            ((torch.sin, "name"), {"recompute": None}, RuntimeError, "expects recompute to be a bool"),
            ((torch.sin, "name"), {"recompute": "yes"}, RuntimeError, "expects recompute to be a bool"),
            ((torch.sin, "name"), {}, TypeError, "recompute"),
            ((torch.sin,), {"recompute": True}, TypeError, "name"),
        ],
    )
    def test_bad_region(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Any, phrase: str, x: Tensor
    ) -> None:
        with pytest.raises(error, match=phrase):
            remat.region(*args, **kwargs)

        def body(t: Tensor) -> Tensor:
            return remat.region(*args, **kwargs)(t)

        with pytest.raises(error, match=phrase):
            remat.checkpoint(region_name="block")(body)(x)

    def test_bad_region_order_of_checks(self) -> None:
        with pytest.raises(RuntimeError, match="expects a function"):
            remat.region(5, "", recompute=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="must be non-empty"):
            remat.region(torch.sin, "", recompute=1)  # type: ignore[arg-type]

    def test_good_region_callables(self, engine: EagerEngine, x: Tensor) -> None:
        module = torch.nn.GELU()

        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: Tensor) -> Tensor:
                ctx.save_for_backward(t)
                return t * t

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                return grad * 2 * ctx.saved_tensors[0]

        class Callable_:
            def __call__(self, t: Tensor) -> Tensor:
                return torch.tanh(t)

        functions = [module, Square.apply, Callable_(), torch.ops.aten.sin.default, torch.sin, lambda t: t * 2]

        def body(t: Tensor) -> Tensor:
            for index, function in enumerate(functions):
                t = remat.region(function, f"a/{index}::b", recompute=bool(index % 2))(t)
            return t.exp()

        compare(body, [x], engine=engine)

    @pytest.mark.parametrize("policies", [(True, True), (False, False), (True, False), (False, True)])
    def test_bad_duplicate_name(self, engine: EagerEngine, x: Tensor, policies: tuple[bool, bool]) -> None:
        def body(t: Tensor) -> Tensor:
            for recompute in policies:
                t = remat.region(torch.sin, "same", recompute=recompute)(t)
            return t

        with pytest.raises(RuntimeError, match="Duplicate torch_remat region name block::same during forward"):
            engine.checkpoint(body)(x)
        with pytest.raises(RuntimeError, match="Duplicate torch_remat region name same during forward"):
            engine.checkpoint(body, region_name=None)(x)
        body(x)

    def test_bad_duplicate_name_inside_rec(self, engine: EagerEngine, x: Tensor) -> None:
        def inner(t: Tensor) -> Tensor:
            return remat.region(torch.sin, "same", recompute=False)(t)

        def body(t: Tensor) -> Tensor:
            return remat.region(inner, "same", recompute=True)(t)

        with pytest.raises(RuntimeError, match="Duplicate"):
            engine.checkpoint(body)(x)

    def test_good_names_inside_save_regions_are_inert(self, engine: EagerEngine, x: Tensor) -> None:
        def inner(t: Tensor) -> Tensor:
            t = remat.region(torch.sin, "outer", recompute=True)(t)
            return remat.region(torch.sin, "outer", recompute=False)(t)

        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(inner, "outer", recompute=False)(torch.sin(t)))

        compare(body, [x], engine=engine)

    @pytest.mark.parametrize("prefix", ["", 5, None])
    def test_bad_scope(self, prefix: Any) -> None:
        with pytest.raises((ValueError, RuntimeError, TypeError)), remat.name_scope(prefix):
            pass

    def test_bad_scope_types(self) -> None:
        with pytest.raises(ValueError, match="must be non-empty"), remat.name_scope(""):
            pass
        with pytest.raises(RuntimeError), remat.name_scope(5):  # type: ignore[arg-type]
            pass


class TestBadSaveForBackward:
    """Names of saved tensors."""

    class Ctx:
        def save_for_backward(self, *tensors: Tensor | None) -> None:
            self.saved = tensors

    @pytest.mark.parametrize(
        ("saved", "error"),
        [
            ({"": torch.ones(1)}, ValueError),
            ({"a.b": torch.ones(1)}, RuntimeError),
            ({"a": 5}, RuntimeError),
            ({3: torch.ones(1)}, TypeError),
            ([torch.ones(1)], (TypeError, AttributeError)),
        ],
    )
    def test_bad_saved(self, saved: Any, error: Any) -> None:
        with pytest.raises(error):
            remat.save_for_backward(self.Ctx(), saved)

    def test_good_saved_order_and_none(self, engine: EagerEngine, x: Tensor) -> None:
        class Named(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: Tensor) -> Tensor:
                remat.save_for_backward(ctx, {"cos": t.cos(), "nothing": None, "input": t})
                return t.sin()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                cos, nothing, t = ctx.saved_tensors
                assert nothing is None
                return grad * cos + 0 * t

        def body(t: Tensor) -> Tensor:
            a = remat.region(Named.apply, "a", recompute=False)(torch.sin(t))
            return torch.exp(remat.region(Named.apply, "b", recompute=True)(Named.apply(a)))

        compare(body, [x], engine=engine)


class TestDrift:
    """Replay meets another body than forward did."""

    def _drift(self, engine: EagerEngine, x: Tensor, forward: str, replay: str) -> None:
        """Backward of a body whose regions follow ``forward`` in forward and ``replay`` in replay."""

        def body(t: Tensor) -> Tensor:
            policy = replay if remat.is_recomputing() else forward
            t = torch.sin(t)
            for index, letter in enumerate(policy):
                t = under(letter, torch.exp, f"r{index}")(t)
            return torch.sin(torch.sin(t))

        engine.backward([engine.checkpoint(body)(x).sum()])

    def test_drift_whose_error_another_one_hides(self, engine: EagerEngine, x: Tensor) -> None:
        """As TorchScript does, which raises an error of its own, without a text, for what a pack hook raises."""

        def body(t: Tensor) -> Tensor:
            rows = 2 if remat.is_recomputing() else 3
            try:
                return torch.exp(t[:rows].sin())
            except Exception as error:
                raise RuntimeError from error

        with pytest.raises(SavesDriftError, match="different metadata"):
            engine.backward([engine.checkpoint(body)(x).sum()])

    @pytest.mark.parametrize(
        ("forward", "replay", "phrase"),
        [
            ("S", "R", "Conflicting recompute settings"),
            ("R", "S", "No save record for|Conflicting recompute settings"),
            ("-", "S", "No save record for"),
            ("RS", "RR", "Conflicting recompute settings"),
            ("S-", "SS", "No save record for"),
        ],
    )
    def test_drift_of_policy(self, engine: EagerEngine, x: Tensor, forward: str, replay: str, phrase: str) -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=phrase) as caught:
                self._drift(engine, x, forward, replay)
            assert isinstance(caught.value, RematError)
            assert "block" in str(caught.value)
            assert "To fix" in str(caught.value)
        compare(lambda t: torch.exp(torch.sin(t)), [x], engine=engine)

    def test_drift_save_region_not_reached_is_silent_or_refused(self, engine: EagerEngine, x: Tensor) -> None:
        """The region's nodes are on the original graph: eager's numbers, or an error."""
        expected = torch.autograd.grad(torch.exp(torch.sin(x)).sin().sum(), x)[0]

        def body(t: Tensor) -> Tensor:
            hidden = torch.sin(t)
            if not remat.is_recomputing():
                return torch.sin(remat.region(torch.exp, "exp", recompute=False)(hidden))
            return torch.sin(torch.exp(hidden))

        for _ in range(2):
            x.grad = None
            output = engine.checkpoint(body)(x)
            try:
                engine.backward([output.sum()])
            except RematError:
                continue
            assert torch.equal(expected, x.grad)

    def test_drift_to_the_name_of_another_region(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            names = ["b", "a"] if remat.is_recomputing() else ["a", "b"]
            for name in names:
                function = torch.exp if name == "a" else F.gelu
                t = remat.region(function, name, recompute=False)(torch.sin(t))
            return torch.sin(t)

        expected = torch.autograd.grad(torch.sin(F.gelu(torch.sin(torch.exp(torch.sin(x))))).sum(), x)[0]
        for _ in range(2):
            x.grad = None
            try:
                engine.backward([engine.checkpoint(body)(x).sum()])
            except RematError:
                continue
            assert torch.equal(expected, x.grad)

    @pytest.mark.parametrize("extra", [-1, 1, 2])
    def test_drift_of_saves(self, engine: EagerEngine, x: Tensor, extra: int) -> None:
        """Replay saves fewer or more tensors than forward."""

        def body(t: Tensor) -> Tensor:
            for _ in range(3 + (extra if remat.is_recomputing() else 0)):
                t = torch.sin(t)
            return t * 2

        expected = torch.autograd.grad(torch.sin(torch.sin(torch.sin(x))).sum() * 2, x)[0]
        for _ in range(2):
            x.grad = None
            output = engine.checkpoint(body)(x)
            if extra < 0:
                with pytest.raises(RuntimeError) as caught:
                    engine.backward([output.sum()])
                assert isinstance(caught.value, RematError) or "checkpoint" in str(caught.value).lower()
                assert "block" in str(caught.value)
                continue
            try:
                engine.backward([output.sum()])
            except RematError:
                continue
            assert torch.equal(expected, x.grad)

    @pytest.mark.parametrize("other", [lambda t: t[:2], lambda t: t.float(), lambda t: torch.cat([t, t])])
    def test_drift_of_shapes(self, engine: EagerEngine, x: Tensor, other: Callable[[Tensor], Tensor]) -> None:
        """Same number of saves, another shape or dtype: the default check notices and names the checkpoint."""

        def body(t: Tensor) -> Tensor:
            t = torch.sin(t)
            t = other(t) if remat.is_recomputing() else t * 1
            return torch.exp(torch.sin(t))

        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                engine.backward([engine.checkpoint(body)(x).sum()])
            assert "block" in str(caught.value)
            assert "(4, 6)" in str(caught.value) or "[4, 6]" in str(caught.value) or "float" in str(caught.value)

    def test_drift_of_a_rebuilt_argument(self, engine: EagerEngine, x: Tensor) -> None:
        """The argument that a SAVE region's save is rebuilt from has another layout in replay."""

        def body(t: Tensor) -> Tensor:
            hidden = torch.exp(t)
            if remat.is_recomputing():
                hidden = hidden.t().contiguous().t()
            return remat.region(torch.sin, "sin", recompute=False)(hidden)

        expected = torch.autograd.grad(torch.sin(torch.exp(x)).sum(), x)[0]
        for _ in range(2):
            x.grad = None
            error = raised(lambda: engine.backward([engine.checkpoint(body)(x).sum()]))
            if error is None:
                assert torch.equal(expected, x.grad)
            else:
                assert "different layout" in str(error)
                assert "sin" in str(error)

    def test_drift_reading_a_placeholder_is_one_clear_error(self, engine: EagerEngine, x: Tensor) -> None:
        """Replay alone reads a SAVE output: nothing in forward could know."""

        def body(t: Tensor) -> Tensor:
            base = torch.sin(t)
            made = remat.region(lambda u: u * 2, "made", recompute=False)(base)
            if remat.is_recomputing():
                base = base + made
            return torch.exp(base)

        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                engine.backward([engine.checkpoint(body)(x).sum()])
            message = str(caught.value)
            assert isinstance(caught.value, RematError)
            assert "is a placeholder for" in message or "skipped during recompute" in message
            assert "made" in message
            assert "block" in message
            assert "To fix" in message
