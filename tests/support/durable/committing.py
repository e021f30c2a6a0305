"""Ranks whose state is durable."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import hetero
from hetero.durable import commits
from hetero.durable.record import RecordFiles
from hetero.durable.state_folder import StateFolder
from hetero.durable.state_set import StateSet
from hetero.state.state_files import is_state_file
from tests.support.ranks.checkpointing import OPTIONS, build, steps, whole

FOLDER = "hetero-state"


def commit(rank: int, world: int, path: str) -> dict[str, Any]:
    """Three steps, of which the first two are committed, and two more without commits.

    What the folder has after two is copied: another start goes on from there.
    """
    options = {**OPTIONS[world], "durable": True, "commit_every": 0}
    scratch = Path(path) / f"scratch-{world}"
    if rank == 0:
        scratch.mkdir()
    torch.distributed.barrier()
    model, optimizer = build(rank, world, str(scratch), 0, options)
    assert hetero.resume(model) is None
    steps(rank, model, optimizer, range(1))
    hetero.commit(model)
    steps(rank, model, optimizer, range(1, 2))
    hetero.commit(model, extra={"rank": rank}, blocking=True)
    stored = whole(model, optimizer)
    torch.distributed.barrier()
    if rank == 0:
        shutil.copytree(scratch, Path(path) / f"of-{world}")
    torch.distributed.barrier()
    steps(rank, model, optimizer, range(2, 4))
    found = {"stored": stored, "then": whole(model, optimizer)}
    optimizer.engine.close()
    return found


def go_on(rank: int, world: int, path: str, committed_by: list[int]) -> dict[int, Any]:
    """Goes on from what each of these numbers of ranks has committed, with two steps more."""
    found: dict[int, Any] = {}
    for count in committed_by:
        scratch = Path(path) / f"of-{count}-for-{world}"
        if rank == 0:
            shutil.copytree(Path(path) / f"of-{count}", scratch)
        torch.distributed.barrier()
        options = {**OPTIONS[world], "durable": True}
        model, optimizer = build(rank, world, str(scratch), 7, options)
        last = hetero.resume(model)
        assert last is not None
        stored = whole(model, optimizer)
        steps(rank, model, optimizer, range(2, 4))
        then = whole(model, optimizer)
        optimizer.engine.close()
        names = filter(is_state_file, os.listdir(scratch / FOLDER))
        found[count] = {
            "step": last.step,
            "ranks": last.ranks,
            "rank": last.extra["rank"],
            "stored": stored,
            "then": then,
            "generations": sorted({name.split("-")[0] for name in names}),
        }
    return found


def die_while_committing(rank: int, world: int, path: str, call: str) -> str:
    """Rank 1 is killed in the second commit, and what the other meets.

    `call` is the one before which it dies: "sync" (of its data), "write" (of its record), or
    "remove" (the agreement is behind it).
    """
    options = {**OPTIONS[2], "durable": True, "commit_every": 0, "rank_timeout_s": 20.0}
    model, optimizer = build(rank, world, path, 0, options)
    steps(rank, model, optimizer, range(1))
    hetero.commit(model, blocking=True)
    steps(rank, model, optimizer, range(1, 2))
    if rank == 1:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        owner, name = {
            "sync": (commits, "check_named"),
            "write": (RecordFiles, "write"),
            "remove": (StateFolder, "remove_older"),
        }[call]
        setattr(owner, name, die)
    try:
        hetero.commit(model, blocking=True)
    except hetero.HeteroError as error:
        return f"{type(error).__name__}: {error}"
    return "committed"


def after_two_steps(rank: int, world: int, path: str) -> list[list[torch.Tensor]]:
    """What the ranks have after each step, without a crash."""
    model, optimizer = build(rank, world, path, 0, OPTIONS[world])
    found = []
    for step in range(2):
        steps(rank, model, optimizer, range(step, step + 1))
        found.append(whole(model, optimizer))
    optimizer.engine.close()
    return found


def go_on_from_crash(rank: int, world: int, path: str) -> tuple[int, list[torch.Tensor]]:
    """What ranks that start on these files have, and after how many steps."""
    model, optimizer = build(rank, world, path, 7, {**OPTIONS[world], "durable": True})
    last = hetero.resume(model)
    found = whole(model, optimizer)
    optimizer.engine.close()
    return 0 if last is None else last.step, found


def with_a_path_each(
    rank: int, world: int, path: str, steps_before: int, sees_all: bool
) -> tuple[int, list[torch.Tensor], tuple[str, ...]]:
    """Two steps from the last commit, in a directory that this rank alone has; `sees_all` is false
    as on machines of their own. Returns how many steps were made before, and what there is then.
    """
    own = Path(path) / f"rank-{rank}"
    own.mkdir(exist_ok=True)
    real = StateSet.read

    def read(folder: str, notes: list[str]) -> StateSet | None:
        return real(folder, notes) if folder.startswith(str(own)) else None

    options = {**OPTIONS[world], "durable": True}
    with ExitStack() as patches:
        if not sees_all:
            patches.enter_context(patch.object(StateSet, "read", staticmethod(read)))
        model, optimizer = build(rank, world, str(own), steps_before, options)
        last = hetero.resume(model)
        made = 0 if last is None else last.step
        steps(rank, model, optimizer, range(made, made + 2))
        found = whole(model, optimizer)
        optimizer.engine.close()
    return made, found, () if last is None else last.notes


def with_paths_in_part_shared(rank: int, world: int, path: str) -> str:
    """The error of ranks that have one of two directories in common."""
    own = [Path(path) / name for name in (f"rank-{rank}", "shared")]
    for each in own:
        each.mkdir(exist_ok=True)
    options = {**OPTIONS[world], "durable": True, "nvme_path": list(map(str, own))}
    try:
        build(rank, world, path, 0, options)
    except hetero.CheckpointError as error:
        return str(error)
    return "none"
