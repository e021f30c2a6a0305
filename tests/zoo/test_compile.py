"""torch.compile over managed models: as plain PyTorch, to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from tests.support.ranks.processes import run_forked
from tests.support.training.plain_adam import OPTIONS
from tests.zoo.case import Where, vectors
from tests.zoo.handwritten import Bare, Block, ballasted


class Net(nn.Module):
    """Blocks, and parameters used outside their module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), Bare(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)) * self.first.norm.weight)


make = ballasted(Net)


def train(
    policy: str, backend: str, tmp_path: Path, how: str = "model"
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and masters of a model that is compiled whole, or whose "blocks" are."""
    torch._dynamo.reset()
    host_memory = "400KiB" if policy == "nvme" else None
    given = {"placement_policy": policy, "nvme_path": str(tmp_path), "host_memory": host_memory}
    torch.manual_seed(0)
    with hetero.ZeroInitContext(dtype="fp32", chunk_numel=4096, **given):
        model = make()
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), **OPTIONS))
    compiled: nn.Module = model
    if how == "model":
        compiled = torch.compile(model, backend=backend)
    else:
        model.first.compile(backend=backend)
        model.middle.compile(backend=backend)
    losses = steps(compiled, optimizer)
    if policy == "nvme":
        chunk = optimizer.engine.find(model.last.up.weight).chunk
        assert not optimizer.engine.params.is_resident(chunk)
    masters = hetero.masters(model.parameters())
    optimizer.engine.close()
    return losses, masters


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        loss = model(vectors(Where(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.extra
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compilers_that_keep_operators_have_the_same_bits_in_all_placements(
    backend: str, tmp_path: Path
) -> None:
    assert train("nvme", backend, tmp_path)[0] == train("cpu", backend, tmp_path)[0]


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        ("nvme", "model"),
        pytest.param("nvme", "blocks", marks=pytest.mark.extra),
    ],
)
def test_compiled_models_train_as_plain_ones(policy: str, how: str, tmp_path: Path) -> None:
    """The back end is eager's: what can go wrong is what is traced, and that is quick."""
    torch.manual_seed(0)
    plain = make()
    steps(plain, torch.optim.AdamW(plain.parameters(), **OPTIONS))
    # (Importing the compiler takes as long as the rest, and that process has done it.)
    _, masters = run_forked(train, policy, "eager", tmp_path, how)
    for found, weight in zip(masters, plain.parameters(), strict=True):
        torch.testing.assert_close(found, weight.detach(), rtol=1e-5, atol=1e-5)
