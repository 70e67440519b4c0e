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


@pytest.mark.parametrize(("nested", "reshard", "inside"), list(itertools.product([False, True], repeat=3)))
def test_p6_gathered_weights_live_no_longer(nested, reshard, inside, device, mesh):
    expected = lifetimes("none", device, mesh, nested=nested, reshard=reshard, inside=inside)
    assert len(expected) == BLOCKS
    for run in OURS:
        got = lifetimes(run, device, mesh, nested=nested, reshard=reshard, inside=inside)
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


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLOAT32_OUT = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)


@pytest.mark.parametrize("precision", [BFLOAT16, FLOAT32_OUT], ids=["bfloat16", "float32 out"])
@pytest.mark.parametrize(("nested", "inside"), list(itertools.product([False, True], repeat=2)))
def test_p1_mixed_precision(nested, inside, precision, device, mesh):
    options = {"nested": nested, "inside": inside, "precision": precision}
    expected = fsdp2("none", device, mesh, **options)
    # A nested unit hands out what its own policy says, and that is what the block's body sees.
    seen = torch.float32 if nested and precision is FLOAT32_OUT else torch.bfloat16
    for run in OURS:
        model = build(run, device, mesh, **options)
        got = measured(model.annotated, step_of(model, device))
        assert_same_bits(expected.numbers, got.numbers, what=run)
        assert got.counts() == expected.counts()
        for block in model.units():
            assert block.dtypes == [seen] * 4, "the same in both passes of both steps"


@pytest.mark.parametrize("precision", [None, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("reshard", "inside"), list(itertools.product([False, True], repeat=2)))
def test_p1_parameters_offloaded_to_the_cpu(reshard, inside, precision, device, mesh):
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    options = {"reshard": reshard, "inside": inside, "precision": precision, "offload": offload}
    expected = fsdp2("none", device, mesh, **options)
    for run in OURS:
        got = fsdp2(run, device, mesh, **options)
        assert_same_bits(expected.numbers, got.numbers, what=run)
        assert got.counts() == expected.counts()


def several_backwards(model: Model, device: torch.device, how: str):
    """A step that is more than one forward and one backward."""
    if how == "prefetched":
        for one, other in itertools.pairwise(model.units()):
            assert isinstance(one, FSDPModule)
            assert isinstance(other, FSDPModule)
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])

    def step() -> tuple[Tensor, dict[str, Tensor | None]]:
        assert isinstance(model, FSDPModule)
        model.zero_grad()
        if how.startswith("accumulated"):
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(how != "accumulated, gathered meanwhile")
            model(2 * data(device)).square().mean().backward()
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_backward(True)
        loss = model(data(device)).square().mean()
        if how == "two forwards":
            loss = loss + model(3 * data(device)).square().mean()
        if how == "the same graph twice":
            loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach(), gradients(model)

    return step


WAYS = ("accumulated", "accumulated, gathered meanwhile", "prefetched", "two forwards", "the same graph twice")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_p6_steps_of_several_forwards_and_backwards(how, inside, device, mesh):
    def run_of(run: str) -> Measured:
        model = build(run, device, mesh, nested=True, inside=inside)
        return measured(model.annotated, several_backwards(model, device, how))

    expected = run_of("none")
    for run in OURS:
        got = run_of(run)
        assert_same_bits(expected.numbers, got.numbers, what=run)
        assert got.counts() == expected.counts(), run


CASES = {
    "FSDP2, one unit per block": fsdp2,
    "FSDP2, nested units": lambda run, device, mesh: fsdp2(run, device, mesh, nested=True),
    "FSDP2, not resharded": lambda run, device, mesh: fsdp2(run, device, mesh, reshard=False),
}
