"""Loss of power at any moment: what was told to be durable is there, whole, or what came later.

Programs run once, with all their changes recorded; what a loss could leave at many moments is made
from that, with unsynced writes lost and reordered, and gone on from.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hetero
from hetero.checkpoint.folder import is_checkpoint, latest_checkpoint
from hetero.checkpoint.formats import open_checkpoint
from tests.hetero.checkpoint.test_save_load import PLACES, ROOT, build, same, steps, whole
from tests.support.power_loss.program import PROGRAMS, STEPS, gpt2
from tests.support.power_loss.replay import MARKS, Disk, losses, read_log

RECORDER = ROOT / "tests" / "support" / "power_loss" / "recorder.cpp"
State = list[torch.Tensor]


@dataclass
class Recorded:
    """The programs' folder; their folders' inodes; and the state after each number of steps."""

    folder: Path
    inodes: dict[str, int]
    states: list[State] = field(repr=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for the recorder of changes")
    path = tmp_path_factory.mktemp("recorded")
    library = path / "recorder.so"
    options = ["-O1", "-std=c++20", "-shared", "-fPIC", "-Wno-nonnull"]
    subprocess.run([compiler, *options, "-o", library, RECORDER, "-ldl"], check=True)
    folder = path / "programs"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.power_loss.program", str(folder)],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model, optimizer = build(PLACES["cpu"], path)
    states = [whole(model, optimizer)]
    for step in range(STEPS + 1):
        steps(model, optimizer, range(step, step + 1))
        states.append(whole(model, optimizer))
    optimizer.engine.close()
    return Recorded(folder, json.loads(done.stdout.splitlines()[-1]), states)


def content(folder: Path) -> dict[str, bytes | None]:
    """What is in it, by relative path; None of a folder."""
    found = {path: path.relative_to(folder) for path in sorted(folder.rglob("*"))}
    return {
        str(name): None if path.is_dir() else path.read_bytes()
        for path, name in found.items()
        if name.name != MARKS
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_changes_were_recorded(recorded: Recorded, name: str, tmp_path: Path) -> None:
    """Made again they give what the program has left."""
    disk = Disk(recorded.inodes[name])
    for entry in read_log(recorded.folder / f"{name}.log"):
        disk.apply(entry)
    disk.write_after_loss(tmp_path / "made", random.Random(0), 1.0)
    assert content(tmp_path / "made") == content(recorded.folder / name)


def check_durable(folder: Path, marks: list[str], states: list[State]) -> int:
    """Returns the step from which the training goes on."""
    model, optimizer = build({**PLACES["cpu"], "durable": True}, folder, seed=0)
    last = hetero.resume(model)
    found = whole(model, optimizer)
    optimizer.engine.close()
    step = 0 if last is None else last.step
    assert step >= max((int(mark) for mark in marks), default=0)
    assert same(found, states[step])
    return step


def check_saved(folder: Path, marks: list[str], states: list[State]) -> int:
    """Of the checkpoint that is always at one path, and of the latest in the other folder."""
    least = max((int(mark) for mark in marks if mark.isdigit()), default=0)
    least_own = max((int(mark[4:]) for mark in marks if mark.startswith("own-")), default=0)
    model, optimizer = build(PLACES["cpu"], folder.parent, seed=0)
    reached = 0
    for path, told in ((folder / "same", least), (folder / "run", least_own)):
        try:
            loaded = hetero.load(path, model, optimizer)
        except hetero.CheckpointError:
            assert told == 0
            assert latest_checkpoint(path) is None
            assert not is_checkpoint(path)
            continue
        assert loaded.step >= told
        assert same(whole(model, optimizer), states[loaded.step])
        reached = max(reached, loaded.step)
    optimizer.engine.close()
    return reached


def check_converted(folder: Path, marks: list[str], states: list[State]) -> int:
    """What is there is whole, and what was told to be there is there."""
    found = {to for to in ("hf", "dcp", "hetero") if (folder / to).exists()}
    assert found >= set(marks)
    wanted = dict(zip(build_names(), states[1], strict=False))
    for to in found:
        with open_checkpoint(folder / to) as stored:
            for name in ("first.weight", "last.bias", "mean"):
                tensor = stored.read(f"model/{name}", 0, wanted[name].numel()).float()
                close = torch.allclose(tensor, wanted[name].reshape(-1).float(), rtol=2**-8)
                assert close, name
    return len(found)


def check_exported(folder: Path, marks: list[str], states: list[State]) -> int:
    """One of the two models, whole."""
    told = max(map(int, marks), default=0)
    path = folder / "out"
    if not path.exists():
        assert told == 0
        return 0
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    json.loads((path / "generation_config.json").read_text())
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(found)
    for seed in (told - 1, told):
        if seed in (0, 1) and all(
            torch.equal(tensor, found[name])
            for name, tensor in gpt2(seed).state_dict().items()
            if name in found
        ):
            assert json.loads((path / "config.json").read_text())["n_embd"] == 16
            return seed + 1
    raise AssertionError("it is none of the models")


def build_names() -> list[str]:
    from tests.support.training.small_net import Net

    model = Net()
    model.register_buffer("mean", torch.rand(3))
    return list(model.state_dict())


CHECKS: dict[str, Callable[[Path, list[str], list[State]], int]] = {
    "save": check_saved,
    "convert": check_converted,
    "export": check_exported,
}


@pytest.mark.parametrize("moments", [40, pytest.param(1500, marks=pytest.mark.extra)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_power_is_lost(recorded: Recorded, name: str, moments: int, tmp_path: Path) -> None:
    """And each step, or model, is one from which something has gone on."""
    log = read_log(recorded.folder / f"{name}.log")
    chances, reached = random.Random(moments), set()
    check = CHECKS.get(name, check_durable)
    found = losses(log, recorded.inodes[name], moments, seed=moments)
    for number, (disk, kept) in enumerate(found):
        folder = tmp_path / f"{number}"
        disk.write_after_loss(folder, chances, kept)
        try:
            reached.add(check(folder, disk.marks(), recorded.states))
        except Exception as error:
            raise AssertionError(f"moment {number} of {moments}, {kept} kept: {error}") from error
        shutil.rmtree(folder)
    assert len(reached) > 2
