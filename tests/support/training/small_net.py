"""A small net whose training is compared with plain PyTorch's, in RAM and on disk."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from hetero.state.managed_param import ParamState
from offload.memory.tiers import Tier

SETTINGS = [
    pytest.param({"placement_policy": "cpu"}, id="cpu"),
    pytest.param({"placement_policy": "nvme", "host_memory": "128KiB"}, id="nvme-all-on-disk"),
]

# A device of its own, with room for copies alone.
EMULATED = pytest.param(
    {
        "placement_policy": "nvme",
        "backend": "emulated",
        "device_memory": "160KiB",
        "host_memory": "144KiB",
    },
    id="emulated",
)

Settings = dict[str, object]

# The smallest budgets that work, which leave no room in RAM.
_SMALLEST = {"fp32": "128KiB", "bf16": "88KiB", "fp16": "96KiB"}


class Net(nn.Module):
    """Chunks whose parameters do not all get gradients, and a single-element parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.unused = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale


def managed(
    settings: Settings, path: Path, dtype: str = "fp32", **more: object
) -> tuple[Net, hetero.HybridAdam]:
    """A managed net under seed 0; with the second of SETTINGS all its state is on disk."""
    torch.manual_seed(0)
    options = {"nvme_path": str(path), "chunk_numel": 4096, **settings, **more}
    if settings["placement_policy"] == "nvme" and "backend" not in settings:
        options["host_memory"] = _SMALLEST[dtype]
    with hetero.ZeroInitContext(dtype=dtype, **options):
        model = Net()
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
    model, optimizer = hetero.initialize(model, optimizer)
    placement = optimizer.engine.placement
    tier = Tier.DISK if settings["placement_policy"] == "nvme" else Tier.HOST
    assert "backend" in settings or {*placement.param, *placement.grad} == {tier}
    return model, optimizer


def plain(dtype: torch.dtype = torch.float32) -> tuple[Net, torch.optim.AdamW]:
    """The same in plain PyTorch."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)


def loss_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    """A loss on random inputs, in fp32."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - 1).square().mean()


def trained(
    steps: Iterable[Sequence[int]],
    share: float = 1.0,
    max_norm: float = 0.0,
    rates: Sequence[float] = (),
) -> Net:
    """The plain net after some steps.

    Args:
        steps: of each the seeds of its micro-batches.
        share: what the loss of a micro-batch is multiplied by.
        max_norm: gradients are clipped to it, unless it is 0.
        rates: the learning rate of each step, if it is not always the same.
    """
    model, adamw = plain()
    for number, seeds in enumerate(steps):
        if rates:
            adamw.param_groups[0]["lr"] = rates[number]
        for seed in seeds:
            (loss_of(model, seed) * share).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        adamw.step()
        adamw.zero_grad()
    return model


def assert_same(model: Net, expected: Net, after: str = "") -> None:
    """Masters equal the plain net's weights, up to the rounding of another order of operations."""
    for found, weight in zip(
        hetero.masters(model.parameters()), expected.parameters(), strict=True
    ):
        torch.testing.assert_close(
            found, weight.detach(), rtol=1e-5, atol=1e-5, msg=lambda text: f"{after} {text}"
        )


def train(model: Net, optimizer: torch.optim.Optimizer, seed: int = 1) -> None:
    """One step on `loss_of`."""
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def assert_nothing_is_used(optimizer: hetero.HybridAdam) -> None:
    """No parameter is gathered and no copy kept."""
    optimizer.engine.synchronize()  # (updates may go on after step())
    members = optimizer.engine.params.in_order()
    assert {m.name: m.uses for m in members if m.uses} == {}
    assert {m.state for m in members} <= {ParamState.OFFLOADED, ParamState.RESIDENT}
    copies = [group.params.copies for group in optimizer.engine.chunk_groups]
    if any(each.pinned() for each in copies):
        gc.collect()  # an exception's frames may view copies
    assert sum(each.pinned() for each in copies) == 0


def without_grad(function: Callable[..., object], *args: object) -> object:
    """Calls the function under `torch.no_grad()`."""
    with torch.no_grad():
        return function(*args)
