"""Small stacks of blocks, for what does not depend on a real model: overhead, and wear."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class TwoLayers(nn.Module):
    """The least that has something to save. Input and output: (..., width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    """Self-attention with one head. Input and output: (batch, tokens, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm. Input and output: (batch, tokens, width)."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.ff = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ff(self.norm2(x))


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, count: int, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer_blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.transformer_blocks:
            x = block(x)
        return x
