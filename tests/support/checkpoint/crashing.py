"""A training that is killed again and again, and goes on from what it last kept each time.

Children are forks of this process, which has imported everything and started no thread, so that a
life takes a fraction of a second. Each is killed by SIGKILL a random time after a random one of its
calls has begun: while it starts, loads, trains, saves or commits beside training, puts a checkpoint
in its place, removes an old one, or moves homes. When all kills are used up the last child makes
the remaining steps.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import hetero
from tests.support.checkpoint import small_trainings
from tests.support.checkpoint.small_trainings import build
from tests.support.training.small_net import Settings, loss_of

_DISK = {**small_trainings.PLACES["disk"], "debug": {"overlap_updates": "both"}}
PLACES: dict[str, Settings] = {
    "cpu": {"placement_policy": "cpu"},
    "disk": _DISK,
    "durable-cpu": {"placement_policy": "cpu", "durable": True},
    "durable-disk": {**_DISK, "durable": True},
    "durable-moving": {
        "placement_policy": "auto",
        "host_memory": "1MiB",
        "durable": True,
        "commit_every": 0,
    },
}
_BUDGETS = ("200KiB", "1MiB")  # of "durable-moving", in turns
_KEPT = 2
_CALLS = 8  # at most so many begin before a kill
_LATEST_S = 0.03  # after the last of them has begun


def life(folder: Path, place: str, steps: int, note: Callable[[str], None]) -> None:
    """Goes on from what is kept in `folder` and makes the remaining steps, keeping each: by
    checkpoints, saved beside training, or by commits, of step() itself or of the loop."""
    note("begin")
    torch.set_num_threads(1)
    scratch, run = folder / "scratch", folder / "run"
    scratch.mkdir(exist_ok=True)
    model, optimizer = build(PLACES[place], scratch)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    durable, loops = "durable" in PLACES[place], "commit_every" in PLACES[place]
    made = 0
    if durable:
        last = hetero.resume(model)
        made = 0 if last is None else last.step
        if last is not None and loops:
            scheduler.load_state_dict(last.extra["scheduler"])
            assert last.extra["made"] == made
    elif hetero.latest_checkpoint(run) is not None:
        note("load")
        made = hetero.load(run, model, optimizer, extra={"scheduler": scheduler}).extra["made"]
    for step in range(made, steps):
        note("train")
        loss = loss_of(model, step) * torch.rand(())  # random numbers go on, too
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if loops or not durable:
            scheduler.step()
            note("commit" if loops else "save")
            extra = {"scheduler": scheduler, "made": step + 1}
            if loops:
                kept = hetero.commit(model, extra=extra)
            else:
                path = run / f"step-{step + 1}"
                kept = hetero.save(path, model, optimizer, extra=extra, blocking=False, keep=_KEPT)
            if step % 3 == 0:
                kept.wait()
        if place == "durable-moving":
            note("move")
            optimizer.engine.set_budget(_BUDGETS[step % 2])
    torch.save(hetero.masters(model.parameters()), folder / "masters.pt")
    optimizer.engine.close()


def child(run: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """Forks; returns the child's process, and a pipe with a letter for each call that begins."""
    here, there = os.pipe()
    process = os.fork()
    if process:
        os.close(there)
        return process, here
    code = 1
    try:
        os.close(here)
        run(lambda what: os.write(there, what[:1].encode()) and None)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def crash(folder: Path, place: str, kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Runs the training with and without kills, and compares: how many lives were killed in what,
    whether the masters are the same, and which checkpoints are left."""
    generator = random.Random(seed)
    plain, killed = folder / "plain", folder / "killed"
    for each in (plain, killed):
        each.mkdir()
    process, calls = child(lambda note: life(plain, place, steps, note))
    assert os.waitpid(process, 0)[1] == 0
    os.close(calls)
    died_in: Counter[str] = Counter()
    while True:
        process, calls = child(lambda note: life(killed, place, steps, note))
        last = b""
        if sum(died_in.values()) < kills:
            for _ in range(generator.randint(1, _CALLS)):
                last = os.read(calls, 1) or last  # (nothing: it has ended)
            time.sleep(_LATEST_S * generator.random())
            os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        os.close(calls)
        if os.WIFSIGNALED(status):
            died_in[last.decode()] += 1
            continue
        assert os.waitstatus_to_exitcode(status) == 0, "a life failed by itself"
        if sum(died_in.values()) >= kills:
            break
        # It was faster than the kill: the training begins anew.
        for path in (killed / "run", killed / "scratch" / "hetero-state"):
            shutil.rmtree(path, ignore_errors=True)
    found, wanted = (torch.load(each / "masters.pt") for each in (killed, plain))
    run = killed / "run"
    left = sorted(path.name for path in run.iterdir()) if run.exists() else []
    same = all(map(torch.equal, found, wanted))
    return {"died_in": died_in, "same": same, "left": left}


def growth(folder: Path, place: str) -> list[tuple[int, int]]:
    """The least bytes of resident memory and numbers of descriptors in the second and in the last
    hundred of 1,000 steps: a save that is under way has some more of both for a while."""
    process, made = psutil.Process(), 0
    found = {hundred: list[tuple[int, int]]() for hundred in (1, 9)}

    def note(what: str) -> None:
        nonlocal made
        if what == "train":
            if made // 100 in found:
                found[made // 100].append((process.memory_info().rss, process.num_fds()))
            made += 1

    life(folder, place, 1000, note)
    return [(min(rss for rss, _ in each), min(fds for _, fds in each)) for each in found.values()]
