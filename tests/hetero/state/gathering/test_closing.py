"""A rank that closes its engine answers those that go on computing, whatever they gather."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetero
from hetero.ranks.peers import Channel
from hetero.ranks.process_groups import ProcessGroups
from offload.errors import PeerError
from tests.support.ranks.processes import RankPool
from tests.support.ranks.rank_training import inputs, make
from tests.support.waiting import PATIENCE_S

FORWARDS = 4


def trained(rank: int, options: dict[str, Any]) -> tuple[nn.Module, hetero.HybridAdam]:
    """A model and its optimizer after two steps."""
    model, optimizer = make("layers", {"chunk_numel": 16384, "rank_timeout_s": 30.0} | options)
    for step in range(2):
        model(inputs(rank, step, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def close_early(
    rank: int, world: int, options: dict[str, Any], quits: list[int], pause_s: float
) -> tuple[list[torch.Tensor], str]:
    """After two steps the ranks `quits` close their engines; the others compute, and then train.

    Returns what these computed, and what they were told when they trained.
    """
    model, optimizer = trained(rank, options)
    engine = optimizer.engine
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


def close_inside_forward(
    rank: int, world: int, options: dict[str, Any]
) -> tuple[list[torch.Tensor], bool]:
    """The last rank's forward raises in the middle, and it closes its engine; the others compute.

    Returns their outputs, and whether they know of a failure.
    """
    model, optimizer = trained(rank, options)
    engine = optimizer.engine

    def raise_own(*_: Any) -> None:
        raise ArithmeticError("the program's own")

    if rank == world - 1:
        model.layers[4].register_forward_pre_hook(raise_own)
        with contextlib.suppress(ArithmeticError):
            model(inputs(rank, 10, 128))
        engine.close()
        return [], False
    outputs = [model(inputs(rank, 10 + n, 128)).detach().clone() for n in range(FORWARDS)]
    failed = engine.world.failures.first is not None
    engine.close()
    return outputs, failed


def break_off_when_one_has(rank: int, world: int) -> bool:
    """Rank 0 breaks off, then rank 1 does; returns whether that has ended rank 1's wait for rank 2.

    The first connection of rank 1, to rank 0, is closed by then, and the one to rank 2 is not.
    """
    peers = ProcessGroups(60.0).everyone
    assert peers is not None
    group = peers.connection(Channel.ROUNDS, "a test")
    ended = True
    if rank == 1:
        into = torch.empty(1, dtype=torch.uint8)
        work = group.recv([into], 2, 5)
        wait = threading.Thread(target=_wait_quietly, args=[work], daemon=True)
        wait.start()
    dist.barrier()
    if rank == 0:
        peers.break_off(Channel.ROUNDS)
    dist.barrier()
    if rank == 1:
        peers.break_off(Channel.ROUNDS)
        wait.join(PATIENCE_S)
        ended = not wait.is_alive()
    dist.barrier()
    peers.close()
    return ended


def _wait_quietly(work: Any) -> None:
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(days=1))


# So long after the last step: before the others' next gather begins, during it, and after it.
PAUSES_S = [0.0, 0.003, 0.02]
WHOLE: dict[int, list[Any]] = {}  # by their number, of ranks that all go on


@pytest.mark.covering(1)
@pytest.mark.parametrize("pause_s", PAUSES_S)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks(ranks2: RankPool, stage: int, pause_s: float) -> None:
    check(ranks2, {"zero_stage": stage}, [1], pause_s)


def test_shards_on_nvme(ranks2: RankPool, tmp_path: Path) -> None:
    options = {"zero_stage": 3, "placement_policy": "nvme", "nvme_path": str(tmp_path)}
    check(ranks2, options, [0], 0.003)


@pytest.mark.parametrize("quits", [[0, 3], pytest.param([1, 2, 3], marks=pytest.mark.extra)])
def test_four_ranks(ranks4: RankPool, quits: list[int]) -> None:
    check(ranks4, {"zero_stage": 3}, quits, 0.003)


def test_an_error_of_the_program_inside_forward(ranks2: RankPool) -> None:
    """All-gathers are under way when the rank closes; what it answers comes all the same."""
    whole = of_whole(ranks2)
    for _ in range(2):
        found = ranks2.run(close_inside_forward, {"zero_stage": 3})
        for (outputs, failed), (right, _) in list(zip(found, whole, strict=True))[:-1]:
            assert all(map(torch.equal, outputs, right))
            assert not failed


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.extra), 3])
def test_devices_that_gather_by_themselves(ranks2: RankPool, stage: int) -> None:
    """What comes through RAM can be read; the link to the device is an emulated one."""
    options = {"backend": "emulated", "device_memory": "600KiB", "debug": {"link_gbps": 1.0}}
    check(ranks2, {"zero_stage": stage, **options}, [1], 0.003)


def test_an_end_of_one_connection_leaves_no_other_open(ranks4: RankPool) -> None:
    assert ranks4.run(break_off_when_one_has) == [True] * 4


def of_whole(ranks: RankPool) -> list[Any]:
    """Stages and placements change no bit."""
    if ranks.world not in WHOLE:
        WHOLE[ranks.world] = ranks.run(close_early, {"zero_stage": 3}, [], 0.0)
    return WHOLE[ranks.world]


def check(ranks: RankPool, options: dict[str, Any], quits: list[int], pause_s: float) -> None:
    whole = of_whole(ranks)
    found = ranks.run(close_early, options, quits, pause_s)
    for rank, ((outputs, told), (right, _)) in enumerate(zip(found, whole, strict=True)):
        if rank in quits:
            continue
        assert all(map(torch.equal, outputs, right))
        assert "closed its engine" in told
