"""The helpers of ``torch_remat.testing`` count what there is to count, and fail where bits differ."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_remat as remat
from torch_remat.errors import InvalidTypeError
from torch_remat.testing import (
    CountCollectives,
    CountRuns,
    KeptBytes,
    assert_same_bits,
    assert_same_gradients,
    differences,
    phase,
)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone: collectives are issued all the same."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# The older name warns that it is the older name.
all_gather_single = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


class AllReduce(torch.autograd.Function):
    """A collective in forward and one in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.sin()
        dist.all_reduce(y)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        grad = grad * x.cos()
        dist.all_reduce(grad)
        return grad


def test_collectives_are_counted_by_kind_and_phase(group, x):
    def body(t: Tensor) -> Tensor:
        return torch.exp(AllReduce.apply(torch.tanh(t)))

    call = remat.checkpoint(region_name="block")(body)
    for _ in range(2):
        with CountCollectives() as collectives:
            call(x).sum().backward()
        assert collectives.counts() == {"all_reduce": 3}
        assert {one: collectives.count("all_reduce", one) for one in ("forward", "replay", "backward")} == {
            "forward": 1,
            "replay": 1,
            "backward": 1,
        }
        assert [call.phase for call in collectives.calls] == ["forward", "replay", "backward"]
    saved = remat.checkpoint(region_name="block")(
        lambda t: torch.exp(remat.region(AllReduce.apply, "reduce", recompute=False)(torch.tanh(t)))
    )
    with CountCollectives() as collectives:
        saved(x).sum().backward()
    assert collectives.counts("replay") == {}
    assert collectives.count() == 2


def test_every_way_to_issue_a_collective_is_seen(group):
    mesh = init_device_mesh("cpu", (1,))
    tensor = torch.ones(4)
    with CountCollectives() as collectives:
        dist.all_gather_into_tensor(torch.empty(4), tensor)
        dist.all_gather([torch.empty(4)], tensor)
        dist.reduce_scatter_tensor(torch.empty(4), tensor)
        dist.all_to_all_single(torch.empty(4), tensor)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.gather(tensor, [torch.empty(4)])
        dist.scatter(tensor, [torch.ones(4)])
        dist.barrier()
    assert collectives.kinds() == [
        "all_gather",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "barrier",
    ]
    assert collectives.waits() == 0
    with CountCollectives() as collectives:
        gathered = all_gather_single(tensor, 0, mesh)
        summed = functional.all_reduce(tensor, "sum", mesh)
        assert collectives.waits() == 0
        (gathered + summed).sum()
    assert collectives.counts() == {"all_gather": 1, "all_reduce": 1}
    assert collectives.waits("forward") == 2
    with CountCollectives() as collectives:
        DTensor.from_local(tensor, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local().sum()
    assert collectives.count("all_gather") <= 1  # a mesh of one needs none
    assert set(collectives.counts()) <= {"all_gather"}


def test_runs_are_counted_by_phase(x):
    runs = CountRuns()

    def body(t: Tensor) -> Tensor:
        kept = remat.region(runs.watch(torch.tanh, "kept"), "kept", recompute=False)(t.sin())
        return torch.exp(remat.region(runs.watch(torch.exp, "made"), "made", recompute=True)(kept))

    call = remat.checkpoint(region_name="block")(runs.watch(body, "body"))
    for _ in range(2):
        runs.calls.clear()
        call(x).sum().backward()
        for name, replays in (("body", 1), ("kept", 0), ("made", 1)):
            assert runs.count(name, "forward") == 1
            assert runs.count(name, "replay") == replays
            assert runs.count(name) == 1 + replays
            assert runs.count(name, "backward") == 0


def test_runs_of_modules_are_counted_by_path(x):
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6))).double()
    call = remat.checkpoint(region_name="block")(lambda t: torch.exp(model(t)))
    runs = CountRuns()
    with runs.modules(model):
        call(x).sum().backward()
    assert {path: runs.count(path) for path, _ in model.named_modules()} == dict.fromkeys(
        ["", "0", "1", "1.0", "1.1"], 2
    )
    call(x)
    assert runs.count("0") == 2, "hooks are gone after the block"


def test_the_phase_is_that_of_the_code_asking(x):
    phases: list[str] = []

    def body(t: Tensor) -> Tensor:
        phases.append(phase())
        return torch.exp(t)

    y = remat.checkpoint(region_name="block")(body)(torch.sin(x))
    x.register_hook(lambda grad: phases.append(phase()))
    y.sum().backward()
    assert phases == ["forward", "replay", "backward"]
    assert phase() == "forward"


def test_kept_bytes_of_a_step_whose_replay_meets_placeholders(x):
    def body(t: Tensor) -> Tensor:
        return remat.region(lambda u: u * 2, "double", recompute=False)(t) + torch.exp(torch.sin(t))

    with KeptBytes() as kept:
        remat.checkpoint()(body)(x * 1).sum().backward()
    assert kept.bytes() == x.numel() * x.element_size()  # the gradient


def test_kept_bytes_are_those_of_the_storages_alive(x):
    def body(t: Tensor) -> Tensor:
        return torch.exp(torch.tanh(torch.sin(t)))

    with KeptBytes() as kept:
        y = body(x)
    one = x.numel() * x.element_size()
    assert kept.bytes(without=y) == one  # tanh's output; exp saves its own, sin the leaf
    assert kept.sizes() == [one, one]
    y.sum().backward()
    del y
    assert kept.bytes() == 0
    with KeptBytes() as kept:
        y = remat.checkpoint(region_name="block")(body)(x)
    assert kept.sizes(without=y) == []
    with KeptBytes() as kept:
        made = torch.ones(8)
        view = made[2:]
        made.untyped_storage().resize_(16)
        x.add(0)
    assert kept.sizes() == [16]  # once, at its present size
    assert kept.sizes(without={"any": [view]}) == []


def test_equal_bits_pass_and_others_are_named():
    nan = torch.tensor([1.0, float("nan"), -0.0])
    assert_same_bits({"a": nan, "b": (1, None)}, {"a": nan.clone(), "b": (1, None)})
    assert_same_bits(torch.empty(0), torch.empty(0))
    assert_same_bits(torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3, dtype=torch.complex64).conj())
    for left, right, pattern in [
        (torch.tensor([0.0]), torch.tensor([-0.0]), r"differs by up to 0\.0"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), r"expected float32\[2\] on cpu, got float64\[2\]"),
        (torch.ones(2), torch.ones(3), r"expected float32\[2\] on cpu, got float32\[3\]"),
        (torch.ones(2), None, "expected tensor"),
        ({"x": [1, 2]}, {"x": [1, 3]}, r"\['x'\]\[1\]: expected 2, got 3"),
        ([1], [1, 2], "other structure"),
        (torch.tensor([True]), torch.tensor([False]), r"up to 1\.0"),
        (torch.tensor([1j]), torch.tensor([2j]), r"up to 1\.0"),
    ]:
        with pytest.raises(AssertionError, match=pattern):
            assert_same_bits(left, right, what="loss")


def test_a_tolerance_is_absolute():
    left, right = torch.tensor([1.0], dtype=torch.float64), torch.tensor([1.0 + 1e-13], dtype=torch.float64)
    assert differences(left, right)
    assert not differences(left, right, atol=1e-12)
    assert differences(left, right, atol=1e-14)
    assert differences(left, torch.tensor([float("nan")], dtype=torch.float64), atol=1.0)


def test_gradients_are_compared_by_name(x):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    twin = copy.deepcopy(model)
    with pytest.raises(AssertionError, match="call backward on both models first"):
        assert_same_gradients(model, twin)
    model(x).exp().sum().backward()
    remat.checkpoint(region_name="block")(twin)(x).exp().sum().backward()
    assert_same_gradients(model, twin)
    assert twin[2].bias.grad is not None
    twin[2].bias.grad[1] += 0.5
    twin[0].weight.grad = None
    with pytest.raises(AssertionError, match="gradients: ") as caught:
        assert_same_gradients(model, twin)
    assert "['2.bias']" in str(caught.value)
    assert "['0.weight']" in str(caught.value)
    assert "['0.bias']" not in str(caught.value)
    with pytest.raises(InvalidTypeError, match=r"expected a torch\.nn\.Module, got int"):
        assert_same_gradients(model, 3)  # type: ignore[arg-type]
