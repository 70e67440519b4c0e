"""P3 for readers that the dispatcher does not see: learned, or our error in replay; never garbage.

A Triton launch asks a tensor for ``data_ptr()`` from C, where no Python-level hook sees it. ``from_c`` calls a method
in the same way.
"""

from __future__ import annotations

import copy
import ctypes
import io
import itertools
import operator
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.alive import StorageTracker
from helpers.compare import compare, compare_or_refused
from helpers.engine import EagerEngine
from torch import Tensor, library
from torch.utils.flop_counter import FlopCounterMode

import torch_remat as remat
from torch_remat.errors import PlaceholderError, SavesDriftError

SIZE = 12
NUMBERS = itertools.count()


def save(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A SAVE region."""
    return remat.region(function, name, recompute=False)


def from_c(method: str) -> Callable[[Tensor], Any]:
    """Call a method from C, as a compiled launcher does."""
    return operator.methodcaller(method)


def memory(address: int) -> float:
    """The sum of the floats at ``address``: what a kernel would read."""
    return sum(ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[:SIZE])


def pickled(h: Tensor) -> float:
    """Through a pickle."""
    buffer = io.BytesIO()
    pickle.dump(h, buffer)
    buffer.seek(0)
    return float(pickle.load(buffer).sum())


# Ways to read the data of a detached tensor, to a number.
SEEN: dict[str, Callable[[Tensor], float]] = {
    "data_ptr": lambda h: memory(h.data_ptr()),
    "numpy": lambda h: float(h.numpy().sum()),
    "tolist": lambda h: sum(h.tolist()),
    "asarray": lambda h: float(np.asarray(h).sum()),
    "from_dlpack": lambda h: float(np.from_dlpack(h).sum()),
    "storage": lambda h: memory(h.untyped_storage().data_ptr()),
    "item": lambda h: h.sum().item(),
    "float": lambda h: float(h.sum()),
    "format": lambda h: float(f"{h.sum().item():.3f}"),
    "iteration": lambda h: sum(float(one) for one in h),
    "view": lambda h: memory(h.view(-1)[:SIZE].data_ptr()),
}

UNSEEN: dict[str, Callable[[Tensor], float]] = {
    "data_ptr": lambda h: memory(from_c("data_ptr")(h)),
    "data_ptr of a view": lambda h: memory(from_c("data_ptr")(h.view(3, 4))),
    "numpy": lambda h: float(from_c("numpy")(h).sum()),
    "tolist": lambda h: sum(from_c("tolist")(h)),
    "storage": lambda h: memory(from_c("untyped_storage")(h).data_ptr()),
    "compiled code": lambda h: float(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(h)).sum()),
}

OBJECTS: dict[str, Callable[[Tensor], float]] = {
    "deepcopy": lambda h: float(copy.deepcopy(h).sum()),
    "pickle": pickled,
    "share_memory_": lambda h: float(h.clone().share_memory_().sum()),
}


def leaf() -> Tensor:
    """Twelve numbers."""
    return torch.linspace(0.5, 1.5, SIZE).requires_grad_()


def body_of(read: Callable[[Tensor], float], declare: bool = False) -> Callable[[Tensor], Tensor]:
    """Recomputed code that turns a SAVE output into a number and goes on with it."""

    def body(t: Tensor) -> Tensor:
        hidden = save(lambda u: u * 3, "made")(t)
        if declare:
            remat.recompute_needs_tensor(hidden)
        return torch.sin(t * read(hidden.detach()))

    body.__code__ = body.__code__.replace(co_name=f"body_{next(NUMBERS)}")
    return body


class TwoResults(torch.autograd.Function):
    """Two results of one node."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> tuple[Tensor, Tensor]:
        return t * 2, t * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # type: ignore[override]
        return grads[0] * 2 + grads[1] * 3


class ReadsUnseen(torch.autograd.Function):
    """``sin`` by a kernel that the dispatcher does not see."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        values = torch.from_numpy(from_c("numpy")(t.detach()).copy())
        ctx.save_for_backward(values)
        return values.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0].cos()


class TestP3UnseenReaders:
    """Host reads of SAVE outputs."""

    @pytest.mark.parametrize("way", SEEN)
    def test_p3_read_that_python_sees_is_learned(self, engine: EagerEngine, way: str) -> None:
        body = body_of(SEEN[way])
        x = leaf()
        compare(body, [x], engine=engine)
        call = engine.checkpoint(body)
        for _ in range(2):
            tracker = StorageTracker()
            tracker.ignore(x)
            with tracker:
                output = call(x)
            assert tracker.alive_bytes(without=output) == SIZE * 4
            engine.backward([output.sum()])

    @pytest.mark.parametrize("way", OBJECTS)
    def test_p3_copies_of_objects_are_learned(self, engine: EagerEngine, way: str) -> None:
        compare(body_of(OBJECTS[way]), [leaf()], engine=engine)

    @pytest.mark.parametrize("way", UNSEEN)
    def test_p3_read_from_c_is_our_error_in_replay(self, engine: EagerEngine, way: str) -> None:
        """In every call, since nothing can be learned; it names the line and the way out."""
        call = engine.checkpoint(body_of(UNSEEN[way]), region_name="layers.3")
        for _ in range(3):
            output = call(leaf())
            with pytest.raises(PlaceholderError) as caught:
                engine.backward([output.sum()])
            message = str(caught.value)
            assert "recompute_needs_tensor" in message
            if way != "compiled code":  # which does not say whose memory it wanted
                assert "region layers.3::made" in message
                assert "test_p3_unseen_readers.py:" in message
            assert "layers.3" in message

    @pytest.mark.parametrize("way", UNSEEN)
    def test_p3_declared_it_works(self, engine: EagerEngine, way: str) -> None:
        compare(body_of(UNSEEN[way], declare=True), [leaf()], engine=engine)

    @pytest.mark.parametrize("way", [way for way in SEEN if way not in ("item", "float", "format", "iteration")])
    def test_p3_with_a_profiler_nothing_is_learned_and_nothing_is_garbage(self, engine: EagerEngine, way: str) -> None:
        """A profile function of the user's own stays; the read meets the placeholder's error."""
        body = body_of(SEEN[way])
        call = engine.checkpoint(body)

        def profile(frame: Any, event: str, arg: Any) -> None:
            pass

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            output = call(leaf())
            assert sys.getprofile() is profile
        finally:
            sys.setprofile(before)
        with pytest.raises(PlaceholderError, match="recompute_needs_tensor"):
            engine.backward([output.sum()])
        x = leaf()
        engine.backward([call(x).sum()])  # observed anew, and learned
        assert torch.equal(x.grad, torch.autograd.grad(body(x).sum(), x)[0])

    def test_p3_kernel_in_an_autograd_function_is_covered(self, engine: EagerEngine) -> None:
        """What C code reads inside a custom Function is found through the autograd graph."""

        class Kernel(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: Tensor) -> Tensor:
                result = torch.empty_like(t)
                source = ctypes.cast(from_c("data_ptr")(t), ctypes.POINTER(ctypes.c_float))
                target = ctypes.cast(from_c("data_ptr")(result), ctypes.POINTER(ctypes.c_float))
                for index in range(SIZE):
                    target[index] = 2 * source[index]
                ctx.save_for_backward(result)
                return result * 1

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                return grad * ctx.saved_tensors[0]

        for consumer in (Kernel.apply, remat.region(Kernel.apply, "kernel", recompute=True)):

            def body(t: Tensor, consumer: Callable[[Tensor], Tensor] = consumer) -> Tensor:
                return consumer(save(lambda u: u * 3, "made")(t))

            compare(body, [leaf()], engine=engine)

    def test_p3_kernel_that_writes_into_a_placeholder(self, engine: EagerEngine) -> None:
        """A compiled launcher that fills a SAVE output in place, unseen: our error where replay meets it."""

        def body(t: Tensor) -> Tensor:
            hidden = save(lambda u: u * 3, "made")(t)
            from_c("data_ptr")(hidden)
            return torch.sin(t) + hidden.sum()

        call = engine.checkpoint(body)
        x = leaf()
        output = call(x)
        with pytest.raises(PlaceholderError, match="recompute_needs_tensor"):
            engine.backward([output.sum()])

    def test_p3_asking_for_a_pointer_and_not_using_it(self, engine: EagerEngine) -> None:
        """Past the last thing that backward needs nobody asks."""

        def body(t: Tensor) -> Tensor:
            hidden = save(lambda u: u * 3, "made")(t)
            wave = torch.sin(t)
            return wave + memory(from_c("data_ptr")(hidden.detach()))

        compare(body, [leaf()], engine=engine)


LIBRARY = library.Library("remat_readers", "DEF")
LIBRARY.define("twice(Tensor t) -> Tensor")
LIBRARY.impl("twice", lambda t: t * 2, "CPU")

WITHOUT_RULE: dict[str, Callable[[Tensor], Tensor]] = {
    "library operation": torch.ops.remat_readers.twice,
    "to_sparse": lambda h: h.to_sparse().sum(),
    "quantize": lambda h: torch.quantize_per_tensor(h, 0.1, 0, torch.qint8).dequantize(),
    "nested": lambda h: torch.nested.nested_tensor([h[:2], h[2:]]).to_padded_tensor(0.0).sum(),
}


class TestP3Operations:
    """Operations that do not run on placeholders, or not in the same way under the observing mode."""

    @pytest.mark.filterwarnings("ignore:.*:UserWarning")
    @pytest.mark.parametrize("way", WITHOUT_RULE)
    def test_p3_operation_without_a_rule_for_placeholders(self, engine: EagerEngine, way: str) -> None:
        """Replay has to get past it, so what it reads is kept, though backward needs nothing of it."""

        def body(t: Tensor) -> Tensor:
            hidden = save(lambda u: u * 3, "made")(t)
            passing = WITHOUT_RULE[way](hidden.detach())
            return torch.sin(t * 2) + passing.sum()

        compare(body, [leaf()], engine=engine)

    def test_p3_function_that_torch_decomposes_otherwise_under_a_mode(self, engine: EagerEngine) -> None:
        """``ctc_loss`` saves other tensors in the observed call than in later ones.

        Those are on a path that was never observed, whose replay is watched by a mode: right, or refused.
        """
        lengths, targets = (torch.tensor([6]), torch.tensor([2])), torch.ones(1, 2, dtype=torch.long)

        def body(t: Tensor) -> Tensor:
            hidden = save(lambda u: u * 3, "made")(torch.sin(t))
            scores = hidden.view(6, 1, 2).repeat(1, 1, 2).log_softmax(-1)
            return F.ctc_loss(scores, targets, *lengths) * t.sum()

        compare(body, [leaf()], engine=engine, calls=1)
        compare_or_refused(body, [leaf()], engine=engine, calls=12, refused_with=(SavesDriftError,))

    def test_p3_forward_alone_under_a_mode(self, engine: EagerEngine) -> None:
        """A counter of floating-point operations around forward, none around backward."""

        def body(t: Tensor) -> Tensor:
            kinds = save(lambda u: (u * 3).long() % 4, "kinds")(t)
            return torch.sin(t[:, None] * F.one_hot(kinds, 4))

        x = leaf()
        call = engine.checkpoint(body)
        for _ in range(3):
            x.grad = None
            with FlopCounterMode(display=False):
                output = call(x)
            engine.backward([output.sum()])
            assert torch.equal(x.grad, torch.autograd.grad(body(x).sum(), x)[0])

    @pytest.mark.parametrize("which", [0, 1])
    def test_p3_function_reads_one_of_several_results_of_a_node(self, engine: EagerEngine, which: int) -> None:
        """Which result it is counts, and not only of what node."""

        def body(t: Tensor) -> Tensor:
            return ReadsUnseen.apply(save(TwoResults.apply, "r")(t.sin())[which]).cos()

        compare(body, [leaf()], engine=engine)
