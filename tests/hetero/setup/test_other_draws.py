"""Ranks that keep parts of a model, between the block of ZeroInitContext and initialize()."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hetero
from tests.support.ranks.processes import RankPool

ROWS = 3200  # of a module that needs the room of all others, for a time


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(8)), nn.Dropout(0.5))
    nn.Linear(96, ROWS)
    with torch.no_grad():
        model[0].weight.normal_()  # where it is elsewhere by now, it comes back
    nn.Linear(96, ROWS)
    return model


def found(model: nn.Module) -> list[torch.Tensor]:
    return [value.float() for value in model.state_dict().values()]


def convert(rank: int, world: int) -> Any:
    plain = build()
    options: dict[str, Any] = {"placement_policy": "cpu", "host_memory": 1_400_000}
    with hetero.ZeroInitContext(dtype="fp32", **options) as context:
        model = build()
    assert context.construction.any_offloaded
    for same in (
        model.to("cpu"),
        model.to(torch.device("cpu"), torch.float32),
        model.to(torch.float32, non_blocking=True),
        model.cpu(),
        model.float(),
    ):
        assert same is model
    said = []
    for use in (model.bfloat16, lambda: model[0].weight.sum(), lambda: model(torch.ones(1, 96))):
        try:
            use()
        except hetero.HeteroError as error:
            said.append(str(error))
    optimizer = hetero.HybridAdam(model.parameters())
    hetero.initialize(model, optimizer)
    weights = found(model)
    optimizer.engine.close()
    return said, all(map(torch.equal, weights, found(plain)))


def test_a_conversion_to_what_it_is_needs_no_values(ranks2: RankPool) -> None:
    for said, same in ranks2.run(convert):
        assert same
        assert len(said) == 3
        assert all(
            "between the block of ZeroInitContext and hetero.initialize()" in s for s in said
        )
