"""Programs that keep state, each in a folder of its own, whose changes are recorded.

    LD_PRELOAD=recorder.so python -m tests.support.power_loss.program FOLDER

Makes in FOLDER, for each of PROGRAMS, a folder and NAME.log, and prints the folders' inodes as
JSON. They do I/O by threads, because what io_uring does is not seen from here.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hetero
from hetero.checkpoint.formats import convert
from offload._native import IoEngine
from offload.disk import scratch_file
from offload.disk.durable import sync_path
from tests.support.checkpoint.small_trainings import PLACES, build, steps
from tests.support.power_loss.replay import MARKS
from tests.support.training.small_net import Net, Settings

STEPS = 3
STRIPED = ("first", "second")
CONFIGS = ("config.json", "generation_config.json")


def mark(folder: Path, what: object) -> None:
    """The program was told that this is durable."""
    with (folder / MARKS).open("a") as stream:
        stream.write(f"{what}\n")


def striped(folder: Path) -> Settings:
    """Over two directories in the folder, which are made where they are missing."""
    paths = [folder / name for name in STRIPED]
    for path in paths:
        path.mkdir(exist_ok=True)
    sync_path(folder)
    return {"nvme_path": list(map(str, paths))}


def durable(folder: Path, place: str, **more: Any) -> None:
    """Commits each step."""
    options = {
        **PLACES[place],
        **more,
        "durable": True,
        "commit_every": 0,
        "debug": {"io_engine": "threads"},
    }
    model, optimizer = build(options, folder)
    for step in range(STEPS):
        steps(model, optimizer, range(step, step + 1))
        commit = hetero.commit(model)
        if step % 2:  # (the others are under way while the next step begins)
            commit.wait()
            mark(folder, step + 1)
    optimizer.engine.close()
    mark(folder, STEPS)


def go_on(folder: Path, place: str) -> None:
    """Starts a second time, with one more step, and removes the files of the first start."""
    durable(folder, place)
    options = {**PLACES[place], "durable": True, "debug": {"io_engine": "threads"}}
    model, optimizer = build(options, folder)
    hetero.resume(model)
    steps(model, optimizer, range(STEPS, STEPS + 1))
    optimizer.engine.close()
    mark(folder, STEPS + 1)


def save(folder: Path) -> None:
    """Saves each step to the same path, and to one of its own, of which two are kept."""
    with_scratch = {**PLACES["disk"], "debug": {"io_engine": "threads"}}
    model, optimizer = build(with_scratch, folder)
    for step in range(STEPS):
        steps(model, optimizer, range(step, step + 1))
        hetero.save(folder / "same", model, optimizer)
        mark(folder, step + 1)
        hetero.save(folder / "run" / f"step-{step + 1}", model, optimizer, keep=2)
        mark(folder, f"own-{step + 1}")
    optimizer.engine.close()


def conversion(folder: Path) -> None:
    """Converts a checkpoint to all formats."""
    model, optimizer = build(PLACES["cpu"], folder)
    steps(model, optimizer, range(1))
    hetero.save(folder.parent / "to-convert", model, optimizer)
    optimizer.engine.close()
    for to in ("hf", "dcp", "hetero"):
        convert(folder.parent / "to-convert", folder / to, to=to)
        mark(folder, to)


class Config:
    """A configuration, of which transformers' models have two; importing them takes seconds."""

    def __init__(self, name: str) -> None:
        self.name = name

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / self.name).write_text(json.dumps({"width": 64}))


def configured(seed: int) -> Net:
    """A net that is exported as transformers' models are."""
    torch.manual_seed(seed)
    model = Net()
    model.config, model.generation_config = map(Config, CONFIGS)  # type: ignore[assignment]
    return model


def export(folder: Path) -> None:
    """Exports two models, one after the other, to the same path, each as several files."""
    for seed in range(2):
        model = configured(seed)
        optimizer = hetero.HybridAdam(model.parameters())
        hetero.initialize(model, optimizer, placement_policy="cpu", dtype="fp32")
        hetero.save_pretrained(model, folder / "out", max_shard_bytes=8000)
        mark(folder, seed + 1)
        optimizer.engine.close()


PROGRAMS: dict[str, Callable[[Path], None]] = {
    "durable-cpu": lambda folder: durable(folder, "cpu"),
    "durable-disk": lambda folder: durable(folder, "disk"),
    "durable-striped": lambda folder: durable(folder, "disk", **striped(folder)),
    "durable-speculative": lambda folder: durable(folder, "speculative"),
    "durable-twice": lambda folder: go_on(folder, "waiting"),
    "save": save,
    "convert": conversion,
    "export": export,
}


def main(folder: Path) -> None:
    """Runs all, and says which inodes their folders have."""

    def by_threads(kind: str, **options: Any) -> IoEngine:
        return IoEngine("threads", **options)

    scratch_file.IoEngine = by_threads  # type: ignore
    scratch_file.UNIT_BYTES = 1 << 16  # so that small states are in each of two directories
    record = ctypes.CDLL(None).record_changes
    inodes = {}
    for name, program in PROGRAMS.items():
        path = folder / name
        path.mkdir()
        inodes[name] = os.stat(path).st_ino
        assert record(os.fsencode(path), os.fsencode(folder / f"{name}.log")) >= 0
        program(path)
        record(b"", b"")
    print(json.dumps(inodes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
