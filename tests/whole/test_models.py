"""What models do beside training; tests/zoo trains every way of writing one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from offload.memory.tiers import Tier


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.tanh(self.inner(x)))


class Twice(nn.Module):
    """A module that is called twice, and a tied weight that two modules use."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.a = nn.Linear(64, 64)
        self.b = nn.Linear(64, 64, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.block(self.a(self.block(x))))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64)
        self.adapter = nn.Linear(64, 64)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(torch.tanh(self.base(x)))


def test_frozen_parameters_have_no_record_and_keep_their_values(tmp_path: Path) -> None:
    with hetero.ZeroInitContext(placement_policy="nvme", dtype="bf16", nvme_path=str(tmp_path)):
        model = Frozen()
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    frozen = [m for m in optimizer.engine.params.in_order() if not m.chunk.trainable]
    assert [m.name for m in frozen] == ["base.weight", "base.bias"]
    assert all(optimizer.engine.placement.optim_state[m.chunk.id] is None for m in frozen)
    before = model.base.weight.clone()
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    assert torch.equal(model.base.weight, before)
    assert set(optimizer.state_dict()["state"]) == {2, 3}
    optimizer.engine.close()


def test_gathered_reads_and_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with hetero.ZeroInitContext(
        placement_policy="nvme", dtype="bf16", nvme_path=str(tmp_path), host_memory="200KiB"
    ):
        model = Twice()
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    weight = model.a.weight
    before = hetero.masters(weight)[0]
    with hetero.gathered(model.parameters()):
        assert torch.equal(weight, before.bfloat16())
    with hetero.gathered(weight, modifier_rank=0), torch.no_grad():
        weight[0] = 3.0
        weight[1, 1] = weight[1, 1]
    after = hetero.masters(weight)[0]
    assert torch.equal(after[0], torch.full((64,), 3.0))
    assert torch.equal(after[1:], before[1:]), "untouched elements keep their master's every bit"

    with pytest.raises(KeyError), hetero.gathered(weight, modifier_rank=0), torch.no_grad():
        weight.zero_()
        raise KeyError
    assert torch.equal(hetero.masters(weight)[0], after)
    optimizer.engine.close()


@pytest.mark.parametrize("trained", [True, False], ids=["head-trained", "all-frozen"])
def test_frozen_parameters_alone_on_disk(trained: bool, tmp_path: Path) -> None:
    """A trained head in RAM over a frozen base that does not fit there."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20)), nn.Linear(256, 16))
        for param in list(model.parameters())[: 40 if trained else None]:
            param.requires_grad_(False)
        return model

    x = torch.randn(4, 256)
    model, plain = make(), make()
    model, optimizer = hetero.initialize(
        model,
        hetero.HybridAdam(model.parameters(), lr=1e-2),
        placement_policy="auto",
        host_memory="2MiB",
        nvme_path=str(tmp_path),
        dtype="fp32",
    )
    assert optimizer.engine.placement.buffers == 0
    assert Tier.DISK in optimizer.engine.placement.param
    assert torch.equal(model(x), plain(x))
    if trained:
        theirs = torch.optim.AdamW(plain[-1].parameters(), lr=1e-2, weight_decay=0.0)
        for each, optim in ((model, optimizer), (plain, theirs)):
            each(x).square().mean().backward()
            optim.step()
            optim.zero_grad()
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)
    optimizer.engine.close()
