"""What ranks whose updates go on during forward do in tests. Each function runs on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh

import hetero
from hetero.chunk_groups.update_tasks import UpdateTasks
from hetero.chunks.layout import Chunk
from tests.support.ranks.rank_training import Layers, inputs, make


def opposite_orders(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """After each step one rank uses the layers from the first on, the other from the last on."""
    model, optimizer = make("layers", {"chunk_numel": 16384, "rank_timeout_s": 20.0} | options)
    found: list[torch.Tensor] = []
    for step in range(3):
        model(inputs(rank, step, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        x = inputs(0, step, 128)
        numbers = list(range(len(model.layers)))
        with torch.no_grad():
            used = {i: model.layers[i](x) for i in (numbers if rank == 0 else numbers[::-1])}
        found += [used[i] for i in numbers]
    found += hetero.masters(model.parameters())
    optimizer.engine.close()
    return found


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
    masters = hetero.masters(model.parameters())
    optimizer.engine.close()
    return early, masters


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
    masters = hetero.masters(model.parameters())
    optimizer.engine.close()
    return saw, masters


def failed_update(rank: int, world: int, options: dict[str, Any]) -> str:
    """What each rank is told in the forward after a step whose update failed on the second one."""
    options = {"chunk_numel": 16384, "rank_timeout_s": 10.0, "overlap_updates": "forward"} | options
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


def undone_steps(
    rank: int, world: int, options: dict[str, Any], undone: list[int], mesh: bool = False
) -> tuple[list[torch.Tensor], int]:
    """Trains, and after each step in `undone` makes another one that is undone, clipped or not.

    Returns the losses and the masters, and the bytes that the ranks have written.
    """
    where = {"mesh": init_device_mesh("cpu", (2, world // 2))} if mesh else {}
    options = {"chunk_numel": 16384, "rank_timeout_s": 30.0, "undoable_steps": True} | options
    model, optimizer = make("layers", options, **where)
    found: list[torch.Tensor] = []
    for step in range(6):
        for again in [False, True] if step in undone else [False]:
            loss = model(inputs(rank, 50 * again + step, 128)).square().mean()
            loss.backward()
            clip = 1e-3 if step == 4 else 9.0
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if not again:
                found.append(loss.detach())
                continue
            if step % 2 and rank == 0:  # an evaluation by one rank alone
                with torch.no_grad():
                    model(inputs(rank, 99, 128))
            optimizer.undo_last_step()
    found += hetero.masters(model.parameters())
    optimizer.engine.close()
    return found


def undo_that_one_rank_cannot(
    rank: int, world: int, options: dict[str, Any]
) -> tuple[str, list[torch.Tensor]]:
    """What each rank is told if a parameter is in use on one, and the masters afterwards."""
    options = {"chunk_numel": 16384, "rank_timeout_s": 20.0, "undoable_steps": True} | options
    model, optimizer = make("layers", options)
    model(inputs(rank, 0, 128)).square().mean().backward()
    optimizer.step()
    after = hetero.masters(model.parameters())
    used = hetero.gathered(model.layers[1].weight) if rank == 1 else nullcontext()
    told = "nothing"
    with used:
        try:
            optimizer.undo_last_step()
        except hetero.HeteroError as error:
            told = str(error)
    found = hetero.masters(model.parameters())
    assert all(map(torch.equal, found, after))
    optimizer.undo_last_step()
    found = hetero.masters(model.parameters())
    optimizer.engine.close()
    return told, found


def first_masters() -> list[torch.Tensor]:
    """The masters before any step, as they are without hetero."""
    torch.manual_seed(0)
    return [p.detach() for p in Layers(12).parameters()]
