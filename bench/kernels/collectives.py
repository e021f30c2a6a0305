"""Gathers and means of ranks beside gloo's collectives, over loopback."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing

from bench.harness.rounds import Rounds, Sample
from bench.peers.world import free_port
from offload.memory.sizes import format_bytes


def measure_collectives(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of one size. Raises ValueError for one that is too small."""
    ranks = arguments.ranks
    nbytes = arguments.size - arguments.size % (4 * ranks)
    if nbytes <= 0:
        raise ValueError(f"--size {arguments.size} is too small for {ranks} ranks")
    given = ranks, free_port(), nbytes, arguments.rounds, arguments.repeats
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(_rank, args=(*given, queue), nprocs=ranks)
    return {f"{format_bytes(nbytes)}, {ranks} ranks": Rounds(queue.get()).figures()}


def _rank(
    rank: int, ranks: int, port: int, nbytes: int, rounds: int, repeats: int, queue: Any
) -> None:
    """One rank; the first one puts its samples on the queue."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    samples: dict[str, list[Sample]] = {}
    for name, call in [*_calls(rank, ranks, nbytes).items()] * rounds:
        call()
        dist.barrier()
        bytes_before, began_s = _loopback_bytes(), time.perf_counter()
        for _ in range(repeats):
            call()
        dist.barrier()
        seconds = (time.perf_counter() - began_s) / repeats
        moved = (_loopback_bytes() - bytes_before) / repeats / nbytes
        samples.setdefault(name, []).append({"s": seconds, "bytes": moved})
    if rank == 0:
        queue.put(samples)
    dist.barrier()
    dist.destroy_process_group()


def _calls(rank: int, ranks: int, nbytes: int) -> dict[str, Callable[[], object]]:
    """What is measured, by name; all of it in fp32."""
    from hetero.ranks.collectives import GatheredParts
    from hetero.ranks.peers import Channel
    from hetero.ranks.process_groups import ProcessGroups
    from hetero.state.reduction.means import RankMean

    whole, received = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    part = whole.chunk(ranks)[rank].clone()
    world = ProcessGroups(300.0)
    with patch("hetero.ranks.communicator.connect_peer_memory", lambda _: None):
        by_gloo = ProcessGroups(300.0)

    def gather(world: ProcessGroups) -> None:
        assert world.shard is not None
        world.shard.gather_parts(part, GatheredParts(whole, ranks), "it", Channel.GATHERS)

    def mean(world: ProcessGroups) -> None:
        made = RankMean(world, whole, received, None, "a gradient")
        made.wait()
        made.compute(part)

    return {
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
        "hetero's gather": lambda: gather(world),
        "hetero's gather, by gloo": lambda: gather(by_gloo),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_to_all_single": lambda: dist.all_to_all_single(received, whole),
        "hetero's mean": lambda: mean(world),
        "hetero's mean, by gloo": lambda: mean(by_gloo),
    }


def _loopback_bytes() -> int:
    """What the loopback device has received so far; 0 where nobody counts."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))
