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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hetero
from hetero.checkpoint.folder import is_checkpoint, latest_checkpoint
from hetero.checkpoint.formats import open_checkpoint
from tests.support.checkpoint.small_trainings import PLACES, build, state_of, states, whole
from tests.support.power_loss.program import CONFIGS, PROGRAMS, configured, striped
from tests.support.power_loss.replay import MARKS, losses, read_log
from tests.support.training.loops import same
from tests.support.training.small_net import Net, Settings

ROOT = Path(__file__).resolve().parents[3]

RECORDER = ROOT / "tests" / "support" / "power_loss" / "recorder.cpp"


@dataclass
class Recorded:
    """The programs' folder, and their folders' inodes."""

    folder: Path
    inodes: dict[str, int]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for the recorder of changes")
    path = tmp_path_factory.mktemp("recorded")
    library = path / "recorder.so"
    options = ["-O0", "-std=c++20", "-shared", "-fPIC", "-Wno-nonnull"]
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
    return Recorded(folder, json.loads(done.stdout.splitlines()[-1]))


def content(folder: Path) -> dict[str, bytes | None]:
    """What is in it, by relative path; None of a folder."""
    found = {path: path.relative_to(folder) for path in sorted(folder.rglob("*"))}
    return {
        str(name): None if path.is_dir() else path.read_bytes()
        for path, name in found.items()
        if name.name != MARKS
    }


def check_durable(folder: Path, marks: list[str], places: Settings | None = None) -> int:
    """Returns the step from which the training goes on."""
    step, found = state_of(folder, {**PLACES["cpu"], **(places or {})})
    assert step >= max((int(mark) for mark in marks), default=0)
    assert same(found, states()[step])
    return step


def check_saved(folder: Path, marks: list[str]) -> int:
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
        assert same(whole(model, optimizer), states()[loaded.step])
        reached = max(reached, loaded.step)
    optimizer.engine.close()
    return reached


def check_converted(folder: Path, marks: list[str]) -> int:
    """What is there is whole, and what was told to be there is there."""
    found = {to for to in ("hf", "dcp", "hetero") if (folder / to).exists()}
    assert found >= set(marks)
    model = Net()
    model.register_buffer("mean", torch.rand(3))
    wanted = dict(zip(model.state_dict(), states()[1], strict=False))
    for to in found:
        with open_checkpoint(folder / to) as stored:
            for name in ("first.weight", "last.bias", "mean"):
                tensor = stored.read(f"model/{name}", 0, wanted[name].numel()).float()
                close = torch.allclose(tensor, wanted[name].reshape(-1).float(), rtol=2**-8)
                assert close, name
    return len(found)


def check_exported(folder: Path, marks: list[str]) -> int:
    """One of the two models, whole."""
    told = max(map(int, marks), default=0)
    path = folder / "out"
    if not path.exists():
        assert told == 0
        return 0
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name in CONFIGS:
        assert json.loads((path / name).read_text()) == {"width": 64}
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(found)
    for seed in (told - 1, told):
        model = configured(seed).state_dict()
        if seed in (0, 1) and all(torch.equal(found[name], model[name]) for name in model):
            return seed + 1
    raise AssertionError("it is none of the models")


def check_striped(folder: Path, marks: list[str]) -> int:
    """A commit is in both directories."""
    return check_durable(folder, marks, striped(folder))


CHECKS: dict[str, Callable[[Path, list[str]], int]] = {
    "durable-striped": check_striped,
    "save": check_saved,
    "convert": check_converted,
    "export": check_exported,
}


@pytest.mark.parametrize("moments", [30, pytest.param(1500, marks=pytest.mark.extra)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_power_is_lost(recorded: Recorded, name: str, moments: int, tmp_path: Path) -> None:
    """And each step, or model, is one from which something has gone on."""
    log = read_log(recorded.folder / f"{name}.log")
    chances, reached, seen = random.Random(moments), set(), list[Any]()
    check = CHECKS.get(name, check_durable)
    for number, (disk, kept) in enumerate(losses(log, recorded.inodes[name], moments, moments)):
        folder = tmp_path / f"{number}"
        disk.write_after_loss(folder, chances, kept)
        left = content(folder), disk.marks()
        if left not in seen:
            seen.append(left)
            try:
                reached.add(check(folder, disk.marks()))
            except Exception as error:
                raise AssertionError(f"moment {number} of {moments}, {kept} kept") from error
        shutil.rmtree(folder)
    assert len(reached) > 2
    # All changes were recorded: made again they give what the program has left.
    disk.write_after_loss(tmp_path / "made", random.Random(0), 1.0)
    assert content(tmp_path / "made") == content(recorded.folder / name)
