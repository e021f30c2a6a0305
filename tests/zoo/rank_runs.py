"""Training of a case on several ranks, by hetero and by DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hetero
from tests.zoo import handwritten, pretrained
from tests.zoo.case import Case, Where
from tests.zoo.runs import PlainAdam, Run, initialized, least_host_memory

STEPS = 3


def case_of(name: str) -> Case:
    """The case of that name."""
    return {case.name: case for case in [*handwritten.CASES, *pretrained.CASES]}[name]


def train(
    case: Case,
    model: nn.Module,
    rank: int,
    accumulate: int,
    backward: Callable[[torch.Tensor], None],
    norm: Callable[[], float],
    step: Callable[[], None],
    no_sync: Callable[[], Any] = contextlib.nullcontext,
) -> Run:
    """The loop, each rank on its own data; `no_sync()` is around all micro-batches but the last."""
    run = Run()
    for number in range(STEPS):
        for micro in range(accumulate):
            where = Where(number, micro, rank)
            torch.manual_seed(where.seed)
            with contextlib.nullcontext() if micro == accumulate - 1 else no_sync():
                loss = case.loss(model, case.batch(where))
                backward(loss / accumulate)
            run.losses.append(loss.item())
            del loss
        run.norms.append(norm())
        step()
    return run


def run_ddp(rank: int, case: Case, accumulate: int) -> Run:
    """The oracle: DDP in fp32, which averages gradients over ranks, then the documented update."""
    torch.manual_seed(0)
    model = case.make()
    optimizer = PlainAdam(model, "fp32")
    # Ranks keep buffers of their own; DDP would copy the first rank's before each forward.
    ddp = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    run = train(
        case,
        ddp,
        rank,
        accumulate,
        lambda loss: loss.backward(),
        optimizer.norm,
        step,
        ddp.no_sync,
    )
    run.masters = optimizer.whole()
    run.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return run


def run_hetero(rank: int, case: Case, accumulate: int, settings: dict[str, Any]) -> Run:
    """The same with hetero, sharded over all ranks; with a disk in the least RAM that works."""
    if settings["placement_policy"] == "nvme":
        stage, path = settings["zero_stage"], settings["nvme_path"]
        least = torch.tensor(least_host_memory(case, "fp32", path, zero_stage=stage))
        dist.all_reduce(least, dist.ReduceOp.MAX)  # shards differ in size, by a padding
        settings = {**settings, "host_memory": int(least)}
    model, optimizer = initialized(case, "fp32", settings)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    run = train(
        case,
        model,
        rank,
        accumulate,
        optimizer.backward,
        lambda: hetero.clip_grad_norm_(model.parameters(), 1e30).item(),
        step,
    )
    names = dict(model.named_parameters())
    run.masters = dict(zip(names, hetero.masters(names.values()), strict=True))
    run.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer.engine.close()
    return run


def both(
    rank: int, world: int, name: str, accumulate: int, settings: list[dict[str, Any]]
) -> tuple[Run, list[Run]]:
    """A rank's run of the case by DDP, and by hetero with each of `settings`."""
    case = case_of(name)
    expected = run_ddp(rank, case, accumulate)
    return expected, [run_hetero(rank, case, accumulate, each) for each in settings]
