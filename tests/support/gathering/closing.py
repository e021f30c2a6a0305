"""Ranks of which some close their engines while the others compute. Each runs on every rank."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from offload.errors import PeerError
from tests.support.ranks.rank_training import inputs, make

FORWARDS = 4


def close_early(
    rank: int, world: int, options: dict[str, Any], quits: list[int], pause_s: float
) -> tuple[list[torch.Tensor], str]:
    """After two steps the ranks `quits` close their engines; the others compute, and then train.

    Returns what these computed, and what they were told when they trained.
    """
    model, optimizer = make("layers", {"chunk_numel": 16384, "rank_timeout_s": 30.0} | options)
    engine = optimizer.engine
    for step in range(2):
        model(inputs(rank, step, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stay = [peer for peer in range(world) if peer not in quits]
    rest = dist.new_group(stay, backend="gloo")
    if rank in quits:
        time.sleep(pause_s)
        engine.close()
        return [], ""
    found: list[torch.Tensor] = []
    for number in range(FORWARDS):
        with torch.set_grad_enabled(number % 2 == 0):
            found.append(model(inputs(rank, 10 + number, 128)).detach().clone())
    told = ""
    if quits:
        dist.barrier(rest)  # (who fails then says so to all)
        try:
            model(inputs(rank, 20, 128)).square().mean().backward()
            optimizer.step()
        except PeerError as error:
            told = str(error)
    engine.close()
    return found, told
