"""Memory reports add up and are right at every phase of a step, for every kind of tensor, and leave nothing behind."""

import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import gc_off, live_tensors
from helpers.events import Hidden
from helpers.functions import Keeps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_remat as remat


@st.composite
def views(draw: st.DrawFn) -> list[list[Tensor]]:
    """Several lists of tensors on a few storages, overlapping at will."""
    dtypes = (torch.float32, torch.uint8, torch.int64)
    storages = [torch.zeros(draw(st.integers(1, 40)), dtype=dtype) for dtype in dtypes]
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        group = []
        for _ in range(draw(st.integers(1, 5))):
            base = draw(st.sampled_from(storages))
            start = draw(st.integers(0, base.numel() - 1))
            rows = draw(st.integers(1, 4))
            stride = draw(st.integers(0, 7))
            columns = draw(st.integers(1, 4))
            last = start + (rows - 1) * stride + columns - 1
            if last < base.numel():
                group.append(base.as_strided((rows, columns), (stride, 1), start))
        groups.append(group)
    return groups


def used_bytes(tensors: list[Tensor]) -> int:
    """Bytes of their one storage that ``tensors`` address, counted the slow way."""
    touched = set()
    for tensor in tensors:
        for index in torch.cartesian_prod(*(torch.arange(size) for size in tensor.shape)).reshape(-1, tensor.dim()):
            at = tensor.storage_offset() + sum(
                int(i) * stride for i, stride in zip(index, tensor.stride(), strict=True)
            )
            touched.update(range(at * tensor.element_size(), (at + 1) * tensor.element_size()))
    return len(touched)


@settings(max_examples=40, deadline=None)
@given(views())
def test_rows_add_up_whatever_is_shared(groups: list[list[Tensor]]):
    x = torch.zeros(2, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        for index, group in enumerate(groups):
            x = remat.region(Keeps.apply, f"r{index}", recompute=False)(x, group)
        return x

    y = remat.checkpoint(region_name="b")(body)(x)
    report = remat.saved_tensors_report(y)
    everything = [tensor for group in groups for tensor in group]
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in everything:
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    assert report.region_bytes == sum(tensors[0].untyped_storage().nbytes() for tensors in by_storage.values())
    assert report.bytes == report.region_bytes + report.outside_bytes
    assert report.outside_bytes == 0
    for checkpoint in report.checkpoints:
        assert checkpoint.bytes == sum(region.bytes for region in checkpoint.regions)
        assert checkpoint.storages == sum(len(region.rows) for region in checkpoint.regions)
        for region in checkpoint.regions:
            assert region.bytes == sum(row.bytes for row in region.rows)
    if len(groups) == 1:  # then every value is in one region, and what they use is known
        regions = [region for checkpoint in report.checkpoints for region in checkpoint.regions]
        rows = {(row.bytes, row.dtype): row.used_bytes for region in regions for row in region.rows}
        expected = {
            (tensors[0].untyped_storage().nbytes(), str(tensors[0].dtype).removeprefix("torch.")): used_bytes(tensors)
            for tensors in by_storage.values()
        }
        assert rows == expected


class Block(torch.nn.Module):
    """RMSNorm, attention and SwiGLU, with five SAVE regions."""

    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.wq, self.wk, self.wv, self.wo = (torch.nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = (torch.nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        save = lambda function, name: remat.region(function, name, recompute=False)
        batch, length, _ = x.shape
        h = F.rms_norm(x, [self.dim])
        q, k, v = (w(h).view(batch, length, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        a = save(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), "core")(q, k, v)
        x = x + save(self.wo, "wo")(a.transpose(1, 2).reshape(batch, length, -1))
        h = F.rms_norm(x, [self.dim])
        return x + save(self.w2, "w2")(F.silu(save(self.w1, "w1")(h)) * save(self.w3, "w3")(h))


def llama(layers: int = 4) -> tuple[torch.nn.ModuleList, Tensor]:
    return torch.nn.ModuleList(Block(16, 48, 2) for _ in range(layers)), torch.randn(2, 8, 16)


def run(blocks: torch.nn.ModuleList, x: Tensor) -> Tensor:
    for index, block in enumerate(blocks):
        x = remat.checkpoint(region_name=f"layers.{index}")(block)(x)
    return x


def test_totals_of_a_step_are_those_of_the_allocator():
    """What four layers keep, as torch's profiler counts allocations, is what the report says: to the byte."""
    blocks, data = llama()
    embed = torch.nn.Linear(16, 16, bias=False)
    run(blocks, embed(data)).sum().backward()  # observed, gradients allocated
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        y = run(blocks, embed(data))
    grown = sum(event.self_cpu_memory_usage for event in profile.events())
    report = remat.saved_tensors_report(y)
    output = y.untyped_storage().nbytes()
    assert grown == report.bytes - data.nbytes + report.input_bytes + output
    assert report.rebuilt_bytes == 0
    tokens = 2 * 8
    per_layer = 4 * tokens * (16 + 16 + 2 * 48) + 4 * tokens * 2  # core, wo, w1, w3; log-sum-exp of two heads
    assert report.region_bytes == 4 * per_layer
    assert report.input_bytes == 4 * 4 * tokens * 16
    y.sum().backward()
    assert remat.saved_tensors_report(y).bytes == 0


def test_reports_at_every_phase_of_a_step():
    blocks, data = llama(2)
    embed = torch.nn.Linear(16, 16, bias=False)
    phases: dict[str, Any] = {}
    log = Hidden(reports=phases)

    def note(name: str, roots: Any = None) -> None:
        log["reports"].setdefault(name, remat.saved_tensors_report(roots))
        remat.format_saved_tensors_report(roots)

    class Spy(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if remat.is_recomputing():
                note("replay")
                assert remat.current_memory_report().name == "layers.0"
            return x * 1

    first = torch.nn.Sequential(blocks[0], Spy())
    blocks[0].w1.weight.register_hook(lambda grad: note("mid-backward"))
    for _ in range(2):
        phases.clear()
        note("before")
        x = embed(data)
        y = remat.checkpoint(region_name="layers.0")(lambda t: torch.exp(first(t)))(x)
        y = remat.checkpoint(region_name="layers.1")(blocks[1])(y)
        note("after forward", y)
        y.sum().backward(retain_graph=True)
        note("after a backward that retains the graph", y)
        y.sum().backward()
        note("after backward", y)
        del x, y
        note("after all")
    kept = phases["after forward"]
    assert len(kept.checkpoints) == 2
    assert kept.bytes > 0
    assert phases["after a backward that retains the graph"].bytes == kept.bytes
    assert phases["replay"].region_bytes <= kept.region_bytes
    assert phases["mid-backward"].rebuilt_bytes > 0
    for name in ("before", "after backward", "after all"):
        assert phases[name].bytes == phases[name].input_bytes == phases[name].rebuilt_bytes == 0, name


def test_a_report_in_the_middle_of_a_backward_without_retain_graph():
    blocks, data = llama(3)
    texts: list[str] = []
    blocks[1].wo.weight.register_hook(lambda grad: texts.append(remat.format_saved_tensors_report()))
    run(blocks, data.requires_grad_()).sum().backward()
    (text,) = texts
    assert "layers.0: " in text
    assert "layers.2" not in text, "layer 2 has run its backward"


def test_released_graphs_and_custom_functions_do_not_raise():
    x = torch.zeros(2, requires_grad=True)
    y = remat.checkpoint(region_name="b")(lambda t: torch.exp(Keeps.apply(t, [torch.ones(3)])))(x)
    z = Keeps.apply(y, [torch.ones(5)])
    assert remat.saved_tensors_report(z).outside_bytes == 20
    z.sum().backward()
    assert remat.saved_tensors_report([y, z]).bytes == 0


def test_dtensor_counts_its_local_bytes():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = DTensor.from_local(torch.zeros(4, 6), mesh, [Replicate()]).requires_grad_()
        y = remat.checkpoint(region_name="b")(lambda t: remat.region(torch.exp, "e", recompute=False)(t))(x)
        report = remat.saved_tensors_report(y)
        assert report.region_bytes == 96
        assert "  96 B  saved.0  (4, 6)  float32" in report.format().splitlines()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("make", ["nested", "sparse"])
def test_odd_tensors_are_counted(make: str):
    if make == "nested":
        kept = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
        size = 6 * 3 * 4
    else:
        kept = torch.eye(3).to_sparse()
        size = 3 * 4
    y = remat.checkpoint(region_name="b")(lambda t: remat.region(Keeps.apply, "k", recompute=False)(t, [kept]))(
        torch.zeros(2, requires_grad=True)
    )
    rows = {row.name: row.bytes for row in remat.saved_tensors_report(y).checkpoints[0].regions[0].rows}
    assert rows["t0.values"] == size


def test_a_report_from_another_thread_and_a_forward_in_another_thread():
    x = torch.zeros(3, requires_grad=True)
    made: list[Any] = []

    def work() -> None:
        made.append(remat.checkpoint(region_name="t")(lambda t: remat.region(torch.exp, "e", recompute=False)(t))(x))
        made.append(remat.saved_tensors_report(made[0]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert made[1].region_bytes == remat.saved_tensors_report(made[0]).region_bytes == 12


def test_graphs_held_by_a_gradient_edge_alone_are_found():
    x = torch.zeros(3, requires_grad=True)
    y = remat.checkpoint(region_name="b")(lambda t: remat.region(torch.exp, "e", recompute=False)(t))(x)
    edge = torch.autograd.graph.get_gradient_edge(y)
    del y
    assert remat.saved_tensors_report().region_bytes == 12
    del edge
    assert remat.saved_tensors_report().region_bytes == 0


def test_roots_are_the_living_tensors_with_a_grad_fn():
    before = remat.discover_autograd_roots()
    x = torch.zeros(3, requires_grad=True)
    y = x * 2
    found = [root for root in remat.discover_autograd_roots() if not any(root is one for one in before)]
    assert len(found) == 1
    assert found[0] is y


def test_a_report_holds_no_tensor_and_makes_no_garbage():
    x = torch.zeros(3, requires_grad=True)

    def once() -> Any:
        y = remat.checkpoint(region_name="b")(
            lambda t: torch.exp(remat.region(Keeps.apply, "k", recompute=False)(torch.sin(t), [torch.ones(4)]))
        )(x)
        return remat.saved_tensors_report(y), remat.format_saved_tensors_report(y)

    once()
    with gc_off():
        before = live_tensors()
        kept = [once() for _ in range(3)]
        assert live_tensors() == before
        assert gc.collect() == 0 or live_tensors() == before
    assert kept[0][0].region_bytes == kept[2][0].region_bytes


def test_errors_name_a_save_as_reports_do():
    first = torch.ones(3)

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            remat.save_for_backward(ctx, {"lse": first, "none": None, "probs": x.detach() * 2})
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            _ = ctx.saved_tensors
            return grad

    def body(x: Tensor) -> Tensor:
        return torch.exp(remat.region(Two.apply, "softmax", recompute=False)(torch.sin(x)))

    y = remat.checkpoint(region_name="b")(body)(torch.zeros(3, requires_grad=True))
    (row, *_) = remat.saved_tensors_report(y).checkpoints[0].regions[0].rows
    assert row.name == "lse"
    first.mul_(2)
    with pytest.raises(RuntimeError, match=r"Saved tensor lse for b::softmax was modified in-place"):
        y.sum().backward()


def test_errors_count_unnamed_saves_as_reports_do():
    late = torch.ones(3)

    def body(x: Tensor) -> Tensor:
        return torch.exp(remat.region(lambda t: torch.cos(t) * late, "r", recompute=False)(torch.sin(x)))

    y = remat.checkpoint(region_name="b")(body)(torch.zeros(3, requires_grad=True))
    rows = remat.saved_tensors_report(y).checkpoints[0].regions[0].rows
    assert rows[0].name == "saved.1", "saved.0 is rebuilt"
    late.mul_(2)
    with pytest.raises(RuntimeError, match=r"Saved tensor saved\.1 for b::r was modified in-place"):
        y.sum().backward()
