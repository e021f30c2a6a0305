"""hetero/chunk_groups/muon_directions: ranks share matrices; each makes the products of some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.chunk_groups import muon_directions
from tests.support.ranks.processes import RankPool

pytestmark = pytest.mark.usefixtures("nothing_left")

DISK = {
    "placement_policy": "nvme",
    "host_memory": "600KiB",
    "debug": {"overlap_updates": "forward"},
}
MODES = [
    {"placement_policy": "cpu", "zero_stage": 1},
    {"placement_policy": "cpu", "zero_stage": 3, "dtype": "bf16"},
    {**DISK, "zero_stage": 3},
]


def trained(path: str, **settings: Any) -> list[torch.Tensor]:
    """Masters and momentum after some steps with the same data on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96, bias=False), nn.Linear(96, 16, bias=False), nn.Linear(16, 64)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    matrices = [layer.weight for layer in layers]
    muon = hetero.HybridMuon(matrices, lr=0.02)
    adam = hetero.HybridAdam([layers[2].bias], lr=0.01)
    given = {"nvme_path": path, "chunk_numel": 4096, "dtype": "fp32", **settings}
    model, optimizers = hetero.initialize(model, [muon, adam], **given)
    for seed in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
        hetero.clip_grad_norm_(model.parameters(), 0.01)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = muon.state_dict()["state"].values()
    found = [s["momentum_buffer"] for s in states] + hetero.masters(model.parameters())
    muon.engine.close()
    return found


def on_a_rank(rank: int, world: int, path: str, settings: dict[str, Any]) -> list[torch.Tensor]:
    return trained(path, **settings)


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_two_ranks_have_the_bits_of_one(
    settings: dict[str, Any], ranks2: RankPool, tmp_path: Path
) -> None:
    """The same data, so means are exact; chunks end in the middle of matrices, and some have fewer
    matrices than there are ranks."""
    alone = {k: v for k, v in settings.items() if k != "zero_stage"}
    wanted = trained(str(tmp_path), **alone)
    for found in ranks2.run(on_a_rank, str(tmp_path), settings):
        assert all(map(torch.equal, found, wanted))


def with_products_that_fail(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False))  # ranks share the one matrix
    muon = hetero.HybridMuon(model.parameters())
    model, muon = hetero.initialize(model, muon, placement_policy="cpu", dtype="fp32")
    model(torch.ones(2, 64)).sum().backward()

    def fail(*args: object) -> torch.Tensor:
        raise MemoryError("no room for the products")

    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(muon_directions, "newton_schulz", fail)
        with pytest.raises((MemoryError, hetero.PeerError)) as caught:
            muon.step()
    with pytest.raises(RuntimeError, match="ended in the middle"):
        muon.engine.synchronize()
    muon.engine.close()
    return str(caught.value)


def test_a_rank_whose_products_fail_is_named_to_the_others(ranks2: RankPool) -> None:
    """Long before the time limit of 600 s."""
    texts = ranks2.run(with_products_that_fail)
    assert sorted("rank 0 failed in optimizer.step()" in text for text in texts) == [False, True]
    assert all("no room for the products" in text for text in texts)


def with_other_options(rank: int, world: int, options: dict[str, Any]) -> str:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    given = options if rank else {}
    muon = hetero.HybridMuon(model.parameters(), **given)
    model, muon = hetero.initialize(model, muon, placement_policy="cpu", dtype="fp32")
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises(hetero.HeteroError) as caught:
        muon.step()
    muon.engine.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"ns_steps": 3}, ["ns_steps of param group 0", "5.0 on rank 0", "3.0 on rank 1"]),
        ({"nesterov": False}, ["nesterov of param group 0", "1.0 on rank 0", "0.0 on rank 1"]),
        (
            {"adjust_lr_fn": "match_rms_adamw"},
            ["0.weight is in param group 0", "rate times 1.0 on rank 0", "times 1.6 on rank 1"],
        ),
    ],
    ids=str,
)
def test_options_that_differ_are_named(
    options: dict[str, Any], facts: list[str], ranks2: RankPool
) -> None:
    for message in ranks2.run(with_other_options, options):
        assert all(fact in message for fact in facts)
