"""Memory reports among modes, subclasses, threads and hook pairs of other people: right, and unseen by them."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from helpers.functions import Keeps
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import torch_remat as remat
from torch_remat.diagnostics import graph


def keeping(*tensors: Tensor) -> Tensor:
    """The output of a checkpoint with one region that keeps ``tensors``."""
    x = torch.zeros(2, requires_grad=True)
    return remat.checkpoint(region_name="b")(
        lambda t: remat.region(Keeps.apply, "k", recompute=False)(t, list(tensors))
    )(x)


def rows_of(output: Tensor, **options: Any) -> dict[str, int]:
    """Bytes of the only region by row."""
    (checkpoint,) = remat.saved_tensors_report(output, **options).checkpoints
    return {row.name: row.bytes for row in checkpoint.regions[0].rows}


class Wrapper(Tensor):
    """A wrapper subclass that does not say what it is made of."""

    def __new__(cls, inner: Tensor) -> "Wrapper":
        return Tensor._make_wrapper_subclass(cls, (1000,), dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self._inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda one: one._inner if isinstance(one, Wrapper) else one
        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


class Odd(Tensor):
    """A subclass that has made something else of ``grad_fn``."""

    @property
    def grad_fn(self) -> Any:
        raise TypeError("mine")


class RefusesDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"seen: {func}")


class RefusesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"seen: {func}")


@contextmanager
def pushed(*modes: Any) -> Iterator[None]:
    for mode in modes:
        mode.__enter__()
    try:
        yield
    finally:
        for mode in reversed(modes):
            mode.__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*beta state.*:UserWarning")
class TestTensors:
    def test_strided_nested_tensors_count_their_buffer(self):
        nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])
        y = keeping(nested)
        assert rows_of(y) == {"t0.values": 6 * 3 * 4}
        assert remat.saved_tensors_report(Keeps.apply(y.detach().requires_grad_(), [nested * 1])).outside_bytes == 72

    def test_a_wrapper_that_does_not_flatten_counts_what_it_holds(self):
        assert rows_of(keeping(Wrapper(torch.zeros(3)))) == {"t0.inner": 12}

    def test_a_plain_subclass_is_a_tensor(self):
        assert rows_of(keeping(torch.zeros(3).as_subclass(type("Sub", (Tensor,), {})))) == {"t0": 12}

    def test_a_subclass_with_another_grad_fn_does_no_harm(self):
        odd = torch.zeros(3).as_subclass(Odd)
        assert rows_of(keeping(odd)) == {"t0": 12}
        assert isinstance(remat.discover_autograd_roots(), list)

    @pytest.mark.parametrize(
        "modes",
        [
            pytest.param(lambda: [RefusesDispatch()], id="dispatch mode"),
            pytest.param(lambda: [RefusesFunctions()], id="function mode"),
            pytest.param(lambda: [FakeTensorMode()], id="fake tensor mode"),
            pytest.param(lambda: [RefusesDispatch(), RefusesFunctions()], id="both"),
            pytest.param(lambda: [torch.device("meta")], id="default device"),
        ],
    )
    def test_no_mode_of_the_users_sees_a_report(self, modes: Callable[[], list[Any]]):
        eye = torch.eye(3)
        wide = torch.zeros(4, 6)
        y = keeping(eye.to_sparse(), eye.to_sparse_csr(), wide[1:], wide.t(), Wrapper(torch.zeros(3)), eye.conj())
        expected = remat.format_saved_tensors_report(y)
        roots = len(remat.discover_autograd_roots())
        with pushed(*modes()):
            text = remat.format_saved_tensors_report(y)
            found = len(remat.discover_autograd_roots())
        assert text == expected
        assert found == roots

    def test_the_body_of_a_checkpoint_may_be_under_a_mode(self):
        texts: list[str] = []

        class Passes(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                assert "values" not in str(func), "a report's own operation"
                return func(*args, **(kwargs or {}))

        def body(x: Tensor) -> Tensor:
            y = remat.region(Keeps.apply, "k", recompute=False)(x, [sparse])
            texts.append(remat.format_current_memory_report())
            return y

        sparse = torch.eye(3).to_sparse()
        with Passes():
            remat.checkpoint(region_name="b")(body)(torch.zeros(2, requires_grad=True))
        assert "  12 B  t0.values   (3,)    float32" in texts[0].splitlines()

    def test_an_annotator_runs_under_the_users_modes_and_gets_the_outer_tensor(self):
        from torch.testing._internal.two_tensor import TwoTensor

        seen: list[str] = []

        class Notes(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func.__name__)
                return func(*args, **(kwargs or {}))

        y = keeping(TwoTensor(torch.ones(3), torch.ones(3)))
        with Notes():
            (checkpoint,) = remat.saved_tensors_report(
                y, annotate=lambda t: f"{type(t).__name__} {t.sum().a.item():g}"
            ).checkpoints
        assert [row.annotation for row in checkpoint.regions[0].rows] == ["TwoTensor 3"] * 2
        assert "sum" in seen


class TestBilling:
    def test_a_region_comes_before_the_inputs_of_another_checkpoint(self):
        """What 0.2 reports, too, is the same whatever stands behind it."""
        h = torch.zeros(5, requires_grad=True) * 1
        first = remat.checkpoint(region_name="a")(lambda t: torch.sin(torch.sin(t)))(h)
        second = remat.checkpoint(region_name="b")(lambda t: remat.region(Keeps.apply, "k", recompute=False)(t, [h]))(h)
        report = remat.saved_tensors_report([first, second])
        assert [one.name for one in report.checkpoints] == ["b"], "nothing is left that a holds alone"
        (region,) = report.checkpoints[0].regions
        assert (region.bytes, region.billed_elsewhere) == (20, ())
        assert (report.region_bytes, report.input_bytes) == (20, 0)

    def test_what_is_outside_comes_before_the_inputs_of_checkpoints(self):
        h = torch.exp(torch.zeros(5, requires_grad=True))  # saved by exp, and an input
        y = remat.checkpoint(region_name="a")(lambda t: torch.sin(torch.sin(t)))(h)
        report = remat.saved_tensors_report(y)
        assert (report.outside_bytes, report.input_bytes) == (20, 0)
        assert remat.saved_tensors_report().input_bytes == 20, "nobody else is billed for it"

    @pytest.mark.parametrize("pack", [lambda t: t, lambda t: t.detach().clone(), lambda t: ("cpu", [t.detach()])])
    def test_packed_tensors_count_once_whatever_shares_them(self, pack: Callable[[Tensor], Any]):
        def body(x: Tensor) -> Tensor:
            return torch.exp(torch.sin(remat.region(torch.exp, "e", recompute=False)(torch.sin(x))))

        unpack = lambda payload: payload[1][0] if isinstance(payload, tuple) else payload
        x = torch.zeros(5, requires_grad=True) * 1
        for _ in range(2):
            with remat.saved_tensors_hooks(pack, unpack):
                one, two = (remat.checkpoint(region_name="b")(body)(x) for _ in range(2))
        report = remat.saved_tensors_report()
        assert [one.packed.tensors for one in report.checkpoints] == [2, 2], "exp's save is its output: packed once"
        total = dict(report.packed.bytes_by_device)["cpu"]
        copies = type(pack(x)) is Tensor and pack(x) is not x
        assert total == 20 * (4 if copies else 3), "the input is one storage, unless it was copied twice"
        del one, two


class TestOtherThreads:
    def test_nobody_runs_while_all_objects_are_held(self):
        """Tuples that another thread is making are among the objects: it fails if it completes one that we hold."""
        sentinel = tuple([[]])  # noqa: C409 - a tuple that the garbage collector knows
        counts: set[int] = set()
        known = gc.is_tracked(sentinel)

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            frame.f_trace_opcodes = True
            counts.add(sys.getrefcount(sentinel))
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            roots = graph.discover_autograd_roots()
            live = graph.find_live()
        finally:
            sys.settrace(before)
        assert known
        assert roots is not None
        assert live is not None
        assert len(counts) == 1, "somebody could have run while it was held"

    def test_looking_at_all_objects_leaves_nothing(self):
        def once() -> None:
            graph.find_live()
            remat.discover_autograd_roots()

        once()
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            for _ in range(5):
                once()
            assert len(gc.get_objects()) <= before + 10
        finally:
            gc.enable()
