"""A training by fully_shard(), of torch or of hetero, on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hetero
from hetero.compat import fsdp as ours

WIDTH, LAYERS, STEPS = 16, 3, 3


class Layer(nn.Module):
    """A norm and a linear layer with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """Layers between two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def data(rank: int, step: int) -> torch.Tensor:
    """A rank's inputs of a step."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def train(
    rank: int,
    world: int,
    torchs: bool,
    dtype: str,
    reshard: bool,
    mesh: bool,
    factor: float | None = None,
) -> Any:
    """Weights after a few clipped steps, and the norms of gradients."""
    from torch.distributed import fsdp as theirs

    fsdp: Any = theirs if torchs else ours
    optim = torch.optim if torchs else ours.optim
    torch.manual_seed(0)
    model = Model()

    def policy(**more: Any) -> Any:
        compute = getattr(torch, dtype) if dtype != "float32" else None
        return fsdp.MixedPrecisionPolicy(compute, torch.float32, **more)

    keywords: dict[str, Any] = {"reshard_after_forward": reshard}
    if mesh:
        keywords["mesh"] = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fsdp.fully_shard(layer, mp_policy=policy(), **keywords)
    fsdp.fully_shard(model, mp_policy=policy(output_dtype=torch.float32), **keywords)
    assert isinstance(model, fsdp.FSDPModule)
    assert isinstance(model, Model)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
        model.layers[1].set_gradient_divide_factor(4 * factor)
        for each in (model, *model.layers):
            each.set_force_sum_reduction_for_comms(True)  # gloo has no other
    # eps is large so that an update is smooth in the gradient
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    norms = []
    for step in range(STEPS):
        loss = (model(data(rank, step)) - 1).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(float(norm.full_tensor() if torchs else norm))
        optimizer.step()
        optimizer.zero_grad()
    if torchs:
        weights = [entry.full_tensor() for entry in model.state_dict().values()]
    else:
        weights = list(model.state_dict().values())
        assert all(map(torch.equal, weights, hetero.masters(model.parameters())))
        optimizer.engine.close()
    dist.barrier()
    return weights, norms
