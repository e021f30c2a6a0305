"""A net whose forward makes the host wait for nothing, and its training by hetero and by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hetero
from tests.support.training.loops import Run

VOCABULARY, WIDTH, LENGTH = 512, 128, 64
LR = 1e-3


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # Without a bias: the keys' has a gradient of rounding errors alone, which Adam makes large.
        self.mixed = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mixed(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        x = x + torch.softmax(scores, dim=-1) @ v
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A language model with a buffer, a parameter of one element, and tied weights."""

    def __init__(self, width: int = WIDTH, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.randn(LENGTH, width) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        x = x + self.positions.to(x.dtype)  # type: ignore[operator]
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(count: int) -> list[torch.Tensor]:
    """Of tokens, on the device."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randint(0, VOCABULARY, (count, 4, LENGTH), generator=generator)
    return list(made.cuda())


def managed(path: Path, width: int = WIDTH, **options: Any) -> tuple[Net, hetero.HybridAdam]:
    """The net under seed 0, on CUDA."""
    torch.manual_seed(0)
    given = {"backend": "cuda", "nvme_path": str(path), "chunk_numel": 64 * 1024, **options}
    with hetero.ZeroInitContext(**given):
        model = Net(width)
    optimizer = hetero.HybridAdam(model.parameters(), lr=LR, weight_decay=0.1)
    return hetero.initialize(model, optimizer)


def train(
    model: Net,
    optimizer: hetero.HybridAdam,
    data: list[torch.Tensor],
    accumulate: int = 1,
    clip: float | None = 1.0,
) -> Run:
    """As tests.training.train(): numbers are read after the last step, and the engine is closed."""
    run = Run()
    losses = []
    for first in range(0, len(data), accumulate):
        for tokens in data[first : first + accumulate]:
            loss = model(tokens)
            optimizer.backward(loss / accumulate)
            losses.append(loss.detach())
        if clip is not None:
            run.norms.append(hetero.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    run.losses = [float(loss) for loss in losses]
    run.masters = hetero.masters(model.parameters())
    for param in model.parameters():
        with hetero.gathered(param):
            run.params.append(param.detach().cpu().clone())
    optimizer.engine.close()
    return run


def plain(data: list[torch.Tensor], width: int = WIDTH) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of torch's own training in fp32 on the device, clipped to norm 1."""
    torch.manual_seed(0)
    model = Net(width).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    losses = []
    for tokens in data:
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]
