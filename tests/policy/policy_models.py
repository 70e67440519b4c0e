"""A model of blocks that knows nothing of checkpoints, and what one step of it gives."""

from collections import Counter

import torch
from torch import nn

RUNS: Counter[str] = Counter()
"""Class name of a leaf module -> how often its forward ran."""


class Projection(nn.Linear):
    """A Linear that counts its runs."""

    def forward(self, x):
        RUNS[f"{self.in_features}x{self.out_features}"] += 1
        return super().forward(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = Projection(8, 6), Projection(6, 8)

    def forward(self, x):
        return self.wo(torch.tanh(self.wq(x)))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = Projection(8, 16), Projection(16, 8)

    def forward(self, x):
        return self.w2(torch.relu(self.w1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = Attention()
        self.feed_forward = FeedForward()

    def forward(self, x, *, scale: float = 1.0):
        x = x + self.attention(self.norm(x)) * scale
        return x + self.feed_forward(self.norm(x))


class Model(nn.Module):
    def __init__(self, blocks: int = 3, block: type[nn.Module] = Block):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): block() for i in range(blocks)})
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def model(**options) -> Model:
    torch.manual_seed(3)
    return Model(**options)


def gradients(of: nn.Module) -> list[torch.Tensor]:
    """Loss and gradients of one step on a fixed batch; counts from zero."""
    RUNS.clear()
    of.zero_grad()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(7))
    loss = of(x).logsumexp(-1).sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in of.parameters() if parameter.grad is not None)]


def assert_same(found, expected):
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
