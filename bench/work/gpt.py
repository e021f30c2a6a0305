"""A GPT-2 in plain PyTorch, for benchmarks that should not depend on a library's version of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 50257
_PATTERN_NUMEL = 16 << 20


@dataclass(frozen=True)
class Shape:
    """Of a model and of its batches."""

    layers: int
    width: int
    heads: int
    seq_len: int
    batch_size: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} is no multiple of {self.heads} heads")

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.seq_len * self.batch_size

    def params(self, vocabulary: int) -> int:
        """Of a Gpt, whose embedding and head are one."""
        w = self.width
        return (vocabulary + self.seq_len) * w + self.layers * (12 * w * w + 13 * w) + 2 * w

    def flop(self, numel: int) -> float:
        """Of one step of a model of `numel` parameters.

        6 N per token for products with weights, forward and backward (the output matrix, which is
        the embedding's, counted once), and 6 L h s for causal attention (half of 12 L h s).
        """
        attention = 6 * self.layers * self.width * self.seq_len
        return float(self.tokens * (6 * numel + attention))


SHAPES = {
    "gpt2-1.3b": Shape(layers=24, width=2048, heads=16, seq_len=1024, batch_size=8),
    "gpt-6b": Shape(layers=28, width=4096, heads=32, seq_len=1024, batch_size=4),
    "tiny": Shape(layers=2, width=64, heads=2, seq_len=32, batch_size=2),
}


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        x = x + self.down(hidden)
        return x


class Gpt(nn.Module):
    """Its forward gives the loss of predicting the next token."""

    def __init__(self, shape: Shape, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(shape.seq_len, shape.width)
        self.blocks = nn.ModuleList([_Block(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("places", torch.arange(shape.seq_len))

    def get_input_embeddings(self) -> nn.Embedding:
        """By the name that models of transformers have; hetero.tile_heads() asks for it."""
        return self.tokens

    def get_output_embeddings(self) -> nn.Linear:
        """The head, likewise."""
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(self.places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        loss: torch.Tensor = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        return loss


class _Checkpointed(nn.Module):
    """A block whose backward computes its forward again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def checkpoint_blocks(model: Gpt) -> None:
    """Makes each block a checkpoint of torch's."""
    model.blocks = nn.ModuleList(map(_Checkpointed, model.blocks))


@contextmanager
def quick_init() -> Iterator[None]:
    """Inside, modules are made with uninitialized weights; fill() follows.

    Initialising billions of weights on the CPU takes longer than what is measured.
    """
    names = ("normal_", "uniform_", "kaiming_uniform_")
    saved: dict[str, Any] = {name: getattr(nn.init, name) for name in names}
    for name in names:
        setattr(nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(nn.init, name, function)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Matrices get normal numbers of deviation 0.02, a pattern that repeats: zeros would be quicker
    to multiply than what models have."""
    pattern = torch.randn(_PATTERN_NUMEL, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for param in model.parameters():
        if param.ndim < 2:
            param.fill_(0.02)
            continue
        flat = param.view(-1)
        for begin in range(0, flat.numel(), _PATTERN_NUMEL):
            part = flat[begin : begin + _PATTERN_NUMEL]
            part.copy_(pattern[: part.numel()])
