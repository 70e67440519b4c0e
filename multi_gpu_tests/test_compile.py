"""Compiled blocks with checkpoints in them under FSDP2 and tensor parallelism: numbers as without checkpointing."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import library, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_remat as remat

DIM, HIDDEN, BLOCKS, BATCH = 16, 48, 3, 4
RUNS: Counter[str] = Counter()

# Dynamo looks at gradients of tensors that have none to look at, and warns of itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]


@library.custom_op("remat_examples::counted_gelu", mutates_args=())
def counted_gelu(x: torch.Tensor, name: str) -> torch.Tensor:
    """GELU that counts its runs by name."""
    RUNS[name] += 1
    return torch.nn.functional.gelu(x)


@counted_gelu.register_fake
def _(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return torch.ops.aten.gelu_backward(grad, x), None


counted_gelu.register_autograd(_backward, setup_context=_setup)


class Block(nn.Module):
    """Norm, projection up, activation in a region, projection down, residual."""

    def __init__(self, run: str, tensor_parallel: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.run, self.tensor_parallel = run, tensor_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) if self.run == "plain" else remat.checkpoint(region_name="block")(self.body)(x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        widen = remat.region(self.widen, "widen", recompute=False) if self.run == "regions" else self.widen
        return x + self.down(torch.nn.functional.silu(widen(self.norm(x))))

    def widen(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        # A DTensor has no rule for the counting operator; there the matrix product alone is the region.
        return torch.nn.functional.gelu(wide) if self.tensor_parallel else counted_gelu(wide, self.run)


def build(run: str, device: torch.device, mesh: DeviceMesh, parallel: str, how: str | None) -> nn.Sequential:
    """The model; the same weights for every `run` and rank."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [Block(run, parallel == "tp") for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks, nn.Linear(DIM, DIM)).to(device)
    if parallel == "tp":
        for block in blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if how is not None:
        for block in blocks:
            block.compile(backend="aot_eager", fullgraph=how == "fullgraph")
    if parallel == "fsdp":
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return model


def train(model: nn.Module, device: torch.device, parallel: str) -> list[torch.Tensor]:
    """Outputs and local gradients of three steps; under FSDP every rank has data of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 + (dist.get_rank() if parallel == "fsdp" else 0))
    results = []
    for _ in range(3):
        output = model(torch.randn(BATCH, DIM, generator=generator).to(device))
        output.square().mean().backward()
        results.append(output.detach().clone())
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            results.append((gradient.to_local() if isinstance(gradient, DTensor) else gradient).clone())
        optimizer.step()
        optimizer.zero_grad()
    return results


@pytest.mark.parametrize("how", ["fullgraph", ""])
@pytest.mark.parametrize("run", ["full", "regions"])
@pytest.mark.parametrize("parallel", ["fsdp", "tp"])
def test_p1_outputs_and_gradients_are_those_without_checkpointing(parallel, run, how, device, mesh):
    expected = train(build("plain", device, mesh, parallel, None), device, parallel)
    got = train(build(run, device, mesh, parallel, how), device, parallel)
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        torch.testing.assert_close(other, one, msg=lambda text, index=index: f"result {index}: {text}")


@pytest.mark.parametrize("run", ["full", "regions"])
def test_p2_save_bodies_run_once(run, device, mesh):
    model = build(run, device, mesh, "fsdp", "fullgraph")
    RUNS.clear()
    train(model, device, "fsdp")
    assert RUNS[run] == BLOCKS * 3 * (1 if run == "regions" else 2)


@pytest.mark.parametrize("parallel", ["fsdp", "tp"])
@pytest.mark.parametrize("run", ["full", "regions"])
def test_p3_graphs_of_each_rank_keep_what_the_policy_says(parallel, run, device, mesh):
    """Read off the partitioned graphs: the projection of the SAVE region is kept, its share of it under TP."""
    model = build(run, device, mesh, parallel, "fullgraph")
    x = torch.randn(BATCH, DIM, device=device)
    found = remat.explain(model, x)
    assert [one.name for one in found.checkpoints] == ["block"] * BLOCKS
    again = {"addmm", "mm", "gelu", "counted_gelu"}  # the way down needs them all
    for one in found.checkpoints:
        rebuilt = {row.what for region in (*one.regions, one.bare) for row in region.rebuilt}
        if run == "full":
            assert one.regions == ()
            assert len(again & rebuilt) >= 1
            continue
        (widen,) = one.regions
        assert (widen.name, widen.policy) == ("widen", "save")
        assert not again & {row.what for row in widen.rebuilt}
        shapes = {row.shape for row in widen.kept if row.bytes}
        assert shapes == {(BATCH, HIDDEN // mesh.size() if parallel == "tp" else HIDDEN)}
