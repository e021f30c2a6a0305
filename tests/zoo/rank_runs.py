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
from tests.zoo.case import WIDTH, Case, Where, vectors
from tests.zoo.runs import Run, initialized, least_host_memory, plain_adam

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
    optimizer = plain_adam(model, "fp32")
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
    run.masters = optimizer.whole(model)
    run.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return run


def in_least_memory(case: Case, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`, with a disk in the least RAM that works. All ranks must call it."""
    if settings["placement_policy"] != "nvme" or "host_memory" in settings:
        return settings
    stage, path = settings["zero_stage"], settings["nvme_path"]
    least = torch.tensor(least_host_memory(case, "fp32", path, zero_stage=stage))
    dist.all_reduce(least, dist.ReduceOp.MAX)  # shards differ in size, by a padding
    return {**settings, "host_memory": int(least)}


def run_hetero(rank: int, case: Case, accumulate: int, settings: dict[str, Any]) -> Run:
    """The same with hetero, sharded over all ranks; stage 2 inside no_sync(), as DDP is.

    With a disk in the least RAM that works, unless a budget is given.
    """
    model, optimizer = initialized(case, "fp32", in_least_memory(case, settings))
    held = settings["zero_stage"] == 2

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
        (lambda: hetero.no_sync(model)) if held else contextlib.nullcontext,
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


class Optional(nn.Module):
    """Its last part is used if that is said."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        x = self.middle(torch.tanh(self.first(x)))
        return self.last(x) if whole else x


def one_sided_parts(rank: int, world: int, stage: int) -> tuple[list[float], list[float]]:
    """Gradient norms of steps of two micro-batches, in which rank 0 alone uses the last part.

    Those of hetero, and those of plain PyTorch with the data of all ranks.
    """

    def loss(model: nn.Module, step: int, micro: int, of_rank: int) -> torch.Tensor:
        x = vectors(Where(step, micro, of_rank))
        found: torch.Tensor = model(x, of_rank == 0).square().mean() / 2
        return found

    settings = {"placement_policy": "cpu", "zero_stage": stage, "rank_timeout_s": 5.0}
    case = Case("optional", Optional, vectors, lambda model, x: model(x, True))
    model, optimizer = initialized(case, "fp32", settings)
    torch.manual_seed(0)
    plain = Optional()
    adam = plain_adam(plain, "fp32")
    found, expected = [], []
    for step in range(2):
        for micro in range(2):
            loss(model, step, micro, rank).backward()
            for each in range(world):
                (loss(plain, step, micro, each) / world).backward()
        found.append(hetero.clip_grad_norm_(model.parameters(), 1e30).item())
        expected.append(adam.norm())
        for optim in (optimizer, adam):
            optim.step()
            optim.zero_grad()
    optimizer.engine.close()
    return found, expected
