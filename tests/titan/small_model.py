"""A small mixture-of-experts model whose modules are named as torchtitan's; needs no torchtitan."""

import torch
from torch import nn

EXPERTS, DIM = 4, 6


class Router(nn.Module):
    runs = 0

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            Router.runs += 1
        scores, chosen = self.gate(x).softmax(-1).topk(2)
        return scores, chosen


class MoE(nn.Module):
    """A mixture of experts that counts tokens as torchtitan's does."""

    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.Linear(DIM, DIM)
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS))

    def forward(self, x):
        scores, chosen = self.router(x)
        with torch.no_grad():
            self.tokens_per_expert.add_(torch.bincount(chosen.view(-1), minlength=EXPERTS))
        return torch.tanh(self.experts(x)) * scores.sum(-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.inner_attention = nn.Softmax(-1)

    def forward(self, x):
        return self.wo(self.inner_attention(self.wq(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM)
        self.attention, self.moe = Attention(), MoE()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(x)


class Model(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Block() for index in range(blocks)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def model(**options):
    torch.manual_seed(5)
    return Model(**options)


def gradients(of):
    of.zero_grad()
    of(torch.ones(3, DIM) / 3).logsumexp(-1).sum().backward()
    return [parameter.grad.clone() for parameter in of.parameters()]
