"""What hetero cannot do is refused by name, and what it does not do yet is expected to fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from tests.support.training.plain_adam import OPTIONS
from tests.zoo.case import WIDTH, Where, tokens, vectors
from tests.zoo.handwritten import Block, Normed, images

pytestmark = pytest.mark.parametrize("policy", ["cpu", "nvme"])
Build = Callable[..., tuple[nn.Module, hetero.HybridAdam]]


class WithIndices(nn.Module):
    """An integer parameter, as quantised models have: never trained, but among parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.indices = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)[..., self.indices]


@pytest.fixture
def build(policy: str, tmp_path: Path) -> Build:
    def made(make: Callable[[], nn.Module], dtype: str = "fp32", trained: bool = False) -> tuple:
        with hetero.ZeroInitContext(dtype=dtype, placement_policy=policy, nvme_path=str(tmp_path)):
            model = make()
        params = [p for p in model.parameters() if p.requires_grad or not trained]
        return hetero.initialize(model, hetero.HybridAdam(params, **OPTIONS))

    return made


def test_sparse_gradients(build: Build) -> None:
    model, optimizer = build(lambda: nn.Embedding(101, WIDTH, sparse=True))
    with pytest.raises(ValueError, match=r"weight got a torch.sparse_coo gradient.*sparse=False"):
        model(tokens(Where(0))).sum().backward()
    optimizer.engine.close()


def test_embeddings_that_renormalise_their_weight_in_forward(build: Build) -> None:
    def make() -> nn.Module:
        return nn.Embedding(101, WIDTH, max_norm=0.5)

    torch.manual_seed(0)
    model, optimizer = build(make)
    torch.manual_seed(0)
    plain = make()
    adam = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    for step in range(3):
        for each, its in ((model, optimizer), (plain, adam)):
            each(tokens(Where(step))).square().sum().backward()
            its.step()
            its.zero_grad()
    torch.testing.assert_close(hetero.masters(model.weight)[0], plain.weight.detach())
    optimizer.engine.close()


@pytest.mark.parametrize("trained", [True, False], ids=["outside", "in-the-optimizer"])
def test_integer_parameters(build: Build, trained: bool) -> None:
    model, optimizer = build(WithIndices, trained=trained)
    model(vectors(Where(0))).sum().backward()
    hetero.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert len(hetero.masters(model.parameters())) == len(list(model.parameters()))
    optimizer.engine.close()


def test_batch_normalisation_in_bf16(build: Build) -> None:
    model, optimizer = build(Normed, dtype="bf16")
    model(images(Where(0))).sum().backward()
    optimizer.step()
    optimizer.engine.close()
