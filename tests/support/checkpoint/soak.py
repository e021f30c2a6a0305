"""A long training with a durable state, in which anything happens at random times.

    python -m tests.support.checkpoint.soak FOLDER SECONDS SEED

It saves, waiting or not, loads what it has saved, evaluates, moves its homes, commits, and is
killed, again and again. Children are forks, as in crashing.py. When the time is over the same
number of steps is made without any of that. Prints what soak() returns, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch

import hetero
from tests.support.training.small_net import Net, loss_of

OPTIONS: dict[str, Any] = {
    "placement_policy": "auto",
    "host_memory": "1MiB",
    "chunk_numel": 4096,
    "dtype": "bf16",
    "durable": True,
    "commit_every": 0,
}
_BUDGETS = ("200KiB", "300KiB", "1MiB")
_LIFE_STEPS = 2000  # after which a life ends by itself, unless it was killed before
_LEAST_STEPS = 20  # which a life makes, also if the time is over
_WARM_UP_STEPS = 200


class Life:
    """One process's part of the training."""

    def __init__(self, folder: Path, chances: random.Random, options: dict[str, Any]) -> None:
        """Goes on from the last commit."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.folder, self.chances = folder, chances
        self.model = Net()
        optimizer = hetero.HybridAdam(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        scratch = folder / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        given = {**options, "nvme_path": str(scratch)}
        self.model, self.optimizer = hetero.initialize(self.model, optimizer, **given)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 500, 0.9)
        self.durable = bool(options.get("durable"))
        self.made = 0
        if self.durable:
            last = hetero.resume(self.model, extra={"scheduler": self.scheduler})
            self.made = 0 if last is None else int(last.extra["made"])

    def step(self) -> None:
        """Also by random numbers that go on."""
        loss = loss_of(self.model, self.made) * torch.rand(())
        self.optimizer.backward(loss)
        hetero.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.made += 1

    def something(self) -> str:
        """Does something at random, which changes no number; its name."""
        what = self.chances.choices(
            ["", "commit", "save", "save beside", "load", "evaluate", "move"],
            [60, 30, 1, 2, 1, 4, 2],
        )[0]
        extra = {"scheduler": self.scheduler, "made": self.made}
        path = self.folder / "run" / f"step-{self.made}"
        if what == "commit":
            hetero.commit(self.model, extra=extra, blocking=self.chances.random() < 0.3)
        elif what == "save beside":
            hetero.save(path, self.model, self.optimizer, extra=extra, blocking=False, keep=2)
        elif what == "save":
            hetero.save(path, self.model, self.optimizer, extra=extra, keep=2)
        elif what == "load":
            hetero.save(path, self.model, self.optimizer, extra=extra, keep=2)
            hetero.load(path, self.model, self.optimizer, extra={"scheduler": self.scheduler})
        elif what == "evaluate":
            state = torch.get_rng_state()
            with torch.no_grad():
                loss_of(self.model, 7).item()
            torch.set_rng_state(state)
        elif what == "move":
            self.optimizer.engine.set_budget(self.chances.choice(_BUDGETS))
        return what


def train(folder: Path, until_s: float, seed: int, told: int) -> None:
    """A life; writes to `told` a line of JSON of what happened, step by step, and in the end."""
    life = Life(folder, random.Random(seed), OPTIONS)
    first = life.made
    while life.made - first < _LIFE_STEPS:
        if time.monotonic() > until_s and life.made - first >= _LEAST_STEPS:
            break
        life.step()
        what = life.something()
        figures = {}
        if life.made - first in (_WARM_UP_STEPS, _LIFE_STEPS):
            gc.collect()
            process = psutil.Process()
            figures = {"rss": process.memory_info().rss, "descriptors": process.num_fds()}
        os.write(told, json.dumps({"what": what, **figures}).encode() + b"\n")
    extra = {"scheduler": life.scheduler, "made": life.made}
    hetero.commit(life.model, extra=extra, blocking=True)
    life.optimizer.engine.close()


def one_life(folder: Path, until_s: float, seed: int) -> tuple[bool, list[dict[str, Any]]]:
    """Forks one, and perhaps kills it; whether it was killed, and what it told."""
    here, there = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            train(folder, until_s, seed, there)
            code = 0
        finally:
            os._exit(code)
    os.close(there)
    chances = random.Random(-seed)
    kills = chances.random() < 0.7
    lines = 0 if not kills else int(10 ** chances.uniform(0, 3))
    content = b""
    while part := os.read(here, 1 << 16):
        content += part
        if kills and content.count(b"\n") >= lines:
            time.sleep(chances.random() * 0.02)
            os.kill(process, signal.SIGKILL)
            kills = False
            lines = -1
    os.close(here)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, -signal.SIGKILL), f"a life failed by itself: {status}"
    whole = content[: content.rfind(b"\n") + 1]
    return status != 0, [json.loads(line) for line in whole.splitlines()]


def soak(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Lives until the time is over and a life has ended by itself, then the same undisturbed.

    Returns how often what happened, whether the masters are the same, and of the longest lives how
    much resident memory and how many descriptors they had after a tenth of their steps, and in the
    end.
    """
    until_s, happened, growth = time.monotonic() + seconds, Counter[str](), list[Any]()
    number = 0
    while time.monotonic() < until_s or happened["kills"] == happened["lives"]:
        number += 1
        killed, told = one_life(folder / "soaked", until_s, seed + number)
        happened["kills"] += killed
        happened["lives"] += 1
        happened.update(each["what"] for each in told if each["what"])
        figures = [each for each in told if "rss" in each]
        if len(figures) == 2:
            growth.append([[each["rss"], each["descriptors"]] for each in figures])
    soaked = Life(folder / "soaked", random.Random(0), OPTIONS)
    plain = Life(folder / "plain", random.Random(0), {"placement_policy": "cpu", "dtype": "bf16"})
    while plain.made < soaked.made:
        plain.step()
    found, wanted = (hetero.masters(life.model.parameters()) for life in (soaked, plain))
    same = all(map(torch.equal, found, wanted))
    steps = soaked.made
    for life in (soaked, plain):
        life.optimizer.engine.close()
    return {"steps": steps, "happened": happened, "same": same, "growth": growth}


if __name__ == "__main__":
    print(json.dumps(soak(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))
