"""Folders, records and starts in any order, with kills and damage: what was committed is gone on
from, or an error names what is wrong, and nothing is removed."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import hetero
from hetero.durable import state_folder
from hetero.durable.record import RecordFiles
from hetero.durable.state_folder import StateFolder
from hetero.durable.state_set import StateSet
from hetero.durable.stored_commit import data_paths
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.state_files import SET_NAMES
from tests.support.checkpoint.small_trainings import PLACES, build, steps
from tests.support.durable.calls import before_each
from tests.support.durable.records import SAMPLE

pytestmark = pytest.mark.usefixtures("nothing_left")
CALLS = ("open", "pwrite", "pwritev", "fsync", "unlink", "makedirs", "ftruncate")


class KilledError(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(number: int | None) -> Iterator[None]:
    """The call of CALLS with this number is not made, nor is any later one. Nothing is synced."""
    made = itertools.count(1)

    def kill(*_: object) -> None:
        if next(made) >= (number or sys.maxsize):
            raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        with before_each(((os, name) for name in CALLS), kill):
            yield


@pytest.mark.parametrize("damaged_name", SET_NAMES)
def test_a_copy_of_the_set_is_always_whole(damaged_name: str, tmp_path: Path) -> None:
    """A write is killed when an earlier one, killed as well, has left either copy damaged."""
    old = StateSet("0" * 32, 0, (".",), 1)
    for kill_at in range(1, 9):
        with killed_at(None):
            old.write(str(tmp_path))
        (tmp_path / damaged_name).write_bytes(b"")
        with killed_at(kill_at), suppress(KilledError):
            replace(old, generation=2).write(str(tmp_path))
        found = StateSet.read(str(tmp_path), [])
        assert found is not None
        assert found.generation in (1, 2)


def test_a_copy_that_cannot_be_read_counts_as_whole(tmp_path: Path) -> None:
    """It is not the first one that is written: the other copy is damaged."""
    old = StateSet("0" * 32, 0, (".",), 1)
    old.write(str(tmp_path))
    (tmp_path / SET_NAMES[1]).write_bytes(b"")

    def fail(_: str, given: tuple[Any, ...]) -> None:
        if not given[1] & os.O_WRONLY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with before_each([(os, "open")], fail), pytest.raises(hetero.StoreError, match="cannot be rea"):
        replace(old, generation=2).write(str(tmp_path))
    assert StateSet.read(str(tmp_path), []) == old


class Training:
    """Starts, which write as an engine does: data to each folder, then records."""

    def __init__(self, directories: list[str]) -> None:
        self.directories = directories
        self.told = 0  # the last commit that returned
        self.begun = 0
        self.was_killed = False  # in its last start, which may have left one copy of two

    def start(self, directories: list[str], commits: int, kill_at: int | None = None) -> None:
        """Checks what is gone on from, and commits so often; raises as initialize()."""
        with killed_at(kill_at):
            folder = StateFolder(directories, ProcessGroups(1.0))
            files = RecordFiles(folder.files)
            try:
                self.check(folder)
                for number in range(1, commits + 2):
                    if folder.last or number > 1:
                        self.commit(folder, files, number)
            finally:
                folder._locks, locks = [], folder._locks
                for descriptor in (*locks, *files._open.values()):
                    os.close(descriptor)

    def check(self, folder: StateFolder) -> None:
        """It is the last commit that was told, or the one that was under way, whole."""
        if not folder.last:
            assert self.told == 0
            return
        (record,) = folder.last
        step = record.manifest.step
        assert step in (self.told, self.begun)
        self.told = self.begun = step
        (group,) = record.groups
        for path in data_paths(record, group):
            assert Path(path).read_bytes() == str(record.generation).encode(), path

    def commit(self, folder: StateFolder, files: RecordFiles, number: int) -> None:
        """As DurableState, whose first commit of a start has what was gone on from."""
        made = folder.files
        if number == 1 or self.told == 0:
            for each in folder.folders:
                path = os.path.join(each, made.data_name(0))
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                os.write(descriptor, str(made.generation).encode())
                os.close(descriptor)
        self.begun = self.told + (number > 1)
        places = tuple(range(len(folder.folders)))
        group = replace(SAMPLE.groups[0], name=made.data_name(0), places=places)
        group = replace(group, weights=(1,) * len(places))
        record = replace(
            SAMPLE,
            generation=made.generation,
            number=number,
            groups=(group,),
            manifest=replace(SAMPLE.manifest, step=self.begun),
        )
        for copy in (0, 1):
            files.write(copy, record, lambda group: [bytes(group.checksum_bytes)])
        folder.note_commit()
        folder.remove_older()
        self.told = self.begun


def content(folder: Path) -> dict[str, bytes]:
    """All that a start might remove."""
    found = folder.glob("*/hetero-state/*")
    return {str(path): path.read_bytes() for path in found if path.name != "lock"}


class AnyStarts(RuleBasedStateMachine):
    """Two trainings, of two folders and of one, and folders that nobody has used."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        for name in "abcde":
            (self.root / name).mkdir()
        self.trainings = [Training(["a", "b"]), Training(["c"])]

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def paths(self, names: list[str]) -> list[str]:
        return [str(self.root / name) for name in names]

    @initialize(kill_at=st.none() | st.integers(1, 60))
    def begin(self, kill_at: int | None) -> None:
        """The very first starts, which may be killed, too."""
        for training in self.trainings:
            try:
                training.start(self.paths(training.directories), 1, kill_at)
            except KilledError:
                training.start(self.paths(training.directories), 1)
            assert training.told > 0

    @rule(
        which=st.integers(0, 1),
        backwards=st.booleans(),
        commits=st.integers(0, 3),
        kill_at=st.none() | st.integers(1, 90),
    )
    def start(self, which: int, backwards: bool, commits: int, kill_at: int | None) -> None:
        training = self.trainings[which]
        names = training.directories[:: -1 if backwards else 1]
        training.was_killed = False
        try:
            training.start(self.paths(names), commits, kill_at)
        except KilledError:
            assert kill_at is not None
            training.was_killed = True

    @rule(names=st.permutations("abcde"), count=st.integers(1, 5))
    def start_elsewhere(self, names: list[str], count: int) -> None:
        """A folder is missing, added, or another training's."""
        given = names[:count]
        used = [each for each in self.trainings if set(each.directories) & set(given)]
        if not used or (len(used) == 1 and set(used[0].directories) == set(given)):
            return
        before = content(self.root)
        with pytest.raises(hetero.CheckpointError, match="nvme_path|durable state"):
            Training(given).start(self.paths(given), 1)
        after = content(self.root)
        assert {path: after[path] for path in before} == before

    @rule(
        which=st.integers(0, 1),
        number=st.integers(0, 20),
        how=st.sampled_from(["flip", "cut", "zero", "remove", "version", "order"]),
        at=st.floats(0, 1, exclude_max=True),
        both=st.booleans(),
    )
    def damage(self, which: int, number: int, how: str, at: float, both: bool) -> None:
        """Of one file but data, which have checksums, or of both copies: goes on, or is an error
        that changes nothing; it is put right then."""
        training = self.trainings[which]
        folders = [Path(each) / "hetero-state" for each in self.paths(training.directories)]
        found = [path for each in folders for path in sorted(each.iterdir())]
        found = [path for path in found if path.name[:-1].endswith(("commit-", "set-"))]
        path = found[number % len(found)]
        copies = [path, path.with_name(f"{path.name[:-1]}{1 - int(path.name[-1])}")]
        kept = {each: each.read_bytes() for each in copies[: 1 + both] if each.exists()}
        for each, old in kept.items():
            each.write_bytes(damaged(old, how, at))
            if how == "remove":
                each.unlink()
        before = content(self.root)
        try:
            training.start(self.paths(training.directories), 1)
        except hetero.CheckpointError as error:
            assert "to begin anew, " in str(error)  # noqa: PT017
            assert both or training.was_killed or how in ("version", "order", "flip")
            after = content(self.root)
            assert set(after) == set(before)
            for changed in [each for each in before if after[each] != before[each]]:
                # A copy of the set that a killed start has not written to its end is made again.
                copy = f"{changed[:-1]}{1 - int(changed[-1])}"
                assert changed[:-1].endswith("set-")
                assert after[changed] == before[copy]
            for each, old in kept.items():
                each.write_bytes(old)
            training.start(self.paths(training.directories), 1)
        training.was_killed = False


def damaged(old: bytes, how: str, at: float) -> bytes:
    """The content with one kind of damage."""
    place = int(at * len(old))
    if how == "flip" and old:
        return old[:place] + bytes([old[place] ^ 8]) + old[place + 1 :]
    if how == "zero":
        return bytes(len(old))
    if how == "version" and old.startswith(b"hetero"):
        return old[:20] + (3).to_bytes(4, "little") + old[24:]
    if how == "order" and old.startswith(b"hetero"):
        return old[:16] + old[16:20][::-1] + old[20:]
    return old[:place]


AnyStarts.TestCase.settings = settings(
    stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyStarts = pytest.mark.usefixtures("nothing_left")(AnyStarts.TestCase)


def test_two_folders_in_another_order(tmp_path: Path) -> None:
    """A whole engine goes on; with a folder less, more, or of another training it does not."""
    for name in "abc":
        (tmp_path / name).mkdir()

    def start(names: str, made: int) -> int:
        options: dict[str, Any] = {**PLACES["disk"], "durable": True}
        options["nvme_path"] = [str(tmp_path / name) for name in names]
        model, optimizer = build(options, tmp_path, seed=7)
        last = hetero.resume(model)
        found = 0 if last is None else last.step
        steps(model, optimizer, range(found, found + made))
        optimizer.engine.close()
        return found

    assert start("ab", 2) == 0
    assert start("ba", 1) == 2
    before = content(tmp_path)
    for names, match in (
        ("b", r"and [^ ]*/a is missing; give nvme_path=\['.*/a', '.*/b'\]"),
        ("a", r"and [^ ]*/b is missing; "),
        ("cab", r"durable state in \['.*/a', '.*/b'\], and [^ ]*/c/hetero-state has no part"),
        ("cb", r"c/hetero-state has no part of it, [^ ]*/a is missing"),
    ):
        with pytest.raises(hetero.CheckpointError, match=match):
            start(names, 1)
        assert content(tmp_path) == before
    assert start("ab", 1) == 3


def test_a_folder_of_a_running_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its place; two that want each other's do not both wait."""
    monkeypatch.setattr(state_folder, "_PATIENCE_S", 0.1)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    a, b, c = map(str, paths)
    running = StateFolder([a, b], ProcessGroups(1.0))
    for other in ([c, b], [b, a], [b]):
        with pytest.raises(hetero.CheckpointError, match="another process that runs"):
            StateFolder(other, ProcessGroups(1.0))
    running.close()
    StateFolder([c, b], ProcessGroups(1.0)).close()  # (nothing was committed)


def test_a_start_reads_its_own_set_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a later read would make its data files those of another rank."""
    Training([str(tmp_path)]).start([str(tmp_path)], 1)
    gather = StateFolder._gather

    def fail(*_: object) -> None:
        raise hetero.StoreError(5, "cannot be read", "set-0")

    def unreadable(self: StateFolder, mine: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(StateSet, "read", fail)
            return gather(self, mine)

    monkeypatch.setattr(StateFolder, "_gather", unreadable)
    folder = StateFolder([str(tmp_path)], ProcessGroups(1.0))
    folder.close()
    (record,) = folder.last
    assert all(group.checksums_at is not None for group in record.groups)
