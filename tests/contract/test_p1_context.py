"""P1: everything around the operations is in replay as it was in forward: random state, autocast, devices, scopes."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compare import assert_same_run, compare, grad_weight, run_once
from helpers.engine import EagerEngine
from helpers.events import Hidden, under
from helpers.hooks import ContextVariable, DefaultGenerator, generator_hooks
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import torch_remat as remat
from torch_remat.errors import RematError

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)

RANDOM_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda t: F.dropout(t, 0.3),
    "rand_like": lambda t: t * torch.rand_like(t),
    "randn": lambda t: t * torch.randn(t.shape, dtype=t.dtype),
    "bernoulli": lambda t: t * torch.bernoulli(torch.full_like(t, 0.5)),
    "randint": lambda t: t * torch.randint(1, 5, t.shape),
    "randperm": lambda t: t[torch.randperm(len(t))],
    "normal_": lambda t: t * torch.empty_like(t).normal_(),
    "uniform_": lambda t: t + torch.empty_like(t).uniform_(),
    "multinomial": lambda t: t[:, torch.multinomial(torch.ones(t.shape[1]), 3)],
    "exponential_": lambda t: t * torch.empty_like(t).exponential_(),
    "rrelu": lambda t: F.rrelu(t, training=True),
    "gumbel": lambda t: F.gumbel_softmax(t, hard=True),
    "sdpa dropout": lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None], dropout_p=0.3)[0],
    "distribution": lambda t: torch.distributions.Normal(t, 1.0).rsample(),
}


class TestP1RandomNumbers:
    """Random numbers in recomputed code: managed by a hook, or refused; never drawn anew in silence."""

    @pytest.mark.parametrize("op", RANDOM_OPS)
    @pytest.mark.parametrize("policy", ["-", "R"])
    def test_p1_refused_without_a_hook(self, engine: EagerEngine, x: Tensor, op: str, policy: str) -> None:
        draw = RANDOM_OPS[op]

        def body(t: Tensor) -> Tensor:
            t = torch.sin(t)
            t = draw(t) if policy == "-" else remat.region(draw, "draw", recompute=True)(t)
            return torch.exp(t)

        for _ in range(3):
            with pytest.raises(RuntimeError) as caught:
                engine.backward([engine.checkpoint(body)(x).sum()])
            assert isinstance(caught.value, RematError)
            assert "recompute_state_hooks" in str(caught.value)
            assert "Generator" in str(caught.value)
            assert "block" in str(caught.value)
            if policy == "R":
                assert "draw" in str(caught.value)

    @pytest.mark.parametrize("policy", ["-", "R"])
    def test_p1_refused_when_it_first_happens_in_step_three(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        """The body was seen without random numbers; later, with the same code and regions, it draws some."""
        state = Hidden({"p": 0.0})

        def maybe(t: Tensor) -> Tensor:
            return F.dropout(t, state["p"]) if state["p"] else t

        def body(t: Tensor) -> Tensor:
            t = remat.region(F.gelu, "gelu", recompute=False)(torch.sin(t))
            t = maybe(t) if policy == "-" else remat.region(maybe, "maybe", recompute=True)(t)
            return torch.exp(t)

        call = engine.checkpoint(body)
        for step in range(6):
            state["p"] = 0.5 if step >= 2 else 0.0
            if step < 2:
                engine.backward([call(x).sum()])
                continue
            with pytest.raises(RuntimeError, match="recompute_state_hooks"):
                engine.backward([call(x).sum()])

    def test_p1_random_numbers_of_one_way_of_a_body(self, engine: EagerEngine, x: Tensor) -> None:
        """Another body with the same layout drew nothing: refused all the same, and refused again every time."""
        for draws in (False, True, False, True):

            def maybe(t: Tensor, draws: bool = draws) -> Tensor:
                return t * torch.rand(t.shape, dtype=t.dtype) if draws else t * 2

            def body(t: Tensor, maybe: Callable[[Tensor], Tensor] = maybe) -> Tensor:
                return torch.exp(maybe(torch.sin(t)))

            if draws:
                with pytest.raises(RuntimeError, match="recompute_state_hooks"):
                    engine.backward([engine.checkpoint(body)(x).sum()])
            else:
                compare(body, [x], engine=engine, calls=1)

    @pytest.mark.parametrize("op", RANDOM_OPS)
    @pytest.mark.parametrize("policy", ["-", "R", "S", "S-", "-S", "-S-", "RSR"])
    def test_p1_right_with_a_stock_hook(self, engine: EagerEngine, x: Tensor, op: str, policy: str) -> None:
        draw = RANDOM_OPS[op]
        if op == "multinomial":
            policy = policy[:1]

        def body(t: Tensor) -> Tensor:
            t = torch.sin(t)
            for index, letter in enumerate(policy):
                t = under(letter, draw, f"draw{index}")(t)
            return torch.exp(t * 0.1)

        compare(body, [x], options={"recompute_state_hooks": generator_hooks()}, engine=engine)

    def test_p1_right_with_a_user_hook(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            t = F.dropout(torch.sin(t), 0.5)
            t = remat.region(lambda u: F.dropout(u, 0.3), "drop", recompute=False)(t)
            return torch.exp(F.dropout(t, 0.2))

        compare(body, [x], options={"recompute_state_hooks": (DefaultGenerator(),)}, engine=engine)

    def test_p1_save_region_draws_need_no_hook(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(lambda u: F.dropout(u, 0.5), "drop", recompute=False)(torch.sin(t)))

        compare(body, [x], engine=engine)

    def test_p1_draws_that_backward_does_not_need_change_nothing(self, engine: EagerEngine, x: Tensor) -> None:
        """A draw after the last need: accepted or refused, but the generator afterwards is eager's."""

        def body(t: Tensor) -> Tensor:
            return torch.exp(torch.sin(t)) + torch.rand(t.shape, dtype=t.dtype)

        expected = run_once(body, [x])
        call = engine.checkpoint(body)
        for index in range(3):
            actual = run_once(call, [x], catch=(RematError,))
            if actual.error is None:
                assert_same_run(expected, actual, f"call {index}")

    def test_p1_own_generator_is_refused_or_right(self, engine: EagerEngine, x: Tensor) -> None:
        """A generator of the user's own is no default generator: no stock hook covers it unless it is given."""
        generator = torch.Generator()

        def body(t: Tensor) -> Tensor:
            return torch.exp(torch.sin(t) * torch.rand(t.shape, generator=generator, dtype=t.dtype))

        generator.manual_seed(5)
        expected = run_once(body, [x])
        for options in ({}, {"recompute_state_hooks": generator_hooks()}):
            for _ in range(3):
                generator.manual_seed(5)
                actual = run_once(engine.checkpoint(body, **options), [x], catch=(RematError,))
                if actual.error is None:
                    assert_same_run(expected, actual, "own generator")

    def test_p1_random_state_after_backward_is_as_before(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            return torch.exp(F.dropout(torch.sin(t), 0.5))

        call = engine.checkpoint(body, recompute_state_hooks=generator_hooks())
        for _ in range(3):
            output = call(x)
            before = torch.get_rng_state()
            engine.backward([output.sum()])
            assert torch.equal(before, torch.get_rng_state())

    def test_p1_nested_checkpoint_with_random_numbers(self, engine: EagerEngine, x: Tensor) -> None:
        def inner(t: Tensor) -> Tensor:
            return F.dropout(torch.exp(t), 0.5).sin()

        def body(t: Tensor) -> Tensor:
            t = torch.sin(F.dropout(t, 0.1))
            return torch.exp(remat.checkpoint(region_name="inner", recompute_state_hooks=generator_hooks())(inner)(t))

        compare(body, [x], options={"recompute_state_hooks": generator_hooks()}, engine=engine)


class TestP1Autocast:
    """Autocast, default device and function modes are as in forward."""

    @pytest.mark.parametrize("inside", [True, False])
    @pytest.mark.parametrize("policy", ["-", "S", "R"])
    def test_p1_autocast(self, engine: EagerEngine, policy: str, inside: bool) -> None:
        weight = torch.randn(6, 6, requires_grad=True)
        x = torch.randn(4, 6, requires_grad=True)
        dtypes: list[torch.dtype] = []

        def work(t: Tensor) -> Tensor:
            result = F.linear(t, weight)
            dtypes.append(result.dtype)
            return result.float()

        def body(t: Tensor) -> Tensor:
            call = under(policy, work, "work")
            if inside:
                with torch.autocast("cpu", torch.bfloat16):
                    return torch.exp(call(torch.sin(t)))
            return torch.exp(call(torch.sin(t)))

        def run(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def wrapped(t: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                    return call(t)

            return wrapped

        expected = run_once(run(body), [x], params=[weight])
        for _ in range(3):
            actual = run_once(run(engine.checkpoint(body)), [x], params=[weight])
            assert_same_run(expected, actual, "autocast")
        assert set(dtypes) == {torch.bfloat16}

    def test_p1_backward_inside_another_autocast(self, engine: EagerEngine, x: Tensor) -> None:
        weight = torch.randn(6, 6, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            return torch.exp(F.linear(torch.sin(t.float()), weight).float()).double()

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            with torch.autocast("cpu", torch.float16):
                engine.backward([outputs], [grad_weight(outputs)])
                assert torch.get_autocast_dtype("cpu") == torch.float16
                assert torch.is_autocast_enabled("cpu")

        compare(body, [x], params=[weight], backward=backward, engine=engine)

    def test_p1_default_device_and_dtype(self, engine: EagerEngine, x: Tensor) -> None:
        """Factories in the body land where they landed in forward, wherever backward runs."""
        seen: list[tuple[torch.device, torch.dtype]] = []

        def body(t: Tensor) -> Tensor:
            made = torch.ones(3)
            seen.append((made.device, made.dtype))
            return torch.exp(torch.sin(t)) * made.numel()

        def model(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def run(t: Tensor) -> Tensor:
                with torch.device("meta"):
                    return call(t)

            return run

        expected = run_once(model(body), [x])
        for _ in range(3):
            assert_same_run(expected, run_once(model(engine.checkpoint(body)), [x]), "default device")
        assert {device.type for device, _ in seen} == {"meta"}

    def test_p1_attention_kernels_of_forward(self, engine: EagerEngine, x: Tensor) -> None:
        """``sdpa_kernel`` around forward alone; the kernels do not save the same."""
        backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]

        def body(t: Tensor) -> Tensor:
            q = t.sin()[None, None]
            return torch.exp(F.scaled_dot_product_attention(q, q, q)[0, 0])

        for around in backends:
            for outside in backends:
                with sdpa_kernel(around):
                    expected = engine.checkpoint(body)(x), body(x)
                with sdpa_kernel(outside):
                    ours, plain = [torch.autograd.grad(one.sum(), x)[0] for one in expected]
                    assert torch.backends.cuda.math_sdp_enabled() is (outside is SDPBackend.MATH)
                assert torch.equal(ours, plain)

    def test_p1_default_dtype_changed_before_backward(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            return torch.exp(torch.sin(t.to(torch.get_default_dtype())) * torch.ones(6)).double()

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            torch.set_default_dtype(torch.float64)
            try:
                engine.backward([outputs.sum()])
            finally:
                torch.set_default_dtype(torch.float32)

        expected = run_once(body, [x], backward=backward)
        for _ in range(3):
            actual = run_once(engine.checkpoint(body), [x], backward=backward, catch=(RuntimeError,))
            if actual.error is None:
                assert_same_run(expected, actual, "default dtype")
            else:
                assert isinstance(actual.error, RematError)

    def test_p1_function_mode_of_forward_is_active_in_replay(self, engine: EagerEngine, x: Tensor) -> None:
        class Doubled(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                return result * 2 if func is torch.sin else result

        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(torch.sin, "sin", recompute=True)(torch.sin(t)))

        def model(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def run(t: Tensor) -> Tensor:
                with Doubled():
                    return call(t)

            return run

        expected = run_once(model(body), [x])
        call = engine.checkpoint(body)
        for _ in range(3):
            assert_same_run(expected, run_once(model(call), [x]), "function mode")

    def test_p1_grad_mode_of_backward_does_not_matter(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            with torch.no_grad():
                scale = torch.exp(t).sum()
            assert torch.is_grad_enabled()
            return torch.exp(remat.region(F.gelu, "gelu", recompute=False)(torch.sin(t * scale)))

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            with torch.no_grad():
                engine.backward([outputs], [grad_weight(outputs)])

        compare(body, [x], backward=backward, engine=engine)


class TestP1NamesAndVariables:
    """Name scopes and context variables are as in forward."""

    @pytest.mark.parametrize("policy", ["S", "R"])
    def test_p1_scope_around_the_checkpoint(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        def body(t: Tensor) -> Tensor:
            with remat.name_scope("inner"):
                a = remat.region(F.gelu, "op", recompute=policy == "R")(torch.sin(t))
            b = remat.region(torch.sin, "op", recompute=policy == "R")(a)
            return torch.exp(b)

        def model(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def run(t: Tensor) -> Tensor:
                with remat.name_scope("outer"):
                    return call(t)

            return run

        expected = run_once(model(body), [x])
        for _ in range(3):
            assert_same_run(expected, run_once(model(engine.checkpoint(body)), [x]), "scope")

    def test_p1_backward_inside_a_scope(self, engine: EagerEngine, x: Tensor) -> None:
        """A scope that is open while backward runs is none of replay's business."""

        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(F.gelu, "op", recompute=False)(torch.sin(t)).tanh())

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            with remat.name_scope("elsewhere"):
                engine.backward([outputs.sum()])

        compare(body, [x], backward=backward, engine=engine)

    def test_p1_scopes_make_names_unique(self, engine: EagerEngine, x: Tensor) -> None:
        layer = remat.region(F.gelu, "layer", recompute=False)

        def body(t: Tensor) -> Tensor:
            for index in range(3):
                with remat.name_scope(f"step{index}"):
                    t = layer(torch.sin(t))
            return torch.exp(t)

        compare(body, [x], engine=engine)

    @pytest.mark.parametrize("way", ["same thread", "new thread", "single-threaded autograd"])
    def test_p1_context_variable_hook(self, engine: EagerEngine, x: Tensor, way: str) -> None:
        def read(t: Tensor) -> Tensor:
            return torch.sin(SCALE.get() * t)

        def body(t: Tensor) -> Tensor:
            t = remat.region(read, "save", recompute=False)(torch.tanh(t) * SCALE.get())
            return torch.exp(remat.region(read, "rec", recompute=True)(t))

        def run(call: Callable[[Tensor], Tensor]) -> Tensor | None:
            leaf = x.detach().clone().requires_grad_()
            token = SCALE.set(3.0)
            output = call(leaf)
            SCALE.reset(token)
            after: list[float] = []

            def work() -> None:
                engine.backward([output.sum()])
                after.append(SCALE.get())

            if way == "new thread":
                worker = threading.Thread(target=work)
                worker.start()
                worker.join(10)
            elif way == "single-threaded autograd":
                with torch.autograd.set_multithreading_enabled(False):
                    work()
            else:
                work()
            assert after == [1.0]
            assert SCALE.get() == 1.0
            return leaf.grad

        expected = run(body)
        assert expected is not None
        for _ in range(3):
            got = run(engine.checkpoint(body, recompute_state_hooks=(ContextVariable(SCALE),)))
            assert got is not None
            assert torch.equal(expected, got)

    def test_p1_checkpoints_in_several_threads_at_once(self, engine: EagerEngine) -> None:
        def body(t: Tensor) -> Tensor:
            t = remat.region(F.gelu, "a", recompute=False)(torch.sin(t))
            return torch.exp(remat.region(torch.sin, "b", recompute=True)(t))

        inputs = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(4)]
        expected = [torch.autograd.grad(body(t).sum(), t)[0] for t in inputs]
        failures: list[BaseException] = []
        barrier = threading.Barrier(len(inputs))

        def work(index: int) -> None:
            try:
                call = engine.checkpoint(body)
                for _ in range(20):
                    barrier.wait(10)
                    inputs[index].grad = None
                    engine.backward([call(inputs[index]).sum()])
                    assert torch.equal(inputs[index].grad, expected[index])
            except BaseException as error:  # noqa: BLE001
                failures.append(error)
                barrier.abort()

        workers = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(20)
        assert not failures

    def test_p1_training_mode_flipped_before_backward(self, engine: EagerEngine, x: Tensor) -> None:
        """``eval()`` between forward and backward: replay sees another module; numbers of forward, or an error."""
        module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.GELU()).double()

        def body(t: Tensor) -> Tensor:
            return torch.exp(module(torch.sin(t)))

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            module.eval()
            try:
                engine.backward([outputs.sum()])
            finally:
                module.train()

        params = list(module.parameters())
        expected = run_once(body, [x], params=params, backward=backward)
        for _ in range(2):
            actual = run_once(engine.checkpoint(body), [x], params=params, backward=backward, catch=(RuntimeError,))
            if actual.error is None:
                assert_same_run(expected, actual, "eval")
