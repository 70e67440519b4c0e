"""Saved-tensor hooks, the offload contract: which tensors are packed, as what, when, and by which pair."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers.compare import compare
from helpers.engine import EagerEngine
from helpers.events import Hidden
from helpers.functions import SavesInternal
from torch import Tensor

import torch_remat as remat
from torch_remat import SavedTensorInfo, SavedTensorKind

INPUT, SAVE, OUTPUT = SavedTensorKind.CHECKPOINT_INPUT, SavedTensorKind.BACKWARD, SavedTensorKind.SAVE_OUTPUT


class Recorder:
    """A pack and unpack pair that clones (as offloading would) and logs what it sees."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.packed: list[tuple[SavedTensorKind | None, tuple[int, ...]]] = []
        self.unpacked: list[tuple[SavedTensorKind | None, tuple[int, ...]]] = []
        self.contexts: list[object] = []
        self.tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Any:
        info = remat.current_saved_tensor_info()
        self.packed.append((info.kind, tuple(tensor.shape)))
        self.contexts.append(info.context)
        self.tensors.append(tensor)
        return info.kind, tensor.detach().clone(), tensor.requires_grad

    def unpack(self, packed: Any) -> Tensor:
        kind, tensor, _ = packed
        self.unpacked.append((kind, tuple(tensor.shape)))
        return tensor

    @property
    def pair(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        return self.pack, self.unpack

    def clear(self) -> None:
        for log in (self.packed, self.unpacked, self.contexts, self.tensors):
            log.clear()

    def kinds(self) -> list[SavedTensorKind | None]:
        return [kind for kind, _ in self.packed]


def chain_body(t: Tensor) -> Tensor:
    """SAVE(a) -> REC(b) -> SAVE(c); a and c save an internal, b rebuilds its own and reads a's output."""
    t = remat.region(lambda u: SavesInternal.apply(u), "a", recompute=False)(t * 2)
    t = remat.region(lambda u: SavesInternal.apply(u) * 2, "b", recompute=True)(t)
    return remat.region(lambda u: SavesInternal.apply(u), "c", recompute=False)(t)


class TestSavedTensorsHooks:
    """The pair of ``checkpoint(saved_tensors_hooks=...)`` and the context manager."""

    def test_hooks_kinds_order_and_unpacks(self, engine: EagerEngine, x: Tensor) -> None:
        recorder = Recorder()
        call = engine.checkpoint(chain_body, saved_tensors_hooks=recorder.pair)
        for step in range(3):
            recorder.clear()
            output = call(x)
            if step:
                # The output of `a` is packed once its first reader asks, or when the body has ended: never before
                # the internals of `a`, and never twice.
                assert recorder.kinds()[:2] == [INPUT, SAVE]
                assert sorted(kind.name for kind in recorder.kinds() if kind) == [
                    "BACKWARD", "BACKWARD", "CHECKPOINT_INPUT", "SAVE_OUTPUT",
                ]  # fmt: skip
            engine.backward([output.sum()])
            if step:
                kinds = [kind for kind, _ in recorder.unpacked]
                assert kinds[-2:] == [SAVE, SAVE]
                assert OUTPUT in kinds[:-2]
                assert len(recorder.unpacked) <= len(recorder.packed)
            compare(chain_body, [x], options={"saved_tensors_hooks": recorder.pair}, engine=engine, calls=1)

    def test_hooks_see_detached_saves_and_live_inputs(self, engine: EagerEngine, x: Tensor) -> None:
        recorder = Recorder()
        engine.checkpoint(chain_body, saved_tensors_hooks=recorder.pair)(x)
        by_kind = dict(zip(recorder.kinds(), recorder.tensors, strict=True))
        assert by_kind[INPUT] is x
        assert not by_kind[SAVE].requires_grad
        assert not by_kind[OUTPUT].requires_grad

    def test_hooks_see_every_input(self, engine: EagerEngine, x: Tensor) -> None:
        """Positional, keyword and nested tensors; also leaves, parameters and integers."""
        recorder = Recorder()
        parameter = torch.nn.Parameter(torch.randn(2, 6, dtype=torch.float64))
        ids = torch.tensor([1, 0, 1])
        nested = torch.randn(3, 6, dtype=torch.float64)

        def body(t: Tensor, tree: Any, *, weight: Tensor, ids: Tensor) -> Tensor:
            return torch.exp(torch.sin(t).sum() * weight[ids] * tree["deep"][0])

        call = engine.checkpoint(body, saved_tensors_hooks=recorder.pair)
        engine.backward([call(x, {"deep": [nested]}, weight=parameter, ids=ids).sum()])
        packed = [shape for kind, shape in recorder.packed if kind == INPUT]
        assert sorted(packed) == sorted([(4, 6), (3, 6), (2, 6), (3,)])

    def test_hooks_never_see_recomputed_saves(self, engine: EagerEngine, x: Tensor) -> None:
        recorder = Recorder()

        def body(t: Tensor) -> Tensor:
            hidden = torch.exp(t.repeat(1, 2))  # bare: (4, 12)
            hidden = remat.region(torch.sin, "rec", recompute=True)(hidden)
            return remat.region(F.gelu, "rebuilt", recompute=False)(hidden)

        compare(body, [x], options={"saved_tensors_hooks": recorder.pair}, engine=engine)
        assert set(recorder.kinds()) == {INPUT}

    def test_hooks_of_the_checkpoint_win_over_the_ambient_pair(self, engine: EagerEngine, x: Tensor) -> None:
        own, ambient = Recorder("own"), Recorder("ambient")
        call = engine.checkpoint(chain_body, saved_tensors_hooks=own.pair)
        with remat.saved_tensors_hooks(*ambient.pair):
            output = call(x)
        engine.backward([output.sum()])
        assert own.packed
        assert not ambient.packed

    @pytest.mark.parametrize("native_inside", [False, True])
    def test_hooks_innermost_ambient_pair_applies_alone(
        self, engine: EagerEngine, x: Tensor, native_inside: bool
    ) -> None:
        recorder = Recorder()
        native: list[tuple[int, ...]] = []
        native_pair = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (native.append(tuple(t.shape)), t.detach().clone())[1], lambda t: t
        )
        ours = remat.saved_tensors_hooks(*recorder.pair)
        outer, inner = (ours, native_pair) if native_inside else (native_pair, ours)
        call = engine.checkpoint(chain_body)
        expected = torch.autograd.grad(chain_body(x).sum(), x)[0]
        for _ in range(3):
            recorder.clear()
            native.clear()
            x.grad = None
            with outer, inner:
                output = call(x)
            engine.backward([output.sum()])
            assert torch.equal(expected, x.grad)
            assert bool(native) == native_inside
            assert bool(recorder.packed) == (not native_inside)

    def test_hooks_save_on_cpu(self, engine: EagerEngine, x: Tensor) -> None:
        expected = torch.autograd.grad(chain_body(x).sum(), x)[0]
        for _ in range(3):
            x.grad = None
            with torch.autograd.graph.save_on_cpu():
                output = engine.checkpoint(chain_body)(x)
            engine.backward([output.sum()])
            assert torch.equal(expected, x.grad)

    def test_hooks_native_pair_gives_info_for_every_kind(self, engine: EagerEngine, x: Tensor) -> None:
        recorder = Recorder()
        with torch.autograd.graph.saved_tensors_hooks(*recorder.pair):
            output = engine.checkpoint(chain_body)(x)
        engine.backward([output.sum()])
        assert {INPUT, SAVE} <= set(recorder.kinds())

    def test_hooks_entered_in_the_body(self, engine: EagerEngine, x: Tensor) -> None:
        """They replace the pair for the SAVE regions called within."""
        outer, inner = Recorder(), Recorder()

        def body(t: Tensor) -> Tensor:
            t = remat.region(SavesInternal.apply, "a", recompute=False)(torch.sin(t))
            with remat.saved_tensors_hooks(*inner.pair):
                t = remat.region(SavesInternal.apply, "b", recompute=False)(t)
            return torch.exp(t)

        compare(body, [x], options={"saved_tensors_hooks": outer.pair}, engine=engine)
        assert SAVE in outer.kinds()
        assert SAVE in inner.kinds()
        assert INPUT not in inner.kinds()

    def test_hooks_bound_when_packed(self, engine: EagerEngine, x: Tensor) -> None:
        """The unpack that belongs to the pack runs, whatever is active in backward."""
        first, second = Recorder(), Recorder()
        with remat.saved_tensors_hooks(*first.pair):
            output = engine.checkpoint(chain_body)(x)
        with remat.saved_tensors_hooks(*second.pair):
            engine.backward([output.sum()])
        assert first.unpacked
        assert not second.unpacked

    def test_hooks_with_retain_graph(self, engine: EagerEngine, x: Tensor) -> None:
        """Every unpack happens again; packs never repeat."""
        recorder = Recorder()
        output = engine.checkpoint(chain_body, saved_tensors_hooks=recorder.pair)(x)
        packed = len(recorder.packed)
        rounds = []
        for retain in (True, True, False):
            recorder.unpacked.clear()
            engine.backward([output.sum()], retain_graph=retain)
            rounds.append(list(recorder.unpacked))
        assert rounds[0] == rounds[1] == rounds[2]
        assert rounds[0]
        assert len(recorder.packed) == packed

    def test_hooks_capture_context(self, engine: EagerEngine, x: Tensor) -> None:
        recorder, captured = Recorder(), list[int]()

        def capture() -> int:
            captured.append(len(captured))
            return captured[-1]

        with remat.saved_tensors_hooks(*recorder.pair, capture_context=capture):
            output = engine.checkpoint(chain_body)(x)
        engine.backward([output.sum()])
        assert captured
        for kind, context in zip(recorder.kinds(), recorder.contexts, strict=True):
            assert (context is None) == (kind == INPUT)

    def test_hooks_ambient_outside_a_checkpoint(self, x: Tensor) -> None:
        """As native hooks: kind BACKWARD, no context, nothing captured."""
        recorder = Recorder()

        def never() -> object:
            raise AssertionError("captured outside a checkpoint")

        with remat.saved_tensors_hooks(*recorder.pair, capture_context=never):
            output = torch.exp(torch.sin(x)).sum()
        output.backward()
        assert set(recorder.kinds()) == {SAVE}
        assert set(recorder.contexts) == {None}

    def test_hooks_info_outside_a_pack_hook(self) -> None:
        with pytest.raises(RuntimeError, match="may only be called from"):
            remat.current_saved_tensor_info()

    def test_hooks_info_in_unpack(self, engine: EagerEngine, x: Tensor) -> None:
        def unpack(t: Tensor) -> Tensor:
            with pytest.raises(RuntimeError, match="may only be called from"):
                remat.current_saved_tensor_info()
            return t

        output = engine.checkpoint(chain_body, saved_tensors_hooks=(lambda t: t, unpack))(x)
        engine.backward([output.sum()])

    def test_hooks_enum_and_info_are_values(self) -> None:
        assert [kind.value for kind in (INPUT, SAVE, OUTPUT)] == [1, 2, 3]
        info = SavedTensorInfo(SAVE)
        assert info.context is None
        assert info == SavedTensorInfo(kind=SAVE, context=None)
        with pytest.raises(AttributeError):
            info.kind = INPUT  # type: ignore[misc]

    def test_hooks_not_called_without_grad(self, engine: EagerEngine, x: Tensor) -> None:
        recorder = Recorder()
        call = engine.checkpoint(chain_body, saved_tensors_hooks=recorder.pair)
        with torch.no_grad():
            call(x)
        with torch.inference_mode():
            call(x)
        assert not recorder.packed

    def test_hooks_disabled_around_a_checkpoint(self, engine: EagerEngine, x: Tensor) -> None:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            with pytest.raises(RuntimeError, match="not here"):
                engine.checkpoint(chain_body)(x)
        compare(chain_body, [x], engine=engine)

    @pytest.mark.parametrize("pair", ["save_on_cpu", "clone"])
    def test_hooks_that_change_the_layout(self, engine: EagerEngine, x: Tensor, pair: str) -> None:
        """Offloading makes a strided view contiguous; views taken of it in replay are those of forward."""

        def body(t: Tensor) -> Tensor:
            left, right = remat.region(lambda u: (u * 2).t().chunk(2), "chunks", recompute=False)(torch.sin(t))
            left = remat.region(lambda u: u.reshape(-1)[1:], "flat", recompute=False)(left)
            wide = remat.region(lambda u: (u[:1] * 2).expand(3, *u.shape), "expanded", recompute=False)(right)
            return torch.exp(left).sum() * torch.sin(right.t()[1:]) + torch.exp(wide).sum()

        def step(call: Callable[[Tensor], Tensor]) -> Tensor | None:
            leaf = x.detach().clone().requires_grad_()
            clone = torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t)
            with torch.autograd.graph.save_on_cpu() if pair == "save_on_cpu" else clone:
                output = call(leaf)
            engine.backward([output.sum()])
            return leaf.grad

        expected = step(body)
        assert expected is not None
        for _ in range(3):
            got = step(engine.checkpoint(body))
            assert got is not None
            assert torch.equal(expected, got)

    def test_hooks_payload_of_an_earlier_version_is_not_reused(self, engine: EagerEngine, x: Tensor) -> None:
        """A region saves its argument, then changes it: what replay reads is the changed one, on every path."""
        policy = Hidden({"first": True})

        def changes(t: Tensor) -> None:
            F.layer_norm(t, (6,))
            t[..., :1].mul_(0.5)

        def body(t: Tensor) -> Tensor:
            remat.region(lambda u: None, "first", recompute=policy["first"])(t)
            hidden = t * 0.5
            remat.region(changes, "changes", recompute=False)(hidden)
            return hidden * hidden

        call = engine.checkpoint(body, saved_tensors_hooks=(lambda t: t.clone(), lambda t: t))
        for first in (True, True, False, False, True):
            policy["first"] = first
            expected = torch.autograd.grad(body(x).sum(), x)[0]
            assert torch.equal(expected, torch.autograd.grad(call(x).sum(), x)[0])

    @pytest.mark.parametrize("hooks", [None, (lambda t: t.clone(), lambda t: t)])
    def test_hooks_region_that_returns_another_part_of_its_argument_s_memory(
        self, engine: EagerEngine, x: Tensor, hooks: Any
    ) -> None:
        def body(a: Tensor, b: Tensor) -> Tensor:
            other = remat.region(lambda u: b, "other", recompute=False)(a)
            whole = remat.region(lambda u: u._base[:3], "base", recompute=False)(a)
            return F.silu(other) * torch.sin(a) + whole.exp().sum()

        expected = torch.autograd.grad(body(*(x * 1).split(2)).sum(), x)[0]
        for _ in range(3):
            output = engine.checkpoint(body, saved_tensors_hooks=hooks)(*(x * 1).split(2))
            assert torch.equal(expected, torch.autograd.grad(output.sum(), x)[0])

    def test_hooks_and_a_read_on_the_host(self, engine: EagerEngine, x: Tensor) -> None:
        """The save of an input is rebuilt because the pair has packed the input; replay then passes the read again."""

        def body(t: Tensor) -> Tensor:
            scaled = remat.region(lambda u: u * 2, "scaled", recompute=False)(t)
            factor = 2.0 if float(scaled.detach().sum()) > 0 else 3.0
            return remat.region(lambda u: F.layer_norm(u, (6,)) * factor, "norm", recompute=False)(t)

        pair = (lambda t: t.clone(), lambda t: t)
        compare(body, [x], options={"saved_tensors_hooks": pair}, engine=engine)

    @pytest.mark.parametrize("announced", [False, True])
    @pytest.mark.parametrize("op", [lambda t: torch.hypot(t, t + 2), lambda t: t * 2, torch.relu])
    @pytest.mark.parametrize("which", [0, 1])
    def test_hooks_two_outputs_of_one_storage(
        self, engine: EagerEngine, x: Tensor, op: Callable[[Tensor], Tensor], which: int, announced: bool
    ) -> None:
        """Recomputed code reads one of them; a RECOMPUTE region may be given both and read neither."""

        def twice(t: Tensor) -> tuple[Tensor, Tensor]:
            t = op(t)
            return t, t.reshape(4, 6)

        def body(unused: Tensor, t: Tensor) -> Tensor:
            both = remat.region(twice, "twice", recompute=False)(t)
            if announced:
                remat.region(lambda one, pair: None, "nothing", recompute=True)(both[1], both)
            return F.gelu(both[which]) * both[which]

        pair = (lambda t: t.clone(), lambda t: t)
        compare(body, [x.detach(), x], options={"saved_tensors_hooks": pair}, engine=engine, calls=5)
        compare(body, [x, x], options={"saved_tensors_hooks": pair}, engine=engine, calls=5)

    def test_hooks_value_saved_and_persisted_is_unpacked_once_in_a_backward(
        self, engine: EagerEngine, x: Tensor
    ) -> None:
        """``exp`` saves its own output and replay reads it: hooks that allow one unpack, as those of torch do, work."""
        unpacked: list[int] = []

        def unpack(payload: tuple[int, Tensor]) -> Tensor:
            unpacked.append(payload[0])
            return payload[1]

        counter = itertools.count()

        def body(t: Tensor) -> Tensor:
            return torch.sin(remat.region(torch.exp, "exp", recompute=False)(torch.tanh(t)))

        call = engine.checkpoint(body, saved_tensors_hooks=(lambda t: (next(counter), t.clone()), unpack))
        expected = torch.autograd.grad(body(x).sum(), x)[0]
        for _ in range(3):
            output = call(x)
            for retain in (True, False):
                unpacked.clear()
                assert torch.equal(torch.autograd.grad(output.sum(), x, retain_graph=retain)[0], expected)
                assert len(unpacked) == len(set(unpacked)) > 0
            nested = torch.utils.checkpoint.checkpoint(engine.checkpoint(body), x, use_reentrant=False)
            assert torch.equal(torch.autograd.grad(nested.sum(), x)[0], expected)

    def test_hooks_value_saved_and_persisted_is_packed_once(self, engine: EagerEngine, x: Tensor) -> None:
        """``exp`` saves its own output and replay reads it: one offload, not two."""
        recorder = Recorder()

        def body(t: Tensor) -> Tensor:
            return torch.sin(remat.region(torch.exp, "exp", recompute=False)(torch.tanh(t)))

        call = engine.checkpoint(body, saved_tensors_hooks=recorder.pair)
        for _ in range(2):
            recorder.clear()
            engine.backward([call(x).sum()])
        compare(body, [x], options={"saved_tensors_hooks": recorder.pair}, engine=engine)
        recorder.clear()
        engine.backward([call(x).sum()])
        assert len([kind for kind in recorder.kinds() if kind != INPUT]) == 1

    @pytest.mark.parametrize("policy", ["S", "SS", "RS", "SR", "-S-"])
    def test_hooks_that_cast_are_a_loss_of_precision_only(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        """A pack that returns another object altogether (a file name, an index into a store)."""
        store: dict[int, Tensor] = {}

        def pack(t: Tensor) -> int:
            store[len(store)] = t.detach().clone()
            return len(store) - 1

        def body(t: Tensor) -> Tensor:
            t = torch.sin(t)
            for index, letter in enumerate(policy):
                t = torch.exp(t) if letter == "-" else remat.region(F.gelu, f"{index}", recompute=letter == "R")(t)
            return torch.exp(t)

        compare(body, [x], options={"saved_tensors_hooks": (pack, store.__getitem__)}, engine=engine)
