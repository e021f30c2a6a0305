"""Ranks that do not use parameters alike. Each function runs on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import hetero
from hetero.state.chunk_updates import OwnShards
from hetero.state.gathering import all_gather
from hetero.state.gathering.all_gather import Gathering
from tests.support.ranks.rank_training import finish, inputs, make, train_step

OPTIONS: dict[str, Any] = {"chunk_numel": 16384, "rank_timeout_s": 30.0}
STEPS = 4


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """The chunks that this rank reads one-sided inside the block."""
    read, found = Gathering.read_alone, []

    def counting(self: Gathering, chunk: Any, whole: torch.Tensor) -> Any:
        found.append(chunk.name)
        return read(self, chunk, whole)

    with patch.object(Gathering, "read_alone", counting):
        yield found


def train(
    rank: int, world: int, options: dict[str, Any], how: str
) -> tuple[list[torch.Tensor], list[int]]:
    """Trains as `how` says; returns the masters, and how many chunks each step read one-sided."""
    model, optimizer = make("layers", OPTIONS | options)
    reads: list[int] = []
    # However slow this machine is, ranks that come are not given up.
    does_not_come = how == "waits elsewhere" and options.get("zero_stage", 3) == 3
    stall_s = 0.3 if does_not_come else 600.0
    with counted_reads() as found, patch.object(all_gather, "STALL_S", stall_s):
        for step in range(STEPS):
            count = {"uneven": 3 - rank, "in turns": 1 + (step + rank) % 2}
            for micro_batch in range(count.get(how, 1)):
                x = inputs(rank, 10 * step + micro_batch, 128)
                model(x.requires_grad_()).square().mean().backward()
            if how == "evaluates alone" and rank == step % world:
                with torch.no_grad():
                    model(inputs(rank, 99, 128))
            if how == "forward alone" and rank == step % world:
                model(inputs(rank, 99, 128))
            if how == "looks at weights" and rank == 0:
                assert all(bool(p.norm() > 0) for p in model.parameters())
            if how == "waits elsewhere":
                # The other rank is in code of its own until this one has made a pass alone.
                if rank == 0:
                    model(inputs(rank, 99, 128))
                dist.barrier()
            optimizer.step()
            optimizer.zero_grad()
            reads.append(len(found))
            found.clear()
    return finish(model, optimizer), reads


def unreadable_shard(
    rank: int, world: int, options: dict[str, Any]
) -> tuple[list[str], list[torch.Tensor]]:
    """Rank 1 cannot read a shard once; all are told, and train on. The errors, and the masters."""
    model, optimizer = make("layers", OPTIONS | options)
    opened, failing = OwnShards.open, [False]

    def open_or_fail(self: OwnShards, chunk: Any) -> Any:
        if failing[0] and "layers.5" in chunk.name:
            raise OSError(5, "a bad sector")
        return opened(self, chunk)

    errors: list[str] = []
    with patch.object(OwnShards, "open", open_or_fail):
        for number in range(STEPS):
            failing[0] = rank == 1 and number == 2
            x = inputs(rank, number, 128)
            try:
                train_step(model, optimizer, x)
            except (OSError, hetero.PeerError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                failing[0] = False
                optimizer.zero_grad()
                dist.barrier()  # so that all have met it
                train_step(model, optimizer, x)
    return errors, finish(model, optimizer)


def other_gathers(rank: int, world: int) -> str:
    """What a rank is told whose gathers are not those of the others."""
    model, optimizer = make("layers", OPTIONS)
    gathering = optimizer.engine.chunk_groups[0].ranks.gathering
    model(inputs(rank, 0, 128)).square().mean().backward()
    if rank == 1:
        gathering._digest.update(b"another chunk")
    try:
        optimizer.step()
    except hetero.HeteroError as error:
        return str(error)
    finally:
        with contextlib.suppress(hetero.HeteroError):
            optimizer.engine.close()
    return "nothing"
