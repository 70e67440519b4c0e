"""Context parallel (ring, all-gather) and expert parallel: a SAVE exchange is not replayed, a drifting router
harmless."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from compositions import OURS, Annotated, Measured, gradients, measured
from torch import Tensor, nn

import torch_remat as remat
from torch_remat.testing import assert_same_bits

DIM, SEQ, TOKENS = 8, 6, 11


def data(device: torch.device, count: int) -> Tensor:
    """This rank's part of the sequence, or its tokens."""
    generator = torch.Generator().manual_seed(20 + dist.get_rank())
    return torch.randn(count, DIM, generator=generator, dtype=torch.float64).to(device)


# --- Context parallel


class AllGather(torch.autograd.Function):
    """All parts of the sequence; their gradients are summed and scattered."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        whole = part.new_empty(part.shape[0] * dist.get_world_size(), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous())
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        part = grad.new_empty(grad.shape[0] // dist.get_world_size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(part, grad.contiguous())
        return part


def passed_on(tensor: Tensor) -> Tensor:
    """Send to the next rank, receive from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


class Ring(torch.autograd.Function):
    """The same as :class:`AllGather`, from neighbour to neighbour."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parts: list[Any] = [None] * ranks
        parts[rank] = part
        for step in range(1, ranks):
            part = passed_on(part)
            parts[(rank - step) % ranks] = part
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parts = grad.chunk(ranks)
        total = parts[(rank - 1) % ranks]
        for step in range(1, ranks):
            total = passed_on(total) + parts[(rank - 1 - step) % ranks]
        return total


class Attention(nn.Module):
    """Queries stay, keys and values travel."""

    def __init__(self, annotated: Annotated, exchange: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM, dtype=torch.float64)
        self.qkv = nn.Linear(DIM, 3 * DIM, dtype=torch.float64)
        self.out = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.annotated, self.exchange = annotated, exchange

    def forward(self, x: Tensor) -> Tensor:
        return self.annotated.checkpoint("layers.0", self.body)(x)

    def body(self, x: Tensor) -> Tensor:
        q, kv = self.qkv(self.norm(x)).split([DIM, 2 * DIM], -1)
        k, v = self.annotated.region(self.exchange, "exchange")(kv).chunk(2, -1)
        scores = torch.softmax(q @ k.T / DIM**0.5, -1)
        return x + torch.tanh(self.out(scores @ v))


def context_parallel(run: str, device: torch.device, exchange: Any) -> Measured:
    torch.manual_seed(0)
    annotated = Annotated(run)
    model = Attention(annotated, exchange).to(device)

    def step() -> tuple[Tensor, dict[str, Tensor | None], Tensor | None]:
        model.zero_grad()
        x = data(device, SEQ).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        return y.detach(), gradients(model), x.grad

    return measured(annotated, step)


@pytest.mark.parametrize(("exchange", "kinds"), [(AllGather.apply, ("all_gather",)), (Ring.apply, ("send", "recv"))])
def test_p2_a_saved_exchange_is_not_replayed(exchange, kinds, device):
    none = context_parallel("none", device, exchange)
    for run in OURS:
        got = context_parallel(run, device, exchange)
        assert_same_bits(none.numbers, got.numbers, what=run)
        again = dist.get_world_size() - 1 if kinds[0] == "send" else 1
        assert got.collectives.counts("replay") == (dict.fromkeys(sorted(kinds), again) if run == "full" else {})
        assert got.collectives.counts("backward") == none.collectives.counts("backward")
        assert got.collectives.counts("forward") == none.collectives.counts("forward")


# --- Expert parallel


class Exchange(torch.autograd.Function):
    """Rows to the ranks that ``sent`` says, rows from the ranks that ``received`` says."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        sent, received = ctx.splits
        rows = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(rows, grad.contiguous(), sent, received)
        return rows, None, None


class Experts(nn.Module):
    """One expert on each rank; each token goes to the rank that the router likes best."""

    def __init__(self, annotated: Annotated, saved: tuple[str, ...], drifts: bool) -> None:
        super().__init__()
        ranks = dist.get_world_size()
        self.router = nn.Linear(DIM, ranks, dtype=torch.float64)
        self.up = nn.Linear(DIM, 2 * DIM, dtype=torch.float64)
        self.down = nn.Linear(2 * DIM, DIM, dtype=torch.float64)
        self.annotated, self.saved, self.drifts = annotated, saved, drifts
        self.splits: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.annotated.checkpoint("moe", self.body)(x)

    def body(self, x: Tensor) -> Tensor:
        weight, order, counts = self.region(self.route, "router")(x)
        rows, sent, received = self.region(self.dispatch, "dispatch")(x[order], counts)
        rows = self.region(self.experts, "experts")(rows)
        back = self.region(Exchange.apply, "combine")(rows, received, sent)
        return x + torch.zeros_like(x).index_add(0, order, back) * weight

    def region(self, function: Any, name: str) -> Any:
        return self.annotated.region(function, name, save=name in self.saved)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weight of each token, the order that groups tokens by rank, and how many go to each rank."""
        scores = torch.softmax(self.router(x), -1)
        if self.drifts and remat.is_recomputing():
            scores = scores.flip(-1)
        weight, choice = scores.max(-1, keepdim=True)
        return weight, choice[:, 0].argsort(stable=True), torch.bincount(choice[:, 0], minlength=scores.shape[1])

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = counts.tolist(), theirs.tolist()
        self.splits.append(sent)
        return Exchange.apply(rows, sent, received), sent, received

    def experts(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(rows)))


def expert_parallel(
    run: str, device: torch.device, saved: tuple[str, ...] = ("router", "dispatch", "combine"), drifts: bool = False
) -> Measured:
    torch.manual_seed(0)
    annotated = Annotated(run)
    model = Experts(annotated, saved, drifts).to(device)

    def step() -> tuple[Tensor, dict[str, Tensor | None], Tensor | None]:
        model.zero_grad()
        x = data(device, TOKENS).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        return y.detach(), gradients(model), x.grad

    result = measured(annotated, step)
    assert len(set(map(tuple, model.splits))) == 1, "the splits of forward, in replays too"
    assert len(set(model.splits[0])) > 1, "data-dependent splits that are not all equal"
    return result


def test_p2_saved_dispatch_and_combine_are_not_exchanged_again(device):
    none, full, regions = (expert_parallel(run, device) for run in ("none", *OURS))
    assert_same_bits(none.numbers, full.numbers)
    assert_same_bits(none.numbers, regions.numbers)
    assert none.counts() == {"all_to_all": 5}, "counts, rows and rows back; the rows' gradients there and back"
    assert regions.counts() == none.counts()
    assert regions.collectives.counts("replay") == {}
    assert full.collectives.counts("replay") == {"all_to_all": 3}
    assert regions.regions == {"router": 1, "dispatch": 1, "experts": 2, "combine": 1}


@pytest.mark.parametrize("saved", [("router",), ("router", "combine"), ("router", "dispatch", "combine")])
def test_p1_a_router_that_would_drift_in_replay_neither_hangs_nor_changes_a_number(saved, device):
    """Its choice is saved, so every rank exchanges what it exchanged in forward."""
    none, got = expert_parallel("none", device), expert_parallel("regions", device, saved, drifts=True)
    assert_same_bits(none.numbers, got.numbers)
    assert got.regions["router"] == 1
    assert got.collectives.count("all_to_all", "replay") == {1: 3, 2: 2, 3: 0}[len(saved)]


CASES = {
    "context parallel, all-gather": lambda run, device, mesh: context_parallel(run, device, AllGather.apply),
    "context parallel, ring": lambda run, device, mesh: context_parallel(run, device, Ring.apply),
    "expert parallel": lambda run, device, mesh: expert_parallel(run, device),
}
