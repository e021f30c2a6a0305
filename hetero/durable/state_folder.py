"""The folders of a durable state: their locks, the last commit in them, and its removal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from hetero.durable.record import OWN_FILE, OtherFormatError, Record, read_record
from hetero.durable.state_set import StateSet, in_order, join, note_commit
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.state_files import (
    FOLDER,
    LOCK_NAME,
    SET_NAMES,
    StateFiles,
    is_record,
    numbers_of,
)
from offload.disk.descriptors import not_in_children
from offload.disk.durable import sync_path
from offload.errors import CheckpointError, StoreError

_PATIENCE_S = 10.0  # until a process that was killed a moment ago has let go of the lock
_T = TypeVar("_T")


@dataclass(frozen=True)
class _RankView:
    """What one rank sees in its folders.

    Attributes:
        identity: of the set that they are.
        folders: the set's, by place.
        committed: the last start that has made a commit in them.
        newest: the largest generation in any name in them.
        records: the whole ones in them; of ranks with the same folders one alone has read them.
        notes: lines for the user.
    """

    identity: str
    folders: tuple[str, ...]
    committed: int
    newest: int
    records: tuple[Record, ...]
    notes: tuple[str, ...]

    def seen_from(self, mine: _RankView) -> _RankView:
        """With the records as the rank has them that sees `mine`: its own set is where it has found
        it.

        It reads data files of another set if it sees them: another machine may have another set of
        these names.
        """
        is_own = self.identity == mine.identity
        folders, sees = mine.folders if is_own else self.folders, is_own
        if not is_own:
            with contextlib.suppress(OSError, CheckpointError):
                found = StateSet.read(folders[0], [])
                sees = found is not None and found.set == self.identity
        records = []
        for each in self.records:
            path = os.path.join(folders[0], os.path.basename(each.path))
            groups = each.groups
            if not sees:
                groups = tuple(replace(group, checksums_at=None) for group in groups)
            records.append(replace(each, path=path, folders=folders, groups=groups))
        return replace(self, records=tuple(records))


class StateFolder:
    """The folders of a training's durable state, which are this process's until close().

    Attributes:
        files: the names of what this start of the training makes.
        last: the records of the last commit of an earlier start, of all its ranks; empty without.
        notes: lines for the user about what was not as the last start should have left it.
    """

    def __init__(self, directories: Sequence[str], world: ProcessGroups) -> None:
        """Takes the folders for this training, and looks for its last commit. All ranks call it.

        Removes nothing but files of starts that came to no commit.

        Raises:
            StoreError: the folders cannot be made or read.
            CheckpointError: another process has them, they are not all of a state, or what they
                have is damaged.
            HeteroError: another rank met one of these.
        """
        everyone = world.everyone
        self._rank, self._ranks = (0, 1) if everyone is None else (everyone.rank, everyone.size)
        self._world = world
        self._locks: list[int] = []
        not_in_children.add(self)
        self.folders = tuple(os.path.join(directory, FOLDER) for directory in directories)
        self.notes: list[str] = []
        self.last: tuple[Record, ...] = ()
        self._has_older = True
        try:
            places = self._on_all("use the folders of the durable state", self._make)
            self._leads = self._is_leader(places)
            self._on_all("take the folders of the durable state", self._take)
            generation = self._find()
        except BaseException:
            self.close()
            raise
        self.files = StateFiles(self.folders, generation, self._rank, self._ranks)
        for note in self.notes:
            print(f"hetero: {note}", file=sys.stderr)

    def _on_all(self, what: str, action: Callable[[], _T]) -> _T:
        """Calls `action` on all ranks; what one of them raises ends it on all."""
        return self._world.together(what, action, (CheckpointError,))

    # Taking the folders

    def _make(self) -> set[str]:
        """Makes the folders; returns what tells each from all others, on any machine."""
        places = set()
        for folder in self.folders:
            try:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                sync_path(Path(folder).parent)
                _check_owner(folder)
                status = os.stat(folder)
                places.add(f"{os.uname().nodename} {status.st_dev} {status.st_ino}")
            except OSError as error:
                raise StoreError(
                    error.errno, f"cannot make the folder: {error.strerror}", folder
                ) from error
        return places

    def _is_leader(self, places: set[str]) -> bool:
        """Whether this rank acts for all that have the same folders.

        Raises CheckpointError if ranks have some of their folders in common, and not all.
        """
        everyone = self._world.everyone
        if everyone is None:
            return True
        content = json.dumps(sorted(places)).encode()
        found = everyone.all_gather_bytes(content, "comparing the ranks' folders")
        lists = [set(json.loads(each)) for each in found]
        for rank, one in enumerate(lists):
            for other, another in enumerate(lists[:rank]):
                if one & another and one != another:
                    raise CheckpointError(
                        f"{everyone.name(other)} and {everyone.name(rank)} have some directories "
                        f"of nvme_path in common, and not all; give them the same list, or lists "
                        f"without a common directory"
                    )
        return lists.index(places) == self._rank

    def _take(self) -> None:
        """Takes the locks of all folders. Raises CheckpointError if another process has one."""
        if not self._leads:
            return
        until = time.monotonic() + _PATIENCE_S

        def number(folder: str) -> tuple[int, int]:
            status = os.stat(folder)
            return status.st_dev, status.st_ino

        # In one order for all processes, so that of two with a folder in common one gets all.
        for folder in sorted(self.folders, key=number):
            self._locks.append(_lock(folder, until))

    def close(self) -> None:
        """Other processes may take the folders; idempotent."""
        while self._locks:
            os.close(self._locks.pop())

    # Looking for the last commit

    def _find(self) -> int:
        """Reads the last commit, and returns the number of this start. All ranks call it."""
        self._on_all("recognise the folders of the durable state", self._join)
        views = self._gather(self._on_all("look for the last commit", self._look))
        generation = 1 + max(max(view.newest, view.committed) for view in views)
        self.last = _last_whole([r for view in views for r in view.records], self.folders)
        kept = max((each.generation for each in self.last), default=0)
        for view in views:
            if view.committed > kept:
                raise CheckpointError(
                    f"{view.folders[0]} has no whole record of start {view.committed}, which has "
                    f"made commits, as {SET_NAMES[0]} there says{_removable(view.folders)}"
                )
        committed = max(kept, *(view.committed for view in views))
        self._remove(lambda each: committed < each < generation)
        self._has_older = True
        return generation

    def _join(self) -> None:
        if self._leads:
            try:
                join(self.folders, self.notes)
            except CheckpointError as error:
                raise CheckpointError(f"{error}{_removable(self.folders)}") from None

    def _look(self) -> _RankView:
        identity, self.folders, committed = in_order(self.folders)
        names = [name for folder in self.folders for name in os.listdir(folder)]
        generations = [numbers[0] for name in names if (numbers := numbers_of(name)) is not None]
        records = _records_in(self.folders, committed, self.notes) if self._leads else ()
        newest = max(generations, default=0)
        return _RankView(identity, self.folders, committed, newest, records, tuple(self.notes))

    def _gather(self, mine: _RankView) -> list[_RankView]:
        """What all ranks have found, each set once; notes of others become this rank's, too."""
        everyone, views = self._world.everyone, [mine]
        if everyone is not None:
            content = io.BytesIO()
            torch.save(mine, content)
            sent = everyone.all_gather_bytes(content.getvalue(), "looking for the last commit")
            # (The ranks trust each other, and these come from no file.)
            views = [torch.load(io.BytesIO(each), weights_only=False) for each in sent]
        sets: dict[str, _RankView] = {}
        for view in views:  # (of a set the first one has read its records)
            self.notes.extend(note for note in view.notes if note not in self.notes)
            if view.identity not in sets:
                sets[view.identity] = view.seen_from(mine)
        return list(sets.values())

    # Removing

    def note_commit(self) -> None:
        """The first commit of this start has a record on all ranks. Raises StoreError."""
        if self._has_older and self._leads:
            note_commit(self.folders, self.files.generation)

    def remove_older(self) -> None:
        """Removes what earlier starts have made: this one has a commit. Later calls do nothing."""
        if self._has_older:
            self._has_older = False
            self._remove(lambda generation: generation < self.files.generation)

    def remove_own(self) -> None:
        """Removes what this start has made on this rank: it does not come to a commit."""
        self._remove(lambda generation: generation == self.files.generation, self._rank)

    def _remove(self, goes: Callable[[int], bool], rank: int | None = None) -> None:
        """Removes files of the generations that go, of a rank or of all, that this rank sees."""
        for folder in self.folders:
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = os.listdir(folder)
            for name in names:
                numbers = numbers_of(name)
                if numbers is None or rank not in (None, numbers[1]):
                    continue
                if goes(numbers[0]):
                    with contextlib.suppress(OSError):  # another rank was faster
                        os.unlink(os.path.join(folder, name))


def _removable(folders: Iterable[str]) -> str:
    """The end of an error: how to begin anew."""
    return f"; to begin anew, without what was committed, remove {' and '.join(folders)}"


def _check_owner(folder: str) -> None:
    """Raises CheckpointError if the folder is another user's, who could put links into it."""
    owner, mine = os.stat(folder).st_uid, os.geteuid()
    if owner != mine:
        # (Some filesystems give files another owner than who makes them.)
        with tempfile.TemporaryFile(dir=folder) as probe:
            mine = os.fstat(probe.fileno()).st_uid
    if owner != mine:
        raise CheckpointError(
            f"{folder} is of user {owner}, and this process of user {mine}; give an nvme_path of "
            f"your own"
        )


def _lock(folder: str, until: float) -> int:
    """The descriptor of the folder's lock. Raises CheckpointError if another process has it."""
    path = os.path.join(folder, LOCK_NAME)
    flags = os.O_RDWR | os.O_CREAT | OWN_FILE
    with contextlib.ExitStack() as unless_locked:
        try:
            descriptor = os.open(path, flags, 0o600)
            unless_locked.callback(os.close, descriptor)
            status = os.fstat(descriptor)
        except OSError as error:
            what = f"cannot be opened: {error.strerror}"  # (a link is not followed)
            raise StoreError(error.errno, what, path) from error
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise CheckpointError(
                f"{path} is no file, or has a second name; must be a file of its own; remove it"
            )
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    raise StoreError(
                        error.errno, f"cannot be locked: {error.strerror}", path
                    ) from error
            if time.monotonic() > until:
                owner = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
                raise CheckpointError(
                    f"{folder} is the durable state of another process that runs "
                    f"({owner or 'unknown'}); end it, or give this training another nvme_path"
                )
            time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        unless_locked.pop_all()
    return descriptor


def _records_in(folders: tuple[str, ...], committed: int, notes: list[str]) -> tuple[Record, ...]:
    """The whole records in a set of folders; starts up to `committed` have made commits.

    Notes what is damaged beside a whole one, as a crash in a commit leaves it, too. Raises
    CheckpointError for a commit without a whole record, StoreError.
    """
    found: dict[tuple[int, int, int], Record] = {}  # one of two copies
    damaged: dict[str, list[str]] = {}
    whole: set[str] = set()
    for name in sorted(os.listdir(folders[0])):
        if not is_record(name):
            continue
        path, stem = os.path.join(folders[0], name), name[:-2]
        try:
            record = read_record(path, folders)
        except OtherFormatError as error:
            raise CheckpointError(f"{error}{_removable(folders)}") from None
        except CheckpointError as error:
            damaged.setdefault(stem, []).append(str(error))
            continue
        if record is None:
            damaged.setdefault(stem, []).append(f"{path} has nothing in it")
            continue
        said = (record.generation, record.rank, record.ranks)
        if said != numbers_of(name):
            raise CheckpointError(
                f"{path} is of another file: it says generation {said[0]}, rank {said[1]} of "
                f"{said[2]}{_removable(folders)}"
            )
        found[record.generation, record.rank, record.number] = record
        whole.add(stem)
        other = f"{path[:-1]}{1 - int(path[-1])}"
        if record.generation <= committed and not os.path.lexists(other):
            damaged.setdefault(stem, []).append(f"{other} is missing")
    for stem, errors in damaged.items():
        generation, rank, _ = numbers_of(stem) or (0, 0, 0)
        if stem in whole:
            notes.append(
                f"a copy of a commit's record is damaged, or a commit was not completed; the other "
                f"copy is used: {errors[0]}"
            )
        elif generation > committed:
            notes.append(
                f"start {generation} of the training did not complete its first commit: {errors[0]}"
            )
        else:
            raise CheckpointError(
                f"no commit record of start {generation} of the training on rank {rank} is whole: "
                f"{'; '.join(errors)}{_removable(folders)}"
            )
    return tuple(found.values())


def _last_whole(found: Iterable[Record], folders: Iterable[str]) -> tuple[Record, ...]:
    """The records of the last commit that all its ranks have made, by rank; empty without any.

    Raises CheckpointError if there are commits, and of none the records of all ranks.
    """
    commits: dict[tuple[int, int, int], dict[int, Record]] = {}
    for each in found:
        commits.setdefault((each.generation, each.number, each.ranks), {})[each.rank] = each
    whole = [key for key, ranks in commits.items() if len(ranks) == key[2]]
    if whole:
        last = commits[max(whole)]
        return tuple(last[rank] for rank in sorted(last))
    if any(number > 1 for _, number, _ in commits):
        generation, number, count = max(commits)
        has = sorted(commits[generation, number, count])
        raise CheckpointError(
            f"commit {number} of {count} ranks has records of the ranks {has} alone; the "
            f"directories of the others are also needed{_removable(folders)}"
        )
    return ()


def read_last_commit(folder: Path, notes: list[str]) -> tuple[Record, ...]:
    """The records of the last commit in a folder that nobody takes; empty if there is none.

    `notes` get what was not as it should be. Raises CheckpointError, StoreError.
    """
    one = StateSet.read(str(folder), notes)
    if one is None:
        raise CheckpointError(
            f"{folder} has no {SET_NAMES[0]}, which says of which durable state it is: it is of "
            f"version 1 of the format, or {SET_NAMES[0]} was removed"
        )
    _, folders, committed = in_order(one.paths(str(folder)))
    return _last_whole(_records_in(folders, committed, notes), folders)
