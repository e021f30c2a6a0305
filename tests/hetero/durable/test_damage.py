"""Durable state that was damaged, cut off, is in use or of another model: named, and kept."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.durable import state_folder
from hetero.durable.record import Record, read_record
from offload._native import NativeIoError
from offload.memory.tiers import StateKind
from tests.support.checkpoint.small_trainings import PLACES, build, steps
from tests.support.children import child_that_waits
from tests.support.training.small_net import Net

pytestmark = pytest.mark.usefixtures("nothing_left")
ROOT = Path(__file__).resolve().parents[3]
OPTIONS = {**PLACES["disk"], "durable": True}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder of a training that was ended after three steps."""
    model, optimizer = build(OPTIONS, tmp_path)
    steps(model, optimizer, range(3))
    optimizer.engine.close()
    return tmp_path / "hetero-state"


def records(state: Path) -> list[tuple[Path, Record]]:
    """Both copies of the last commit's."""
    found = []
    for path in sorted(state.glob("*.commit-?")):
        decoded = read_record(str(path), (str(state),))
        assert decoded is not None
        found.append((path, decoded))
    return found


def flip(path: Path, byte: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(byte)
        old = stream.read(1)[0]
        stream.seek(byte)
        stream.write(bytes([old ^ 16]))


def goes_on(path: Path) -> hetero.Checkpoint | None:
    """Starts, and ends at once; what it went on from."""
    model, optimizer = build(OPTIONS, path, seed=7)
    last = hetero.resume(model)
    optimizer.engine.close()
    return last


def test_a_bit_that_flips_while_training_names_chunk_and_parameters(tmp_path: Path) -> None:
    """The next step reads it: it is an error there, and never a wrong number."""
    model, optimizer = build({**OPTIONS, "host_memory": "90KiB"}, tmp_path)
    steps(model, optimizer, range(3))
    engine = optimizer.engine
    hetero.commit(model, blocking=True)
    (data,) = (tmp_path / "hetero-state").glob("*.data")
    _, last = records(tmp_path / "hetero-state")[-1]
    for chunk in last.groups[0].chunks:  # (of some the buffers have it still)
        flip(data, chunk.optim_state + 4099)
    with pytest.raises(NativeIoError) as caught:
        for seed in range(3, 6):
            steps(model, optimizer, range(seed, seed + 1))
            engine.synchronize()
    error = caught.value
    assert error.errno == errno.EBADMSG
    assert str(data) in str(error)
    at_fault = next(c for c in last.groups[0].chunks if error.offset - c.optim_state == 4096)
    chunk_id = last.groups[0].chunks.index(at_fault)
    for name in (f"chunk {chunk_id}", *(each.name for each in at_fault.slices)):
        assert name in str(error)
    engine.close()
    # What is committed is damaged, so the next start says so, too.
    with pytest.raises(hetero.CheckpointError, match="of the last commit cannot be read"):
        goes_on(tmp_path)


@pytest.mark.parametrize("verify", [True, False])
def test_scratch_files_are_verified_on_request(verify: bool, tmp_path: Path) -> None:
    """Without it a flipped bit of a scratch file is a wrong number."""
    options = {**PLACES["disk"], "host_memory": "90KiB", "verify_reads": verify}
    model, optimizer = build(options, tmp_path)
    steps(model, optimizer, range(3))
    optimizer.engine.synchronize()
    group = optimizer.engine.chunk_groups[0]
    fd = group.disk.scratch.members[0].fd
    for extent in group.memory.homes[StateKind.OPTIM_STATE].extents.values():
        plain = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        (number,) = os.pread(plain, 1, extent.offset + 9)
        os.pwrite(plain, bytes([number ^ 16]), extent.offset + 9)
        os.close(plain)
    if verify:
        with pytest.raises(NativeIoError, match="chunk .*weight|chunk .*bias|chunk .*scale"):
            steps(model, optimizer, range(3, 5))
            optimizer.engine.synchronize()
    else:
        steps(model, optimizer, range(3, 5))
    optimizer.engine.close()


@pytest.mark.parametrize("kind", ["param", "optim_state"])
def test_a_bit_that_has_flipped_since_is_found_at_the_start(state: Path, kind: str) -> None:
    """Nothing is removed: when it is right again, the start goes on."""
    _, last = records(state)[-1]
    for number, chunk in enumerate(last.groups[0].chunks):
        byte = getattr(chunk, kind) + 4096 * (number % 2)
        (data,) = state.glob("*.data")
        flip(data, byte)
        with pytest.raises(hetero.CheckpointError) as caught:
            goes_on(state.parent)
        assert any(each.name in str(caught.value) for each in chunk.slices)
        assert str(data) in str(caught.value)
        flip(data, byte)
    found = goes_on(state.parent)
    assert found is not None
    assert found.step == 3


def test_a_data_file_that_was_cut_off_or_is_missing(state: Path) -> None:
    (data,) = state.glob("*.data")
    for nbytes, told in ((0, ""), (4096, ""), (100_000, ""), (None, "needs .*")):
        data.rename(state / "kept")
        if nbytes is not None:
            data.write_bytes((state / "kept").read_bytes()[:nbytes])
        with pytest.raises(hetero.CheckpointError, match=told + data.name):
            goes_on(state.parent)
        (state / "kept").rename(data)
    assert goes_on(state.parent) is not None


def test_damage_of_one_file_costs_nothing(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of either copy of the record and of what says which set it is; after the first commit of a
    start, too. (test_state_folder.py has all kinds of damage, and that of both copies;
    test_power_loss.py has records that are half written.)"""
    assert goes_on(state.parent) is not None
    for path in [path for path in sorted(state.iterdir()) if path.suffix != ".data"]:
        if path.name == "lock":
            continue
        copy = state.parent / "copy"
        shutil.copytree(state, copy / state.name)
        for number, each in enumerate(sorted((copy / state.name).iterdir())):
            os.utime(each, (10**9 - number, 10**9 - number))  # no file's time is looked at
        flip(copy / state.name / path.name, path.stat().st_size // 2)
        found = goes_on(copy)
        assert found is not None
        assert found.step == 3
        assert path.name in " ".join(found.notes)
        assert f"hetero: {found.notes[0]}" in capsys.readouterr().err
        shutil.rmtree(copy)


def test_a_state_of_version_1_is_told(state: Path) -> None:
    """As hetero 0.1 left it: without what says which set it is."""
    for path in state.glob("set-?"):
        path.unlink()
    with pytest.raises(hetero.CheckpointError, match="of version 1 of the format"):
        goes_on(state.parent)


def test_links_are_not_followed(state: Path) -> None:
    """Whoever may write to the folder must not have this process write elsewhere."""
    for name in ("lock", "set-0", "000001-rank-0000-of-0001.commit-0"):
        target = state.parent / "target"
        (state / name).rename(target)
        (state / name).symlink_to(target)
        before = target.read_bytes()
        with pytest.raises((hetero.CheckpointError, hetero.StoreError), match=name):
            goes_on(state.parent)
        assert target.read_bytes() == before
        (state / name).unlink()
        target.rename(state / name)
    os.link(state / "lock", state.parent / "second")
    with pytest.raises(hetero.CheckpointError, match="must be a file of its own"):
        goes_on(state.parent)


def test_a_pipe_is_not_waited_for(state: Path) -> None:
    """In the place of any file: it is refused by name, and nothing is changed."""
    for path in sorted(state.iterdir()):
        kept = path.rename(state.parent / "kept")
        os.mkfifo(path)
        with pytest.raises((hetero.CheckpointError, hetero.StoreError), match=path.name):
            goes_on(state.parent)
        path.unlink()
        kept.rename(path)
    assert goes_on(state.parent) is not None


def test_another_ones_folder_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: Any, **more: Any) -> Any:
        found = real(path, **more)
        if str(path) != str(state):
            return found
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]])

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(hetero.CheckpointError, match=r"is of user \d+, and this process of user"):
        goes_on(state.parent)


def test_records_under_another_ones_name(state: Path) -> None:
    path, _ = records(state)[-1]
    path.rename(state / path.name.replace("000001-", "000004-"))
    with pytest.raises(hetero.CheckpointError, match="says generation 1"):
        goes_on(state.parent)


def widened() -> Net:
    model = Net()
    model.last = nn.Linear(model.last.in_features + 1, model.last.out_features)
    return model


def renamed() -> Net:
    model = Net()
    model.end = model.last
    del model.last
    return model


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (widened, "last.weight"),
        (renamed, "end.weight|last.weight"),
    ],
)
def test_another_model_is_named_and_the_state_stays(
    state: Path, make: Callable[[], Net], match: str
) -> None:
    model = make()
    model.register_buffer("mean", torch.rand(3))
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"nvme_path": str(state.parent), "chunk_numel": 4096, **OPTIONS}
    with pytest.raises(ValueError, match=f"(?s)state of another training.*({match}).*nvme_path"):
        hetero.initialize(model, optimizer, dtype="bf16", **options)
    found = goes_on(state.parent)
    assert found is not None
    assert found.step == 3


def test_another_optimizer_is_named_and_the_state_stays(state: Path) -> None:
    with pytest.raises(ValueError, match="of HybridAdam, .* is HybridLion"):
        build(OPTIONS, state.parent, "lion")
    assert goes_on(state.parent) is not None


@pytest.mark.usefixtures("quick_python")
def test_a_second_process_is_told_who_has_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed has let go of it."""
    script = """
        import os, sys
        from pathlib import Path
        from tests.support.checkpoint.small_trainings import build, steps
        from tests.hetero.durable.test_damage import OPTIONS
        model, optimizer = build(OPTIONS, Path(sys.argv[1]))
        steps(model, optimizer, range(1))
        print(os.getpid(), flush=True)
        sys.stdin.read()
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with other:
        assert other.stdout is not None
        process = int(other.stdout.readline())
        monkeypatch.setattr(state_folder, "_PATIENCE_S", 0.1)
        with pytest.raises(hetero.CheckpointError, match=f"another process.*process {process} "):
            goes_on(tmp_path)
        other.kill()
    monkeypatch.undo()
    assert goes_on(tmp_path) is not None


def test_a_child_that_was_forked_does_not_have_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a loader's worker is, which may outlive the engine."""
    monkeypatch.setattr(state_folder, "_PATIENCE_S", 0.1)
    model, optimizer = build(OPTIONS, tmp_path)
    steps(model, optimizer, range(1))
    with child_that_waits():
        optimizer.engine.close()
        assert goes_on(tmp_path) is not None
