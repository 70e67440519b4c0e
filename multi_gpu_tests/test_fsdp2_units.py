"""FSDP2 units in every arrangement: gathers, reduce-scatters, lifetimes and dtypes are those without checkpointing."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from compositions import OURS, Annotated, Measured, gradients, measured
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torch_remat.testing import assert_same_bits

DIM, HIDDEN, BLOCKS = 8, 16, 3


class Block(nn.Module):
    """Two projections and no parameters of its own; the second projection may be a SAVE region."""

    def __init__(self, annotated: Annotated, name: str, inside: bool) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.annotated, self.name, self.inside = annotated, name, inside
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            return self.annotated.checkpoint(self.name, self.body)(x)
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.annotated.region(self.up, "up", save=False)(x))
        self.dtypes.append(h.dtype)
        return x + torch.tanh(self.annotated.region(self.down, "down")(h))


class Model(nn.Module):
    def __init__(self, annotated: Annotated, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(annotated, f"layers.{index}", inside) for index in range(BLOCKS))
        self.annotated, self.inside = annotated, inside

    def units(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(self, x: Tensor, after_block=lambda index, x: None) -> Tensor:
        for index, block in enumerate(self.blocks):
            call = block if self.inside else self.annotated.checkpoint(f"layers.{index}", block)
            x = call(x)
            after_block(index, x)
        return x


def build(
    run: str,
    device: torch.device,
    mesh: DeviceMesh,
    *,
    nested: bool = False,
    reshard: bool = True,
    inside: bool = True,
    precision: MixedPrecisionPolicy | None = None,
    offload: OffloadPolicy | None = None,
) -> Model:
    """Blocks are units of their own; nested ones have both projections as units in them."""
    torch.manual_seed(0)
    model = Model(Annotated(run), inside).to(device)
    options = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "mp_policy": precision or MixedPrecisionPolicy(),
        "offload_policy": offload or OffloadPolicy(),
    }
    for block in model.units():
        for unit in (block.up, block.down, block) if nested else (block,):
            fully_shard(unit, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return model


def data(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randn(4, DIM, generator=generator).to(device)


def step_of(model: Model, device: torch.device):
    def step() -> tuple[Tensor, dict[str, Tensor | None]]:
        model.zero_grad()
        loss = model(data(device)).square().mean()
        loss.backward()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "a unit is still gathered"
        return loss.detach(), gradients(model)

    return step


def fsdp2(run: str, device: torch.device, mesh: DeviceMesh, **options) -> Measured:
    model = build(run, device, mesh, **options)
    return measured(model.annotated, step_of(model, device))


@pytest.mark.parametrize(("nested", "reshard", "inside"), list(itertools.product([False, True], repeat=3)))
def test_p6_gathers_and_reduce_scatters(nested, reshard, inside, device, mesh):
    expected = fsdp2("none", device, mesh, nested=nested, reshard=reshard, inside=inside)
    units = BLOCKS * (2 if nested else 1)
    assert expected.counts() == {"all_gather": units * (2 if reshard else 1), "reduce_scatter": units}
    for run in OURS:
        got = fsdp2(run, device, mesh, nested=nested, reshard=reshard, inside=inside)
        assert_same_bits(expected.numbers, got.numbers, what=run)
        assert got.counts() == expected.counts(), run
        assert set(got.bodies.values()) == {2}
        assert got.regions == {"up": 2 * BLOCKS, "down": (1 if run == "regions" else 2) * BLOCKS}


def lifetimes(run: str, device: torch.device, mesh: DeviceMesh, **options) -> list[list[str]]:
    """Which units are gathered when backward leaves each block, last block first, in the second step."""
    model = build(run, device, mesh, **options)
    seen: list[list[str]] = []

    def after_block(index: int, x: Tensor) -> None:
        def look(grad: Tensor) -> None:
            gathered = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
            seen.append([f"leaving block {index + 1}", *gathered])

        if x.requires_grad:
            x.register_hook(look)

    for _ in range(2):
        seen.clear()
        model.zero_grad()
        model(data(device), after_block).square().mean().backward()
    return seen


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_p6_gathered_weights_live_no_longer(nested, reshard, device, mesh):
    expected = lifetimes("none", device, mesh, nested=nested, reshard=reshard)
    assert len(expected) == BLOCKS
    for run in OURS:
        got = lifetimes(run, device, mesh, nested=nested, reshard=reshard)
        for (where, *units), (there, *ours) in zip(expected, got, strict=True):
            assert where == there
            assert set(ours) <= set(units), f"{run}, {where}: {sorted(set(ours) - set(units))} still gathered"


def test_p2_a_save_region_around_a_unit_gathers_it_for_its_backward_only(device, mesh):
    """The replay does not enter the region, so the unit in it is not gathered for the replay."""
    model = build("regions", device, mesh, nested=True)
    got = measured(model.annotated, step_of(model, device))
    assert got.counts()["all_gather"] == 4 * BLOCKS
    assert got.collectives.counts("replay").get("all_gather", 0) <= BLOCKS, "for `up`, and never for `down`"
    whole = fsdp2("full", device, mesh, nested=True)
    assert whole.collectives.counts("replay").get("all_gather", 0) > got.collectives.counts("replay").get(
        "all_gather", 0
    )


@pytest.mark.parametrize("run", OURS)
@pytest.mark.parametrize("nested", [False, True])
def test_p1_mixed_precision(run, nested, device, mesh):
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = fsdp2("none", device, mesh, nested=nested, precision=precision)
    model = build(run, device, mesh, nested=nested, precision=precision)
    got = measured(model.annotated, step_of(model, device))
    assert_same_bits(expected.numbers, got.numbers)
    assert got.counts() == expected.counts()
    for block in model.units():
        assert block.dtypes == [torch.bfloat16] * 4, "the same in both passes of both steps"


@pytest.mark.parametrize("run", OURS)
def test_p1_parameters_offloaded_to_the_cpu(run, device, mesh):
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    expected = fsdp2("none", device, mesh, offload=offload)
    got = fsdp2(run, device, mesh, offload=offload)
    assert_same_bits(expected.numbers, got.numbers)
    assert got.counts() == expected.counts()


CASES = {
    "FSDP2, one unit per block": fsdp2,
    "FSDP2, nested units": lambda run, device, mesh: fsdp2(run, device, mesh, nested=True),
    "FSDP2, not resharded": lambda run, device, mesh: fsdp2(run, device, mesh, reshard=False),
}
