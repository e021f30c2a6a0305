"""What ranks do when parameters come later: functions that can be pickled, run on every rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetero
import hetero.setup.first_values
from hetero.chunks.layout import Chunk
from tests.support.ranks.rank_training import Experts
from tests.support.training.chunk_group_training import Mixed, build, inputs, loss_of


def managed(
    model: nn.Module, options: dict[str, Any], dtype: str = "fp32"
) -> tuple[nn.Module, hetero.HybridAdam]:
    """The model and its optimizer over the ranks."""
    params = [p for p in model.parameters() if p.requires_grad]
    settings = {"dtype": dtype, "placement_policy": "cpu", "rank_timeout_s": 60.0} | options
    optimizer = hetero.HybridAdam(params, lr=1e-2)
    return hetero.initialize(model, optimizer, **settings)


def twins(rank: int, world: int, frozen: bool, fewer: bool = False) -> str:
    """The error if ranks add two modules of the same shape in different order, or one only one."""
    model = Mixed()
    model.extra = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    if not frozen:
        later, model.extra = model.extra, nn.Identity()
    else:
        model.extra.requires_grad_(False)
    model, optimizer = managed(model, {})
    if not frozen:
        model.extra = later
    model.extra.requires_grad_(True)
    order = ["a", "b"] if rank == 0 or fewer else ["b", "a"]
    order = order[: 2 - rank] if fewer else order
    try:
        optimizer.add_param_group({"params": [model.extra[key].weight for key in order]})
    except hetero.HeteroError as error:
        return f"{len(optimizer.engine.chunk_groups)} chunk groups: {error}"
    finally:
        optimizer.engine.close()
    return "no error"


def inside_no_sync(rank: int, world: int, stage: int) -> list[torch.Tensor]:
    """Most is unfrozen inside no_sync(): nothing is sent there, and later at backward's end."""
    model = build("unfreeze-most")
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
    model, optimizer = hetero.initialize(
        model, optimizer, dtype="fp32", zero_stage=stage, placement_policy="cpu",
        chunk_numel=8192, rank_timeout_s=60.0,
    )  # fmt: skip
    engine = optimizer.engine
    with hetero.no_sync(model):
        model.requires_grad_(True)
        loss = loss_of(model, inputs(rank, 0))
        assert len(engine.chunk_groups) == 2
        assert [
            chunk_group.ranks.grad_reducer.reduces_in_backward
            for chunk_group in engine.chunk_groups
        ] == [
            False,
            False,
        ]
        loss.backward()
    assert [
        chunk_group.ranks.grad_reducer.reduces_in_backward for chunk_group in engine.chunk_groups
    ] == [
        True,
        False,
    ]
    loss_of(model, inputs(rank, 1)).backward()
    optimizer.step()
    found = hetero.masters(model.parameters())
    engine.close()
    return found


def mostly_unfrozen(rank: int, stage: int) -> tuple[Experts, hetero.HybridAdam]:
    """Eight experts that come later."""
    torch.manual_seed(0)
    model = Experts(8)
    model.experts.requires_grad_(False)
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
    model, optimizer = hetero.initialize(
        model, optimizer, dtype="fp32", zero_stage=stage, placement_policy="cpu",
        chunk_numel=8192, rank_timeout_s=60.0,
    )  # fmt: skip
    return model, optimizer


def other_modules_of_what_came_later(rank: int, world: int, stage: int) -> None:
    """One rank is done while the other needs its part to go on with its backward."""
    model, optimizer = mostly_unfrozen(rank, stage)
    model.experts.requires_grad_(True)
    for step in range(2):
        x = model(inputs(rank, step), None)
        for expert in [0] if rank == 0 else range(8):
            x = torch.tanh(model.experts[expert](x))
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.engine.close()


def unfrozen_between_micro_batches(rank: int, world: int, stage: int) -> None:
    """Parameters come while means are under way; ranks use modules in other order."""
    model, optimizer = mostly_unfrozen(rank, stage)
    for _ in range(2):  # the second backward averages in the order of the first
        model(inputs(rank, 0), None).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(inputs(rank, 1), None).square().mean().backward()
    model.experts.requires_grad_(True)
    x = inputs(rank, 2)
    with torch.enable_grad():
        x = model(x, None) if rank else model(x, None).detach()
        for expert in range(8):
            x = torch.tanh(model.experts[expert](x))
        if rank == 0:
            x = model.inner(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.engine.close()


def failing(
    rank: int, world: int, stage: int, how: str, path: Path
) -> tuple[str, float, int, list[torch.Tensor]]:
    """One rank cannot take in what is unfrozen: error, seconds, chunk groups, and masters after
    all.

    `how`: "directory" is gone, or the values cannot be moved to the second "chunk".
    """
    mine = path / str(rank)
    mine.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "zero_stage": stage,
        "chunk_numel": 4096,
        "nvme_path": str(mine),
    }
    model, optimizer = managed(
        build("unfreeze-most"),
        options | {"placement_policy": "nvme", "rank_timeout_s": 60.0, "host_memory": "1MiB"},
    )
    optimizer.add_param_group({"params": [p for p in model.parameters() if not p.requires_grad]})
    engine = optimizer.engine
    in_use = engine.ledger.in_use_bytes
    model.requires_grad_(True)
    x = inputs(rank, 0)
    before = hetero.setup.first_values._fill_chunk
    if rank == 1 and how == "directory":
        mine.rename(path / "away")
    elif rank == 1:

        def fill_chunk(chunk_group: Any, chunk: Chunk, *rest: Any) -> None:
            if chunk.id == 1:
                raise OSError("no chunk")
            before(chunk_group, chunk, *rest)

        hetero.setup.first_values._fill_chunk = fill_chunk
    message, started = "no error", time.monotonic()
    try:
        model(x)
    except (hetero.HeteroError, OSError) as error:
        message = f"{type(error).__name__}: {error}"
    waited_s = time.monotonic() - started
    chunk_groups = len(engine.chunk_groups)
    assert engine.ledger.in_use_bytes == in_use
    hetero.setup.first_values._fill_chunk = before
    if how == "directory" and rank == 1:
        (path / "away").rename(mine)
    for step in range(2):
        loss_of(model, inputs(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = hetero.masters(model.parameters())
    assert len(engine.chunk_groups) == 2
    engine.close()
    return message, waited_s, chunk_groups, found


class Noise(nn.Module):
    """With a buffer that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.register_buffer("noise", torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.to(x.dtype) + self.noise.to(x.dtype)


def new_module_with_a_buffer(rank: int, world: int) -> list[torch.Tensor]:
    """Its values on this rank, which drew its own."""
    model, optimizer = managed(build("add-new"), {})
    torch.manual_seed(rank)
    model.extra = Noise()
    optimizer.add_param_group({"params": model.extra.parameters()})
    found = [hetero.masters(model.extra.weight)[0], model.extra.noise.clone()]
    optimizer.engine.close()
    return found


def room_for_all(rank: int, world: int, later: bool) -> str:
    """Two chunk groups of which each would take all of the RAM that is left.

    Whether there is room for all parameters at once is not said; but once there was or was not,
    training has the room that was planned for it.
    """
    model = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(16)])
    keep = {} if later else {"keep_fp32": [f"{i}.*" for i in range(8, 16)]}
    if later:
        model[8:].requires_grad_(False)
    given = list(model.parameters())
    options: dict[str, Any] = {"chunk_numel": 16384, "placement_policy": "cpu", **keep}
    options |= {"rank_timeout_s": 60.0, "dtype": "bf16"}
    # 16 chunks of 8192 elements a rank; what is left would do for half of all gathered copies.
    options["host_memory"] = 16 * 8192 * (2 + 2 + 10) + 10 * 32768 + 12 * 32768 + (3 << 18)
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(given, lr=1e-2), **options)
    engine = optimizer.engine
    outcome = "room"

    def take_all(params: Any) -> str:
        try:
            with hetero.gathered(params):
                return "room"
        except hetero.BudgetError:
            return "no room"

    outcome = take_all(model.parameters())
    if later:
        model.requires_grad_(True)
        engine.steps.added_params.take_in_unfrozen()
        outcome += ", " + take_all(model.parameters())
    used = engine.ledger.in_use_bytes["host"]
    x = torch.ones(1, 128, dtype=torch.bfloat16)
    for layer in model:
        x = layer(x.to(layer.weight.dtype))
    x.sum().backward()
    optimizer.step()
    engine.close()
    assert used <= engine.ledger.budget_bytes["host"]
    return f"{outcome} {used}"
