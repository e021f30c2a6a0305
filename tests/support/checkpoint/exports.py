"""Managed models of Hugging Face's that tests export, and what is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetero
from tests.support.training.saved_models import FAMILIES, batches, loss_of

SMALLEST = "3MiB"  # of host memory: almost nothing of a model has its home in RAM
POLICIES = ("cpu", "nvme")


def options(policy: str, path: Path, dtype: str) -> dict[str, Any]:
    """Of a policy; with "nvme" everything is on disk that can be."""
    made: dict[str, Any] = {"placement_policy": policy, "dtype": dtype}
    return made if policy == "cpu" else made | {"host_memory": SMALLEST, "nvme_path": str(path)}


def managed(
    family: str, policy: str, path: Path, dtype: str, **more: Any
) -> tuple[Any, hetero.HybridAdam]:
    """A model with 2 layers of the family, from its configuration, under seed 3."""
    torch.manual_seed(3)
    with hetero.ZeroInitContext(options(policy, path, dtype) | more):
        model = FAMILIES[family].make(2)
    return hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    """One step, after which masters have bits that parameters lack."""
    optimizer.zero_grad()
    loss_of(model, batches()[number]).backward()
    optimizer.step()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def masters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The fp32 masters by the parameters' first names."""
    named = dict(model.named_parameters())
    return dict(zip(named, hetero.masters(list(named.values())), strict=True))


class WithBuffers(nn.Module):
    """Buffers of several kinds, parameters that are frozen, and some that no engine manages."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.register_buffer("turned", torch.rand(3, 5).t())
        self.register_buffer("mask", torch.rand(3, 5).t() > 0.5)
        self.register_buffer("odd", torch.arange(7, dtype=torch.uint8))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.number = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.rand(5, 5), requires_grad=False)
