"""P1: state that a body reads and changes, always or from some call on: right, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.hooks import Buffers
from helpers.programs import grads, leaf, saved
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import ModifiedError


@pytest.fixture(name="x")
def fixture_x() -> Tensor:
    """The input."""
    return leaf(3)


class Averaging(torch.nn.Module):
    """Replaces a running mean with a new one, before or after it reads it, or without ever reading it."""

    def __init__(self, kind: str, order: str) -> None:
        super().__init__()
        self.order = order
        if kind == "buffer":
            self.register_buffer("mean", torch.randn(3, dtype=torch.float64))
        else:
            self.mean = torch.randn(3, dtype=torch.float64)

    def update(self, t: Tensor) -> Tensor:
        """The new mean."""
        self.mean = self.mean * 0.9 + t.detach() * 0.1
        return self.mean

    def forward(self, t: Tensor) -> Tensor:
        """As the order says."""
        if self.order == "replaced and read":
            return torch.exp(t * self.update(t))
        if self.order == "read and replaced":
            read = self.mean
            self.update(t)
            return torch.exp(t * read)
        if self.order == "in a SAVE region":
            return torch.exp(t * saved(self.update, "mean")(t))
        y = torch.exp(t * 2)
        self.update(t)
        return y


class Restores:
    """A state hook for a module's mean, by identity, by value, or written into the tensor that is there."""

    def __init__(self, module: Any, by: str) -> None:
        self.module, self.by = module, by

    def snapshot(self) -> Tensor:
        return self.module.mean if self.by == "identity" else self.module.mean.clone()

    def restore(self, state: Tensor) -> None:
        if self.by == "copy":
            self.module.mean.copy_(state)
        elif self.by == "data":
            self.module.mean.data.copy_(state)
        else:
            self.module.mean = state if self.by == "identity" else state.clone()


class Nothing:
    """A state hook for something else."""

    def snapshot(self) -> None:
        return None

    def restore(self, state: None) -> None:
        return None


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
class TestP1StateThatTheBodyReplaces:
    """Replay would start from the new value: refused in forward, unless a state hook brings the old one back."""

    @pytest.mark.parametrize("order", ["replaced and read", "read and replaced"])
    @pytest.mark.parametrize("hooks", [(), (Nothing(),)], ids=["no hook", "a hook for something else"])
    def test_p1_refused(self, x: Tensor, kind: str, order: str, hooks: tuple[Any, ...]) -> None:
        module = Averaging(kind, order)
        for _ in range(2):  # in forward, or, where only the new value was read, when replay replaces it again
            with pytest.raises(ModifiedError, match=r"reads mean and (puts another tensor in its place|modifies)"):
                remat.checkpoint(region_name="c", recompute_state_hooks=hooks)(module)(x).sum().backward()

    @pytest.mark.parametrize("order", ["in a SAVE region", "not read"])
    def test_p1_where_replay_does_not_read_it_all_is_well(self, x: Tensor, kind: str, order: str) -> None:
        module, other = Averaging(kind, order), Averaging(kind, order)
        other.mean = module.mean.clone()
        checkpointed = remat.checkpoint(region_name="c")(module)
        for _ in range(3):
            for ours, plain in zip(grads(checkpointed(x), x), grads(other(x), x), strict=True):
                assert torch.equal(ours, plain)

    @pytest.mark.parametrize("order", ["replaced and read", "read and replaced"])
    @pytest.mark.parametrize("by", ["identity", "value"])
    def test_p1_with_a_state_hook_all_is_well(self, x: Tensor, kind: str, order: str, by: str) -> None:
        module, other = Averaging(kind, order), Averaging(kind, order)
        other.mean = module.mean.clone()
        hooks = [Nothing(), Restores(module, by)]
        checkpointed = remat.checkpoint(region_name="c", recompute_state_hooks=hooks)(module)
        for _ in range(3):
            for ours, plain in zip(grads(checkpointed(x), x), grads(other(x), x), strict=True):
                assert torch.equal(ours, plain)
            assert torch.equal(module.mean, other.mean)

    @pytest.mark.parametrize("order", ["replaced and read", "read and replaced"])
    @pytest.mark.parametrize("by", ["identity", "value"])
    def test_p1_with_a_state_hook_two_calls_in_flight(self, x: Tensor, kind: str, order: str, by: str) -> None:
        module, other = Averaging(kind, order), Averaging(kind, order)
        other.mean = module.mean.clone()
        checkpointed = remat.checkpoint(region_name="c", recompute_state_hooks=[Restores(module, by)])(module)
        for _ in range(3):
            results = [grads(call(x) * call(x * 2), x) for call in (checkpointed, other)]
            for ours, plain in zip(*results, strict=True):
                assert torch.equal(ours, plain)
            assert torch.equal(module.mean, other.mean)


class TestP1WeightsThatAreComputed:
    """``weight`` starts as another name for a parameter and is replaced in each call by what is computed from that."""

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    @pytest.mark.parametrize("computed", [torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm])
    def test_p1_in_a_checkpoint(self, x: Tensor, computed: Any) -> None:
        torch.manual_seed(0)
        module = computed(torch.nn.Linear(3, 3, dtype=torch.float64))
        torch.manual_seed(0)
        plain = computed(torch.nn.Linear(3, 3, dtype=torch.float64))
        checkpointed = remat.checkpoint(recompute_state_hooks=(Buffers(module),))(lambda t: torch.exp(module(t)))
        for _ in range(3):
            results = [
                grads(checkpointed(x), x, *module.parameters()),
                grads(torch.exp(plain(x)), x, *plain.parameters()),
            ]
            for ours, expected in zip(*results, strict=True):
                assert torch.equal(ours, expected)
            for ours, expected in zip(module.buffers(), plain.buffers(), strict=True):
                assert torch.equal(ours, expected)

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_p1_two_calls_in_flight(self, x: Tensor) -> None:
        torch.manual_seed(0)
        module = torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3, dtype=torch.float64))
        plain = copy.deepcopy(module)
        call = remat.checkpoint(recompute_state_hooks=(Buffers(module),))(lambda t: torch.exp(module(t)))
        for _ in range(3):
            results = [grads(one(x) - one(x * 2), x) for one in (call, lambda t: torch.exp(plain(t)))]
            for ours, expected in zip(*results, strict=True):
                assert torch.equal(ours, expected)

    def test_p1_another_name_for_a_parameter_that_is_read_and_replaced(self, x: Tensor) -> None:
        class Rounded(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.linspace(0, 1, 3, dtype=torch.float64))
                self.used = self.weight.detach()

            def forward(self, t: Tensor) -> Tensor:
                y = torch.exp(t * self.used)
                self.used = torch.round(self.weight.detach() * 4)
                return y

        with pytest.raises(ModifiedError, match="reads used and modifies or replaces it"):
            remat.checkpoint()(Rounded())(x).sum().backward()


class WarmingUp(torch.nn.Module):
    """Changes its running mean from the third call on."""

    def __init__(self, kind: str, order: str, *, guarded: bool) -> None:
        super().__init__()
        self.kind, self.order, self.guarded = kind, order, guarded
        self.calls = 0
        self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.randn(3, dtype=torch.float64))

    def update(self, t: Tensor) -> None:
        """In place, or by another tensor."""
        if self.calls <= 2 or (self.guarded and remat.is_recomputing()):
            return
        if self.kind == "in place":
            self.mean.mul_(0.9).add_(t.detach(), alpha=0.1)
        else:
            self.mean = self.mean * 0.9 + t.detach() * 0.1

    def forward(self, t: Tensor) -> Tensor:
        """As the order says; backward needs neither the change nor what comes after it."""
        h = self.linear(t)
        if self.order == "changed and read":
            self.update(h)
        y = torch.exp(h.sin() - self.mean)
        if self.order == "read and changed":
            self.update(h)
        return y


class TestP1StateThatTheBodyBeginsToChange:
    """On a path that is known: refused, in forward or in backward."""

    @pytest.mark.parametrize("kind", ["in place", "replaced"])
    @pytest.mark.parametrize("order", ["changed and read", "read and changed"])
    @pytest.mark.parametrize("guarded", [False, True])
    def test_p1_refused(self, x: Tensor, kind: str, order: str, guarded: bool) -> None:
        module = WarmingUp(kind, order, guarded=guarded)
        plain = copy.deepcopy(module)
        checkpointed = remat.checkpoint(region_name="c")(module)
        for call in range(5):
            module.calls, plain.calls = call, call
            if call <= 2:
                for ours, expected in zip(grads(checkpointed(x), x), grads(plain(x), x), strict=True):
                    assert torch.equal(ours, expected)
                continue
            if call == 4 and guarded and (kind, order) == ("replaced", "changed and read"):
                module.mean = plain.mean.clone()  # observed by now: what is there is what forward read
                for ours, expected in zip(grads(checkpointed(x), x), grads(plain(x), x), strict=True):
                    assert torch.equal(ours, expected)
                continue
            with pytest.raises(ModifiedError, match=r"mean|modifies a tensor from outside"):
                checkpointed(x).sum().backward()

    @pytest.mark.parametrize("guarded", [False, True])
    @pytest.mark.parametrize("where", ["recomputed code", "a SAVE region"])
    def test_p1_what_replay_finds_done_is_no_fault(self, x: Tensor, guarded: bool, where: str) -> None:
        class Masked(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mask = torch.ones(3)

            def convert(self, t: Tensor) -> Tensor:
                if not (guarded and remat.is_recomputing()):
                    self.mask = self.mask.to(t.dtype)
                return t

            def forward(self, t: Tensor) -> Tensor:
                (self.convert if where == "recomputed code" else saved(self.convert, "convert"))(t)
                return torch.exp(t.sin() * self.mask)

        for _ in range(3):  # another module of the same code each time, and the same one again
            module, plain = Masked(), Masked()
            checkpointed = remat.checkpoint(region_name="c")(module)
            for _ in range(2):
                for ours, expected in zip(grads(checkpointed(x), x), grads(plain(x), x), strict=True):
                    assert torch.equal(ours, expected)
            output = checkpointed(x)
            module.mask.add_(1)
            with pytest.raises(ModifiedError, match="mask"):
                output.sum().backward()

    @pytest.mark.parametrize("hooks", [(), (remat.GeneratorHook(),)], ids=["no hook", "a hook for generators"])
    @pytest.mark.parametrize("how", ["in a SAVE region", "once per step", "in place, once per step"])
    def test_p1_refused_though_replay_would_not_repeat_it(self, x: Tensor, how: str, hooks: tuple[Any, ...]) -> None:
        """The old value was read, and is gone."""

        class Codebook(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls, self.last = 0, -1
                self.book = torch.randn(3, dtype=torch.float64)

            def update(self, t: Tensor) -> Tensor:
                if self.calls >= 3 and self.last != self.calls:
                    self.last = self.calls
                    if how == "in place, once per step":
                        self.book.mul_(0.9)
                    else:
                        self.book = self.book * 0.9 + t.detach() * 0.1
                return t * 1

            def forward(self, t: Tensor) -> Tensor:
                h = t.sin() * self.book
                return torch.exp((saved(self.update, "update") if how == "in a SAVE region" else self.update)(h))

        module = Codebook()
        plain = copy.deepcopy(module)
        checkpointed = remat.checkpoint(region_name="c", recompute_state_hooks=hooks)(module)
        for call in range(4):
            module.calls = plain.calls = call
            if call < 3:
                for ours, expected in zip(grads(checkpointed(x), x), grads(plain(x), x), strict=True):
                    assert torch.equal(ours, expected)
            else:
                with pytest.raises(ModifiedError, match="book"):
                    checkpointed(x).sum().backward()

    @pytest.mark.parametrize("hooks", [(), (remat.GeneratorHook(),)], ids=["no hook", "a hook for generators"])
    @pytest.mark.parametrize("how", ["bare", "in a SAVE region", "in place there", "guarded", "once per step"])
    @pytest.mark.parametrize("every", [4, 12])
    def test_p1_refused_on_a_path_that_is_new_or_rare(
        self, x: Tensor, how: str, every: int, hooks: tuple[Any, ...]
    ) -> None:
        """Also on one that comes too seldom to be observed."""

        class Codebook(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls, self.last = 0, -1
                self.register_buffer("book", torch.ones(3, dtype=torch.float64))

            def new(self, t: Tensor) -> Tensor:
                return self.book * 0.9 + t.detach() * 0.1

            def update(self, t: Tensor) -> Tensor:
                if how == "in place there" or (how == "guarded" and not remat.is_recomputing()):
                    self.book.copy_(self.new(t))
                elif how in ("bare", "in a SAVE region") or (how == "once per step" and self.last != self.calls):
                    self.last, self.book = self.calls, self.new(t)
                return t * 1

            def forward(self, t: Tensor) -> Tensor:
                h = t.sin()
                if self.calls % every == every - 1:
                    old = h * self.book
                    h = saved(self.update, "update")(old) if how.endswith(("region", "there")) else self.update(old)
                return torch.exp(h)

        module = Codebook()
        checkpointed = remat.checkpoint(region_name="c", recompute_state_hooks=hooks)(module)
        for call in range(3 * every):
            module.calls = call
            expected = grads(torch.exp(x.sin()), x)
            if call % every == every - 1:
                with pytest.raises(ModifiedError, match=r"book|in place"):
                    checkpointed(x).sum().backward()
            else:
                for ours, plain in zip(grads(checkpointed(x), x), expected, strict=True):
                    assert torch.equal(ours, plain)

    @pytest.mark.parametrize("converted", [False, True])
    def test_p1_what_is_made_anew_every_few_steps_is_no_fault(self, x: Tensor, converted: bool) -> None:
        """From what does not change with it: replay makes it again, or finds it."""

        class Quantized(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)
                self.step = 0
                self.rounded: Any = None

            def forward(self, t: Tensor) -> Tensor:
                if self.step % 3 == 0:
                    self.rounded = torch.round(self.linear.weight.detach() * 8) / 8
                return torch.exp(t @ (self.rounded.double() if converted else self.rounded))

        module = Quantized()
        plain = copy.deepcopy(module)
        checkpointed = remat.checkpoint(region_name="c")(module)
        for step in range(12):
            module.step = plain.step = step
            with torch.no_grad():
                for one in (module, plain):
                    one.linear.weight.add_(0.3)
            for ours, expected in zip(grads(checkpointed(x), x), grads(plain(x), x), strict=True):
                assert torch.equal(ours, expected)

    @pytest.mark.parametrize("kind", ["in place", "replaced"])
    def test_p1_a_hook_for_generators_restores_nothing_else(self, x: Tensor, kind: str) -> None:
        module = WarmingUp(kind, "changed and read", guarded=False)
        module.calls = 3
        with pytest.raises(ModifiedError):
            remat.checkpoint(recompute_state_hooks=(remat.GeneratorHook(),))(module)(x).sum().backward()

    @pytest.mark.parametrize("starts", [0, 3])
    @pytest.mark.parametrize("kind", ["in place", "replaced"])
    @pytest.mark.parametrize("order", ["changed and read", "read and changed"])
    def test_p1_a_hook_for_something_else_does_not_hide_it(self, x: Tensor, starts: int, kind: str, order: str) -> None:
        module = WarmingUp(kind, order, guarded=False)
        checkpointed = remat.checkpoint(recompute_state_hooks=(Nothing(),))(module)
        for call in range(starts, 5):
            module.calls = call
            if call <= 2:
                checkpointed(x).sum().backward()
                continue
            with pytest.raises(ModifiedError, match=r"mean|modifies a tensor from outside"):
                checkpointed(x).sum().backward()

    @pytest.mark.parametrize("starts", [0, 3])
    @pytest.mark.parametrize(
        ("kind", "by"),
        [
            (kind, by)
            for kind in ("in place", "replaced")
            for by in ("value", "copy", "data" if kind == "in place" else "identity")
        ],
    )
    @pytest.mark.parametrize("order", ["changed and read", "read and changed"])
    def test_p1_beside_a_hook_for_it_all_is_well(self, x: Tensor, starts: int, kind: str, by: str, order: str) -> None:
        module = WarmingUp(kind, order, guarded=False)
        plain = copy.deepcopy(module)
        hooks = (Nothing(), Restores(module, by))
        checkpointed = remat.checkpoint(recompute_state_hooks=hooks)(module)
        for call in range(starts, 6):
            module.calls = plain.calls = call
            for ours, expected in zip(grads(checkpointed(x), x), grads(plain(x), x), strict=True):
                assert torch.equal(ours, expected)
            assert torch.equal(module.mean, plain.mean)

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
    @pytest.mark.parametrize("layout", ["sparse", "sparse_csr", "jagged"])
    def test_p1_of_any_layout(self, layout: str) -> None:
        class Graph(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                dense = torch.eye(3)
                if layout == "jagged":
                    self.edges = torch.nested.nested_tensor([dense[:2], dense], layout=torch.jagged)
                else:
                    self.edges = dense.to_sparse() if layout == "sparse" else dense.to_sparse_csr()

            def forward(self, t: Tensor) -> Tensor:
                self.edges = self.edges.to(t.dtype)
                edges = self.edges
                return torch.exp((edges.to_padded_tensor(0.0).sum(0) if layout == "jagged" else edges.to_dense()) @ t)

        x = torch.linspace(0, 1, 9, dtype=torch.float64).reshape(3, 3).requires_grad_()
        module, plain = Graph(), Graph()
        checkpointed = remat.checkpoint(region_name="c")(module)
        for _ in range(3):
            for ours, expected in zip(grads(checkpointed(x), x), grads(plain(x), x), strict=True):
                assert torch.equal(ours, expected)

    def test_p1_a_cache_that_grows_is_no_fault(self) -> None:
        class Rotary(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.arange(2.0, dtype=torch.float64)

            def forward(self, t: Tensor) -> Tensor:
                if len(t) > len(self.table):
                    self.table = torch.arange(float(len(t)), dtype=torch.float64)
                return torch.exp(t.sin() * self.table[: len(t)])

        module, plain = Rotary(), Rotary()
        checkpointed = remat.checkpoint(region_name="c")(module)
        for length in (2, 2, 3, 3, 2, 5, 4, 7):
            x = torch.linspace(0, 1, length, dtype=torch.float64).requires_grad_()
            for ours, expected in zip(grads(checkpointed(x), x), grads(plain(x), x), strict=True):
                assert torch.equal(ours, expected)
