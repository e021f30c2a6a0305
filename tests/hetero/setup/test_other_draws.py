"""Ranks that draw other random numbers: the first one's weights, and each one's own generator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from tests.support.ranks.processes import RankPool

# Beside the options, the rows of a module that needs the room of all others, for a time.
SETTINGS = {
    "parts-in-ram": ({"placement_policy": "cpu", "host_memory": 1_400_000}, 3200),
    "parts-on-disk": ({"placement_policy": "nvme", "host_memory": 450_000}, 900),
}


def build(seed: int, rows: int) -> nn.Sequential:
    """As programs for DDP do it: each rank has a seed of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(8)), nn.Dropout(0.5))
    nn.Linear(96, rows)
    with torch.no_grad():
        model[0].weight.normal_()  # where it is elsewhere by now, it comes back
    nn.Linear(96, rows)
    return model


def found(model: nn.Module) -> list[torch.Tensor]:
    return [value.float() for value in model.state_dict().values()]


NUMEL = 3 << 19  # 6 MiB, of which 4 are a tile


def fill_in_tiles(rank: int, world: int, nvme_path: str) -> Any:
    """A parameter that is larger than the budget is drawn tile by tile."""
    torch.manual_seed(100 + rank)
    plain = nn.Parameter(torch.empty(NUMEL))
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        plain.normal_()
        plain.uniform_(generator=generator).mul_(2)
    after = torch.rand(3), torch.rand(3, generator=generator)
    torch.manual_seed(100 + rank)
    generator.manual_seed(rank)
    module = nn.Module()
    with hetero.ZeroInitContext(
        placement_policy="nvme", nvme_path=nvme_path, host_memory="4500KiB", dtype="fp32"
    ) as context:
        module.large = nn.Parameter(torch.empty(NUMEL))
        with torch.no_grad():
            module.large.normal_()
            module.large.uniform_(generator=generator).mul_(2)
        values = context.construction.elements(module.large, slice(0, NUMEL))
    goes_on = torch.equal(torch.rand(3), after[0])
    goes_on = goes_on and torch.equal(torch.rand(3, generator=generator), after[1])
    return goes_on, values, plain.detach()


def test_what_is_drawn_in_tiles_is_the_first_ranks(ranks2: RankPool, tmp_path: Path) -> None:
    results = ranks2.run(fill_in_tiles, str(tmp_path))
    for goes_on, values, _ in results:
        assert goes_on
        assert torch.equal(values, results[0][2])


# Between the block and initialize()


def convert(rank: int, world: int, options: dict[str, Any], rows: int) -> Any:
    plain = build(0, rows)
    with hetero.ZeroInitContext(dtype="fp32", **options) as context:
        model = build(0, rows)
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


@pytest.mark.parametrize("name", ["parts-in-ram", "parts-on-disk"])
def test_a_conversion_to_what_it_is_needs_no_values(
    ranks2: RankPool, name: str, tmp_path: Path
) -> None:
    path = {"nvme_path": str(tmp_path)} if name == "parts-on-disk" else {}
    options, rows = SETTINGS[name]
    for said, same in ranks2.run(convert, options | path, rows):
        assert same
        assert len(said) == 3
        assert all(
            "between the block of ZeroInitContext and hetero.initialize()" in s for s in said
        )
