"""Ranks that read each other's memory. Each function runs on every rank."""

from __future__ import annotations

import errno
import os
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh

import hetero
import hetero.ranks.communicator
from hetero.ranks.gathered_parts import GatheredParts
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.reduction.mean import RankMean
from tests.support.native.seccomp import refuse
from tests.support.ranks.rank_training import inputs, make

STEPS = 3
_PROCESS_VM_READV = 310 if os.uname().machine == "x86_64" else 270


def train(
    rank: int, world: int, options: dict[str, Any], how: str, replicas: int = 1
) -> dict[str, Any]:
    """`how`: "read", "sent" by gloo, or "refused" by the system to the last rank."""
    where: dict[str, Any] = {}
    if replicas > 1:
        where["mesh"] = init_device_mesh("cpu", (replicas, world // replicas))
    if how == "refused" and rank == world - 1:
        refuse(_PROCESS_VM_READV, errno.EPERM)
    connect = hetero.ranks.communicator.connect_peer_memory
    if how == "sent":
        connect = lambda peers: None  # noqa: E731
    with patch("hetero.ranks.communicator.connect_peer_memory", connect):
        model, optimizer = make("layers", {"chunk_numel": 32768} | options, **where)
    engine = optimizer.engine
    losses = []
    for step in range(STEPS):
        for micro_batch in range(2):
            loss = model(inputs(rank, 10 * step + micro_batch, 128)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "losses": torch.stack(losses),
        "masters": [master.clone() for master in hetero.masters(model.parameters())],
        "reads": all(group.reads_memory for group in engine.world.groups()),
    }
    engine.close()
    return found


def write_afterwards(rank: int, world: int) -> int:
    """Gathers and averages again and again, and changes what it gave as soon as it may.

    Returns how many elements another rank's came too late, or from another turn.
    """
    ranks = ProcessGroups(60.0)
    group = ranks.shard
    assert group is not None
    assert group.reads_memory
    numel = 1 << 18
    wrong = 0
    for turn in range(50):
        part = torch.full((numel,), float(10 * turn + rank))
        whole = torch.empty(world * numel)
        group.gather_parts(part, GatheredParts(whole, world), "it", Channel.GATHERS)
        part.fill_(-1.0)
        for peer, theirs in enumerate(whole.chunk(world)):
            wrong += int(theirs.ne(10 * turn + peer).sum())
        flat = torch.full((world * numel,), float(turn + rank))
        received = torch.empty_like(flat)
        mean = RankMean(ranks, flat, received, None, "a gradient")
        mean.wait()
        made = torch.empty(numel)
        mean.compute(made)
        flat.fill_(-1.0)
        wrong += int(made.ne(turn + (world - 1) / 2).sum())
    ranks.meet("the end")
    ranks.close()
    return wrong
