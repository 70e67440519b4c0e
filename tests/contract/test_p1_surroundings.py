"""P1 for bodies and backwards as users write them: odd inputs, other checkpoints around, autograd inside, modules."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers.compare import compare, grad_weight
from helpers.engine import EagerEngine
from helpers.events import Hidden, under
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import torch_remat as remat
from torch_remat.errors import RematError

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def same_or_refused(engine: EagerEngine, step: Callable[[Wrap], list[Any]], *, must_work: bool = False) -> None:
    """Run ``step`` with plain code and three times with checkpoints; equal bits, or an error of ours."""
    expected = step(lambda body: body)
    for _ in range(3):
        try:
            got = step(engine.checkpoint)
        except RematError:
            if must_work:
                raise
            continue
        for left, right in zip(expected, got, strict=True):
            assert left is right is None or torch.equal(left, right)


class TestP1Inputs:
    """Inputs that alias each other or are views."""

    @pytest.mark.parametrize("policy", ["-", "S", "R"])
    @pytest.mark.parametrize("kind", ["chunks", "slices", "overlap", "twice", "transposed", "leaf and view", "keyword"])
    def test_p1_inputs_that_share_memory(self, engine: EagerEngine, x: Tensor, policy: str, kind: str) -> None:
        def block(a: Tensor, b: Tensor) -> Tensor:
            hidden = under(policy, torch.mul, "mul")(a * 1.5, b.sin())
            return torch.exp(torch.tanh(hidden) * b) * a.cos()

        def views(t: Tensor) -> tuple[Tensor, Tensor]:
            return {
                "chunks": lambda: tuple((t * 1).chunk(2)),
                "slices": lambda: (t[:, :3], t[:, 3:]),
                "overlap": lambda: (t[:3], t[1:]),
                "twice": lambda: (t, t),
                "transposed": lambda: (t[:4, :4], t[:4, :4].t()),
                "leaf and view": lambda: (t, t.flip(0)[:1].expand(4, 6)),
                "keyword": lambda: (t[:2], t[2:]),
            }[kind]()

        def step(wrap: Wrap) -> list[Any]:
            leaf = x.detach().clone().requires_grad_()
            first, second = views(leaf)
            output = wrap(block)(first, b=second) if kind == "keyword" else wrap(block)(first, second)
            engine.backward([output], [grad_weight(output)])
            return [output.detach(), leaf.grad]

        same_or_refused(engine, step, must_work=True)

    def test_p1_iterator_as_argument_is_noticed(self, engine: EagerEngine, x: Tensor) -> None:
        """Forward consumes it; replay finds it empty."""

        def body(t: Tensor, numbers: Any) -> Tensor:
            for number in numbers:
                t = torch.sin(t) * number
            return torch.exp(t)

        def step(wrap: Wrap) -> list[Any]:
            leaf = x.detach().clone().requires_grad_()
            output = wrap(body)(leaf, iter([1.5, 2.0]))
            engine.backward([output.sum()])
            return [output.detach(), leaf.grad]

        same_or_refused(engine, step)

    def test_p1_container_that_the_body_changes(self, engine: EagerEngine, x: Tensor) -> None:
        """A cache that grows, and a dict whose entry is bound anew: replay starts from what forward was given."""

        def grows(t: Tensor, cache: list[Tensor], entries: dict[str, Tensor]) -> Tensor:
            cache.append(torch.sin(t))
            entries["h"] = torch.tanh(entries["h"])
            return torch.exp(torch.cat(cache)) * entries["h"].sum()

        def step(wrap: Wrap) -> list[Any]:
            leaf = x.detach().clone().requires_grad_()
            cache, entries = [leaf.cos()], {"h": leaf * 2}
            output = wrap(grows)(leaf, cache, entries)
            engine.backward([output.sum()])
            assert len(cache) == 2
            return [output.detach(), leaf.grad, entries["h"].detach()]

        same_or_refused(engine, step, must_work=True)

    @pytest.mark.parametrize("leaf", [True, False])
    def test_p1_hook_on_an_input(self, engine: EagerEngine, x: Tensor, leaf: bool) -> None:
        """The body registers a gradient hook on its input: replay must not register a second one on the same tensor."""

        def body(t: Tensor) -> Tensor:
            t.register_hook(lambda grad: grad * 0.5)
            return torch.exp(remat.region(F.gelu, "gelu", recompute=False)(torch.sin(t)))

        def step(wrap: Wrap) -> list[Any]:
            start = x.detach().clone().requires_grad_()
            output = wrap(body)(start if leaf else start * 1)
            engine.backward([output.sum()])
            return [start.grad]

        same_or_refused(engine, step, must_work=True)

    def test_p1_integer_inputs_and_sparse_gradients(self, engine: EagerEngine) -> None:
        for sparse in (False, True):

            def step(wrap: Wrap, sparse: bool = sparse) -> list[Any]:
                torch.manual_seed(0)
                table = nn.Embedding(10, 6, sparse=sparse)
                call = wrap(lambda ids: torch.exp(remat.region(table, "table", recompute=False)(ids) * 0.1).tanh())
                output = call(torch.tensor([1, 2, 2]))
                engine.backward([output.sum()])
                grad = table.weight.grad
                assert grad is not None
                return [output.detach(), grad.to_dense() if sparse else grad]

            same_or_refused(engine, step, must_work=True)


class TestP1ChangedSurroundings:
    """What the body closes over is another thing in replay: refused, or eager's numbers."""

    @pytest.mark.parametrize("how", ["in place", "bound anew"])
    @pytest.mark.parametrize("where", ["buffer", "closure", "attribute", "dict"])
    def test_p1_closed_over_tensor_changes(self, engine: EagerEngine, x: Tensor, where: str, how: str) -> None:
        class Holder:
            pass

        def step(wrap: Wrap) -> list[Any]:
            holder, module = Holder(), nn.Module()
            cell = torch.full((6,), 2.0, dtype=torch.float64)
            holder.tensor, entries = cell.clone(), {"tensor": cell.clone()}
            module.register_buffer("tensor", cell.clone())

            def body(t: Tensor) -> Tensor:
                value = {
                    "buffer": lambda: module.tensor,
                    "closure": lambda: cell,
                    "attribute": lambda: holder.tensor,
                    "dict": lambda: entries["tensor"],
                }[where]()
                return torch.exp(torch.sin(t) + value)

            leaf = x.detach().clone().requires_grad_()
            output = wrap(body)(leaf)
            if how == "in place":
                for tensor in (module.tensor, cell, holder.tensor, entries["tensor"]):
                    tensor.mul_(3)
            else:
                module.tensor, holder.tensor, entries["tensor"] = module.tensor * 3, holder.tensor * 3, cell * 3
                cell = cell * 3
            engine.backward([output.sum()])
            return [output.detach(), leaf.grad]

        same_or_refused(engine, step)

    @pytest.mark.parametrize("policy", ["-", "S", "R"])
    def test_p1_functional_call(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        """Parameters swapped in for the forward alone: replay must not compute with the module's own."""

        class Net(nn.Module):
            def __init__(self, wrap: Wrap) -> None:
                super().__init__()
                self.linear = nn.Linear(6, 6).double()
                self.wrap = wrap

            def block(self, t: Tensor) -> Tensor:
                return torch.exp(torch.tanh(under(policy, self.linear, "linear")(torch.sin(t))))

            def forward(self, t: Tensor) -> Tensor:
                return self.wrap(self.block)(t)

        def step(wrap: Wrap) -> list[Any]:
            torch.manual_seed(0)
            net = Net(wrap)
            weights = {name: (value.detach() * 2).requires_grad_() for name, value in net.named_parameters()}
            leaf = x.detach().clone().requires_grad_()
            output = torch.func.functional_call(net, weights, (leaf,))
            engine.backward([output.sum()])
            return [output.detach(), leaf.grad, *(weight.grad for weight in weights.values())]

        same_or_refused(engine, step)

    def test_p1_parameter_freed_and_restored(self, engine: EagerEngine, x: Tensor) -> None:
        """FSDP frees a parameter's storage after forward and restores it before backward, version kept."""

        def step(wrap: Wrap) -> list[Any]:
            weight = nn.Parameter(torch.full((6,), 2.0, dtype=torch.float64))
            value, nbytes = weight.detach().clone(), weight.untyped_storage().nbytes()

            def body(t: Tensor) -> Tensor:
                product = remat.region(torch.mul, "mul", recompute=False)(torch.sin(t), weight)
                return torch.exp(product * weight)

            leaf = x.detach().clone().requires_grad_()
            output = wrap(body)(leaf)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
                weight.untyped_storage().resize_(0)
                weight.untyped_storage().resize_(nbytes)
                weight.copy_(value)
            engine.backward([output.sum()])
            return [output.detach(), leaf.grad, weight.grad]

        same_or_refused(engine, step, must_work=True)

    def test_p1_draws_in_a_fork_of_the_generator(self, engine: EagerEngine, x: Tensor) -> None:
        """``fork_rng`` puts the generator back, so its state tells nothing; the draws start in the third step."""
        state = Hidden({"draws": False})

        def body(t: Tensor) -> Tensor:
            hidden = torch.sin(t)
            if not state["draws"]:
                return torch.exp(hidden * 2)
            with torch.random.fork_rng(devices=[]):
                return torch.exp(hidden * torch.rand(6, dtype=torch.float64))

        def step(wrap: Wrap) -> list[Any]:
            torch.manual_seed(0)
            leaf = x.detach().clone().requires_grad_()
            output = wrap(body)(leaf)
            torch.rand(3)
            engine.backward([output.sum()])
            return [output.detach(), leaf.grad]

        for draws in (False, False, True, True):
            state["draws"] = draws
            same_or_refused(engine, step)


class TestP1Composition:
    """Other checkpoints, autograd inside, modes, transforms."""

    @pytest.mark.parametrize("use_reentrant", [True, False])
    @pytest.mark.parametrize("place", ["bare", "save", "rec", "around"])
    def test_p1_torch_checkpoint(self, engine: EagerEngine, x: Tensor, place: str, use_reentrant: bool) -> None:
        def inner(t: Tensor) -> Tensor:
            return torch.exp(torch.sin(t))

        def theirs(t: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(inner, t, use_reentrant=use_reentrant)

        def body(t: Tensor) -> Tensor:
            hidden = remat.region(F.gelu, "gelu", recompute=False)(torch.sin(t))
            if place == "around":
                return torch.exp(hidden)
            return torch.exp(under({"bare": "-", "save": "S", "rec": "R"}[place], theirs, "theirs")(hidden).tanh())

        def step(wrap: Wrap) -> list[Any]:
            leaf = x.detach().clone().requires_grad_()
            call = wrap(body)
            if place == "around":
                output = torch.utils.checkpoint.checkpoint(
                    lambda t: torch.sin(call(torch.cos(t))), leaf, use_reentrant=use_reentrant
                )
            else:
                output = call(leaf)
            engine.backward([output.sum()])
            return [output.detach(), leaf.grad]

        same_or_refused(engine, step, must_work=True)

    @pytest.mark.parametrize("before", [0, 1])
    def test_p1_several_regions_in_a_torch_checkpoint(self, engine: EagerEngine, x: Tensor, before: int) -> None:
        """It runs the checkpoint twice, and tells by position what is packed, in the first call of the body, too."""

        def body(t: Tensor) -> Tensor:
            h = remat.region(lambda u: torch.sin(u * 2), "one", recompute=False)(t)
            h = remat.region(lambda u: torch.tanh(u * 3), "two", recompute=False)(torch.exp(h))
            return torch.sin(h) * h

        def step(wrap: Wrap) -> list[Any]:
            leaf = x.detach().clone().requires_grad_()
            call = wrap(body)
            for _ in range(before):
                call(leaf)
            output = torch.utils.checkpoint.checkpoint(call, leaf * 1, use_reentrant=False)
            call(leaf)
            engine.backward([output.sum()])
            return [output.detach(), leaf.grad]

        same_or_refused(engine, step, must_work=True)

    @pytest.mark.parametrize("hooks", [False, True])
    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("policy", ["S", "R"])
    def test_p1_regions_in_a_torch_checkpoint_in_the_body(
        self, engine: EagerEngine, x: Tensor, policy: str, use_reentrant: bool, hooks: bool
    ) -> None:
        """Torch's checkpoint runs the region again for itself, after our replay."""

        def inner(t: Tensor) -> Tensor:
            return torch.exp(under(policy, lambda t: torch.tanh(t) * torch.sigmoid(t), "inner")(torch.sin(t)))

        def body(t: Tensor) -> Tensor:
            hidden = remat.region(F.gelu, "gelu", recompute=False)(t * 2)
            hidden = torch.utils.checkpoint.checkpoint(inner, hidden, use_reentrant=use_reentrant)
            return torch.exp(remat.region(torch.cos, "cos", recompute=False)(torch.exp(hidden)))

        options: dict[str, Any] = {"saved_tensors_hooks": (torch.clone, lambda tensor: tensor)} if hooks else {}
        compare(body, (x.detach().requires_grad_(),), options=options, engine=engine)

    @pytest.mark.parametrize("policy", ["-", "S", "R"])
    @pytest.mark.parametrize("lengths", [list, torch.tensor])
    def test_p1_operation_that_a_dispatch_mode_changes(
        self, engine: EagerEngine, policy: str, lengths: Callable[[list[int]], Any]
    ) -> None:
        """Under a mode, as in the observed call, ``ctc_loss`` saves other tensors."""
        targets = torch.tensor([[1, 2]])

        def body(t: Tensor) -> Tensor:
            t = torch.exp(torch.sin(t)).log_softmax(-1)[:, None, :]
            return under(policy, F.ctc_loss, "ctc")(t, targets, lengths([5]), lengths([2])) * t

        x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        compare(body, (x,), engine=engine, calls=4)

    def test_p1_grad_enabled_inside_no_grad(self, engine: EagerEngine, x: Tensor) -> None:
        """Under ambient no_grad the body is a plain function; a graph that it builds is an ordinary one."""

        def step(wrap: Wrap) -> list[Any]:
            def body(t: Tensor) -> Tensor:
                with torch.enable_grad():
                    return torch.exp(remat.region(torch.sin, "sin", recompute=False)(t))

            leaf = x.detach().clone().requires_grad_()
            with torch.no_grad():
                output = wrap(body)(leaf)
            engine.backward([output.sum()])
            return [output.detach(), leaf.grad]

        same_or_refused(engine, step, must_work=True)

    def test_p1_checkpoint_inside_a_custom_function(self, engine: EagerEngine, x: Tensor) -> None:
        """Its backward is entered from inside another backward."""

        def step(wrap: Wrap) -> list[Any]:
            class Inner(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, t: Tensor) -> Tensor:
                    with torch.enable_grad():
                        ctx.leaf = t.detach().requires_grad_()
                        ctx.output = wrap(
                            lambda u: torch.exp(remat.region(F.gelu, "gelu", recompute=False)(torch.sin(u)).tanh())
                        )(ctx.leaf)
                    return ctx.output.detach()

                @staticmethod
                def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                    return torch.autograd.grad(ctx.output, ctx.leaf, grad)[0]

            leaf = x.detach().clone().requires_grad_()
            output = wrap(lambda t: torch.exp(t.sin()))(Inner.apply(leaf))
            engine.backward([output.sum()])
            return [output.detach(), leaf.grad]

        same_or_refused(engine, step, must_work=True)

    def test_p1_anomaly_mode_and_flop_counter(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(torch.matmul, "matmul", recompute=False)(torch.sin(t), t.t()).tanh())

        def step(wrap: Wrap) -> list[Any]:
            leaf = x.detach().clone().requires_grad_()
            with FlopCounterMode(display=False) as counter, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with torch.autograd.set_detect_anomaly(True):
                    output = wrap(body)(leaf)
                    engine.backward([output.sum()])
            # The product is in a SAVE region: no more floating-point work than without a checkpoint.
            return [output.detach(), leaf.grad, torch.tensor(counter.get_total_flops())]

        same_or_refused(engine, step, must_work=True)

    def test_p1_post_accumulate_hook_fires_once(self, engine: EagerEngine, x: Tensor) -> None:
        """R12, one process: a weight used twice in block A (SAVE and bare) and once in block B."""

        def step(wrap: Wrap) -> list[Any]:
            weight = nn.Parameter(torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6))
            fired: list[int] = []
            weight.register_post_accumulate_grad_hook(lambda _: fired.append(1))

            def block_a(t: Tensor) -> Tensor:
                saved = remat.region(torch.matmul, "matmul", recompute=False)(torch.sin(t), weight)
                return torch.exp(torch.tanh(saved)) + t @ weight

            leaf = x.detach().clone().requires_grad_()
            output = wrap(lambda t: torch.tanh(t @ weight))(wrap(block_a)(leaf))
            engine.backward([output.sum()])
            return [weight.grad, leaf.grad, torch.tensor(len(fired))]

        same_or_refused(engine, step, must_work=True)

    @pytest.mark.filterwarnings("ignore:torch_remat.checkpoint inside a torch.func transform:UserWarning")
    def test_p1_functional_transforms(self, engine: EagerEngine, x: Tensor) -> None:
        """Transforms do not support saved-tensor hooks: the function runs as it is, with a warning."""

        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(torch.sin, "sin", recompute=False)(torch.tanh(t)))

        def step(wrap: Wrap) -> list[Any]:
            return [
                torch.func.grad(lambda t: wrap(body)(t).sum())(x.detach()),
                torch.vmap(wrap(body))(x.detach()),
            ]

        same_or_refused(engine, step)


class TestP1Bodies:
    """Callables that are no plain function, and real modules."""

    @pytest.mark.parametrize("policy", ["-", "S", "R"])
    @pytest.mark.parametrize("kind", ["lstm", "attention", "mlp", "conv"])
    def test_p1_modules(self, engine: EagerEngine, policy: str, kind: str) -> None:
        torch.manual_seed(0)
        module: nn.Module = {
            "lstm": lambda: nn.LSTM(6, 5, batch_first=True),
            "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
            "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 6), nn.LayerNorm(6)),
            "conv": lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Mish()),
        }[kind]().double()

        def body(t: Tensor) -> Any:
            result = under(policy, module, "module")(torch.sin(t))
            return torch.exp(torch.tanh(result[0] if kind == "lstm" else result))

        x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
        compare(body, [x], params=list(module.parameters()), engine=engine)

    def test_p1_other_callables(self, engine: EagerEngine, x: Tensor) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 6), nn.GELU()).double()
        partial = functools.partial(lambda scale, t: torch.exp(torch.sin(t) * scale), 2.0)
        for body in (torch.sin, module, module.forward, partial, torch.ops.aten.tanh.default):
            compare(body, [x], params=list(module.parameters()), engine=engine)

    def test_p1_many_regions_and_deep_nesting(self, engine: EagerEngine, x: Tensor) -> None:
        def wide(t: Tensor) -> Tensor:
            for index in range(100):
                t = remat.region(torch.sin, f"s{index}", recompute=index % 3 == 0)(torch.cos(t))
            return t.exp()

        def deep(t: Tensor, depth: int = 40) -> Tensor:
            if depth == 0:
                return remat.region(torch.exp, "bottom", recompute=False)(t)
            return remat.region(lambda u: deep(torch.sin(u), depth - 1), f"d{depth}", recompute=True)(t).tanh()

        compare(wide, [x], engine=engine)
        compare(deep, [x], engine=engine)

    def test_p1_a_hundred_checkpoints(self, engine: EagerEngine, x: Tensor) -> None:
        def step(wrap: Wrap) -> list[Any]:
            leaf = x.detach().clone().requires_grad_()
            t = leaf
            for _ in range(100):
                t = wrap(lambda u: torch.sin(remat.region(torch.cos, "cos", recompute=False)(u)))(t)
            engine.backward([t.sum()])
            return [t.detach(), leaf.grad]

        same_or_refused(engine, step, must_work=True)
