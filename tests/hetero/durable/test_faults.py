"""Errors and crashes at every call that a durable state makes: the last commit is gone on from."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import hetero
from offload.errors import HeteroError
from tests.support.checkpoint.small_trainings import PLACES, build, state_of, states, steps
from tests.support.durable.calls import before_each
from tests.support.training.loops import same

pytestmark = pytest.mark.usefixtures("nothing_left")
CALLS = ("open", "pwrite", "pwritev", "fsync", "unlink", "makedirs", "posix_fallocate")
STEPS = 4


@contextmanager
def before_calls(under: Path, action: Callable[[int, str], None]) -> Iterator[list[str]]:
    """`action` gets the number and the kind of each of CALLS, in this directory, before it.

    The kind is its name and the file's, without numbers.
    """
    seen: list[str] = []

    def note(name: str, given: tuple[Any, ...]) -> None:
        what = given[0]
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
        if path.startswith(str(under)):
            seen.append(f"{name} {re.sub('[0-9]+', '0', os.path.basename(path))}")
            action(len(seen), name)

    with before_each(((os, name) for name in CALLS), note):
        yield seen


def train(place: str, path: Path) -> None:
    """Goes on from what is there, to the end."""
    model, optimizer = build({**PLACES[place], "durable": True}, path)
    try:
        last = hetero.resume(model)
        steps(model, optimizer, range(0 if last is None else last.step, STEPS))
    finally:
        optimizer.engine.close()


@pytest.mark.parametrize("place", [pytest.param("cpu", marks=pytest.mark.extra), "disk"])
def test_a_crash_before_every_call(place: str, tmp_path: Path) -> None:
    """Of a start, its steps and its commits; and of the second start, which removes the first's."""
    scratch, copies, seen = tmp_path / "scratch", list[Path](), list[dict[str, bytes | None]]()
    scratch.mkdir()

    def copy(number: int, name: str) -> None:
        copies.append(tmp_path / f"{len(copies)}-{name}".replace("/", "_"))
        with suppress(shutil.Error):  # files that went meanwhile
            shutil.copytree(scratch, copies[-1])
        content = {
            str(path.relative_to(copies[-1])): path.read_bytes() if path.is_file() else None
            for path in copies[-1].rglob("*")
        }
        if content in seen:  # many calls change nothing that a start reads
            shutil.rmtree(copies.pop())
        else:
            seen.append(content)

    for _ in range(2):
        with before_calls(scratch, copy):
            train(place, scratch)
    made = set()
    for path in copies:
        step, found = state_of(path)
        assert same(found, states()[step]), path.name
        made.add(step)
    assert made == set(range(STEPS + 1))


@pytest.mark.parametrize(
    ("place", "every"),
    [
        ("cpu", False),
        *(pytest.param(each, True, marks=pytest.mark.extra) for each in ("cpu", "disk")),
    ],
)
def test_an_error_of_every_call(place: str, every: bool, tmp_path: Path) -> None:
    """It is raised, unless a file could not be removed; the next start goes on.

    `every`: of each call, not of the first and the last one of each kind.
    """
    with before_calls(tmp_path, lambda call, name: None) as calls:
        (tmp_path / "scratch").mkdir()
        train(place, tmp_path / "scratch")
        train(place, tmp_path / "scratch")
    last = {kind: number for number, kind in enumerate(calls, 1)}
    first = {kind: number for number, kind in reversed([*enumerate(calls, 1)])}
    chosen = range(1, len(calls) + 2) if every else sorted({*first.values(), *last.values()})
    for number in chosen:
        scratch = tmp_path / str(number)
        scratch.mkdir()

        def fail(call: int, name: str, number: int = number) -> None:
            if call == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

        raised: Exception | None = None
        with before_calls(scratch, fail) as seen:
            try:
                train(place, scratch)
                train(place, scratch)
            except (HeteroError, OSError, ValueError) as error:
                raised = error
        kind = seen[number - 1] if number <= len(seen) else "none"
        if kind.split()[0] not in ("none", "unlink", "posix_fallocate"):
            assert raised is not None, kind
        if raised is not None:
            assert os.strerror(errno.ENOSPC) in str(raised)
        step, found = state_of(scratch)
        assert same(found, states()[step]), kind
    assert len(chosen) > 8


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("nth", "error"), [(0, errno.ENOSPC), (3, errno.EIO), (8, errno.ENOSPC), (15, errno.EIO)]
)
@pytest.mark.parametrize("place", ["cpu", "disk", "speculative"])
def test_a_write_that_fails_ends_the_training_and_loses_no_commit(
    place: str, nth: int, error: int, tmp_path: Path
) -> None:
    """Of a commit, or of an update beside it: what was committed before is gone on from."""
    model, optimizer = build({**PLACES[place], "durable": True}, tmp_path)
    steps(model, optimizer, range(1))
    hetero.commit(model, blocking=True)
    disk = optimizer.engine.chunk_groups[0].disk
    disk.io.inject("write", nth, error=error)
    with pytest.raises((OSError, HeteroError)) as caught:
        steps(model, optimizer, range(1, 40))
    assert os.strerror(error) in str(caught.value)
    with pytest.raises((OSError, HeteroError)):
        steps(model, optimizer, range(40, 42))
        hetero.commit(model, blocking=True)
    with suppress(OSError, HeteroError):  # of a commit that nobody was told of
        optimizer.engine.close()
    step, found = state_of(tmp_path)
    assert step >= 1
    if step < len(states()):
        assert same(found, states()[step])


@pytest.mark.parametrize("what", ["*.data", "*.commit-?", "*"])
def test_files_that_are_removed_while_training(what: str, tmp_path: Path) -> None:
    """Nothing of it would be there for the next start: the next commit says so."""
    model, optimizer = build({**PLACES["disk"], "durable": True, "commit_every": 0}, tmp_path)
    for step in range(2):
        steps(model, optimizer, range(step, step + 1))
        hetero.commit(model, blocking=True)
    for path in (tmp_path / "hetero-state").glob(what):
        path.unlink()
    with pytest.raises(hetero.StoreError, match="was removed, or replaced"):
        hetero.commit(model, blocking=True)
    optimizer.engine.close()


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(hetero.StoreError, match=str(path)):
        build({**PLACES["disk"], "durable": True}, path)


@pytest.mark.parametrize(
    ("place", "capacity"), [("cpu", "64KiB"), ("cpu", "480KiB"), ("disk", "480KiB")]
)
def test_no_room_for_two_copies_is_refused_at_once(
    place: str, capacity: str, tmp_path: Path
) -> None:
    """Before anything of the model is on its way."""
    options = {**PLACES[place], "durable": True, "nvme_capacity": capacity}
    with pytest.raises(hetero.BudgetError, match="durable=True"):
        build(options, tmp_path)
