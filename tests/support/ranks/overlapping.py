"""What ranks whose updates go on during forward do in tests. Each function runs on every rank."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import torch

from hetero.chunk_groups.update_tasks import UpdateTasks
from hetero.chunks.layout import Chunk
from hetero.runtime.update_schedule import UpdateSchedule
from tests.support.ranks.rank_training import finish, inputs, make, train_step


def opposite_orders(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """After each step one rank uses the layers from the first on, the other from the last on."""
    model, optimizer = make("layers", {"chunk_numel": 16384, "rank_timeout_s": 20.0} | options)
    found: list[torch.Tensor] = []
    for number in range(3):
        train_step(model, optimizer, inputs(rank, number, 128))
        x = inputs(0, number, 128)
        numbers = list(range(len(model.layers)))
        with torch.no_grad():
            used = {i: model.layers[i](x) for i in (numbers if rank == 0 else numbers[::-1])}
        found += [used[i] for i in numbers]
    return found + finish(model, optimizer)


def clipped_steps(
    rank: int, world: int, options: dict[str, Any], clips: list[float]
) -> tuple[list[int], list[torch.Tensor]]:
    """A step for each of `clips`; how many chunks backward updated in each, and the masters."""
    model, optimizer = make("layers", {"chunk_numel": 16384, "rank_timeout_s": 30.0} | options)
    chunk_groups = optimizer.engine.chunk_groups
    early: list[int] = []
    for step, clip in enumerate(clips):
        model(inputs(rank, step, 128)).square().mean().backward()
        early.append(sum(len(group.updates.speculative) for group in chunk_groups))
        if clip < 0:  # used before step(), by one rank alone
            with torch.no_grad():
                assert rank > 0 or model.layers[-1].weight.isfinite().all()
        torch.nn.utils.clip_grad_norm_(model.parameters(), abs(clip))
        optimizer.step()
        optimizer.zero_grad()
    return early, finish(model, optimizer)


def read_while_submitting(
    rank: int, world: int, options: dict[str, Any]
) -> tuple[list[bool], list[torch.Tensor]]:
    """Trains; as a chunk's update of backward is submitted, another thread reads its shard.

    Returns whether that saw the values from before, once for each read, and the masters.
    """
    model, optimizer = make("layers", {"chunk_numel": 16384, "rank_timeout_s": 30.0} | options)
    (chunk_group,) = optimizer.engine.chunk_groups
    saw: list[bool] = []
    threads: list[Thread] = []

    def read(chunk: Chunk) -> torch.Tensor:
        with chunk_group.params.copies.shards.open(chunk) as shard:
            return shard.clone()

    def submit(tasks: UpdateTasks, update: Any, last: bool) -> None:
        if not last:
            chunk = update.chunks[0].chunk
            threads.append(Thread(target=lambda: saw.append(torch.equal(read(chunk), old[chunk]))))
            threads[-1].start()
            threads[-1].join(0.05)
        submit_now(tasks, update, last)

    submit_now = UpdateTasks.submit
    with patch.object(UpdateTasks, "submit", submit):
        for step in range(4):
            loss = model(inputs(rank, step, 128)).square().mean()
            old = {chunk: read(chunk) for chunk in chunk_group.layout.chunks}
            loss.backward()
            for thread in threads:
                thread.join()
            optimizer.step()
            optimizer.zero_grad()
    return saw, finish(model, optimizer)


def asked_before_the_update(
    rank: int, world: int, options: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rank 0 has made a step, and asks rank 1 for values whose update that has not begun.

    Returns what each rank saw right after the step, and the masters.
    """
    options = {
        "chunk_numel": 16384,
        "rank_timeout_s": 20.0,
        "debug": {"overlap_updates": "none"},
    } | options
    model, optimizer = make("layers", options)
    (chunk_group,) = optimizer.engine.chunk_groups
    assert chunk_group.ranks is not None
    (server,) = chunk_group.ranks.servers
    wait_for, reply = server._versions.wait_for, server.peers.reply
    asked, answered = Event(), Event()

    def wait_noted(chunk: Chunk, version: int) -> None:
        asked.set()
        wait_for(chunk, version)

    def reply_noted(*arguments: Any) -> None:
        reply(*arguments)
        answered.set()

    def submit_late(*arguments: Any) -> None:
        assert asked.wait(20.0)
        answered.wait(0.3)  # (an answer could be late, but not early)
        submit_rest(*arguments)

    submit_rest = UpdateSchedule._submit_rest
    model(inputs(rank, 0, 128)).square().mean().backward()
    with (
        patch.object(server._versions, "wait_for", wait_noted),
        patch.object(server.peers, "reply", reply_noted),
        patch.object(UpdateSchedule, "_submit_rest", submit_late if rank == 1 else submit_rest),
    ):
        optimizer.step()
        seen = [layer.weight.detach().clone() for layer in model.layers]
    return seen, finish(model, optimizer)


def failed_update(rank: int, world: int, options: dict[str, Any]) -> str:
    """What each rank is told in the forward after a step whose update failed on the second one."""
    options = {
        "chunk_numel": 16384,
        "rank_timeout_s": 10.0,
        "debug": {"overlap_updates": "forward"},
    } | options
    model, optimizer = make("layers", options)
    model(inputs(rank, 0, 128)).square().mean().backward()
    if rank == 1:
        optimizer.engine.chunk_groups[0].pipeline.inject(0)
    optimizer.step()
    told = "nothing"
    try:
        model(inputs(rank, 1, 128))
    except Exception as error:  # of the update, or that the other rank refused
        told = str(error)
    optimizer.engine.close()
    return told
