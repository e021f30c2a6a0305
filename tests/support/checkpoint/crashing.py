"""A training that is killed again and again, and goes on from its last checkpoint each time.

    python -m tests.support.checkpoint.crashing FOLDER PLACE KILLS STEPS SEED

Children are forks of this process, which has imported everything and started no thread, so that a
life takes a fraction of a second. Each is killed by SIGKILL a random time after a random one of its
calls has begun: while it starts, loads, trains, saves beside training, puts a checkpoint in its
place or removes an old one. When all kills are used up the last child makes the remaining steps.
Prints how many lives were killed in what, and whether the masters are those of a training without
kills, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

import hetero
from tests.support.training.small_net import Net, Settings, loss_of

PLACES: dict[str, Settings] = {
    "cpu": {"placement_policy": "cpu"},
    "disk": {"placement_policy": "nvme", "host_memory": "256KiB", "overlap_updates": "both"},
}
_KEPT = 2
_CALLS = 8  # at most so many begin before a kill
_LATEST_S = 0.03  # after the last of them has begun


def life(folder: Path, place: str, steps: int, note: Callable[[str], None]) -> None:
    """Goes on from the last checkpoint in `folder` and makes the remaining steps, saving each."""
    note("begin")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    options = {"nvme_path": str(scratch), "chunk_numel": 4096, "dtype": "bf16", **PLACES[place]}
    model, optimizer = hetero.initialize(model, optimizer, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    extra = {"scheduler": scheduler}
    made = 0
    if hetero.latest_checkpoint(folder / "run") is not None:
        note("load")
        made = hetero.load(folder / "run", model, optimizer, extra=extra).extra["made"]
    for step in range(made, steps):
        note("train")
        loss = loss_of(model, step) * torch.rand(())  # random numbers go on, too
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        note("save")
        path = folder / "run" / f"step-{step + 1}"
        last = hetero.save(
            path, model, optimizer, extra={**extra, "made": step + 1}, blocking=False, keep=_KEPT
        )
        if step % 3 == 0:
            last.wait()
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


def main(folder: Path, place: str, kills: int, steps: int, seed: int) -> None:
    """Runs the training with and without kills, and compares."""
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
        # It was faster than the kill: the training begins anew, from its first checkpoint.
        for path in sorted((killed / "run").iterdir()):
            os.rename(path, killed / f"old-{len(list(killed.iterdir()))}")
    found, wanted = (torch.load(each / "masters.pt") for each in (killed, plain))
    left = sorted(path.name for path in (killed / "run").iterdir())
    same = all(map(torch.equal, found, wanted))
    print(json.dumps({"died_in": died_in, "same": same, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]))
