"""Training of a case on several ranks, by hetero and by DistributedDataParallel."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hetero
from tests.support.tiling import tiled_models
from tests.zoo import handwritten, pretrained
from tests.zoo.case import WIDTH, Case, Where, vectors
from tests.zoo.runs import (
    Run,
    in_dtype,
    initialized,
    least_host_memory,
    plain_adam,
    run_hetero,
    train,
)

CASES = {case.name: case for case in [*handwritten.CASES, *pretrained.CASES, *tiled_models.CASES]}


def mean_of_ranks(mine: torch.Tensor, world: int) -> torch.futures.Future[torch.Tensor]:
    """What DDP's communication hook gives for a bucket: means as hetero documents them.

    Sums in fp32, in the ranks' order, rounded once; gloo's all-reduce adds in the bucket's dtype.
    """
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result((total / world).to(mine.dtype))
    return done


def run_ddp(
    rank: int, world: int, case: Case, dtype: str, accumulate: int, held: bool, own_mean: bool
) -> Run:
    """The oracle: DDP averages gradients over ranks; then comes the documented update.

    `held`: gradients of micro-batches are added up on each rank, and averaged once; otherwise their
    means are added up. `own_mean`: as DDP averages them itself, not as hetero documents it.
    """
    torch.manual_seed(0)
    model = case.make()
    optimizer = plain_adam(model, dtype)
    # Ranks keep buffers of their own; DDP would copy the first rank's before each forward.
    ddp = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
    if not own_mean:
        ddp.register_comm_hook(None, lambda _, bucket: mean_of_ranks(bucket.buffer(), world))

    def backward(loss: torch.Tensor) -> None:
        before = {p: p.grad for p in optimizer.masters if p.grad is not None}
        if not held:
            optimizer.zero_grad()
        loss.backward()
        if not held:
            for p, grad in before.items():
                p.grad = grad if p.grad is None else grad + p.grad

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    no_sync = ddp.no_sync if held else contextlib.nullcontext
    case = in_dtype(case, dtype)
    run = train(case, ddp, accumulate, backward, optimizer.norm, step, rank, no_sync)
    run.masters = optimizer.whole(model)
    run.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return run


def in_least_memory(case: Case, dtype: str, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`, with a disk in the least RAM that works. All ranks must call it."""
    if settings["placement_policy"] != "nvme" or "host_memory" in settings:
        return settings
    stage, path = settings["zero_stage"], settings["nvme_path"]
    least = torch.tensor(least_host_memory(case, dtype, path, zero_stage=stage))
    dist.all_reduce(least, dist.ReduceOp.MAX)  # shards differ in size, by a padding
    return {**settings, "host_memory": int(least)}


def both(
    rank: int,
    world: int,
    name: str,
    dtype: str,
    accumulate: int,
    settings: list[dict[str, Any]],
    own_mean: bool = False,
) -> list[tuple[Run, Run]]:
    """A rank's runs of the case by DDP and by hetero, for each of `settings`."""
    case = CASES[name]
    by_ddp: dict[bool, Run] = {}
    found = []
    for each in settings:
        # Stage 1 averages a step's sum, stage 3 every micro-batch; stage 2 is in no_sync().
        held = accumulate > 1 and each["zero_stage"] < 3
        if held not in by_ddp:
            by_ddp[held] = run_ddp(rank, world, case, dtype, accumulate, held, own_mean)
        options = in_least_memory(case, dtype, each)
        found.append((by_ddp[held], run_hetero(case, dtype, accumulate, options, rank)))
    return found


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

    settings = {"placement_policy": "cpu", "zero_stage": stage, "rank_timeout_s": 60.0}
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
