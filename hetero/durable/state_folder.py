"""The folders of a durable state: their lock, the last commit in them, and its removal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.durable.record import Record, decode
from hetero.ranks.process_groups import ProcessGroups
from hetero.state.memory.state_files import FOLDER, StateFiles
from offload.disk.durable import sync_path
from offload.errors import CheckpointError, StoreError

_LOCK = "lock"
_PATIENCE_S = 10.0  # until a process that was killed a moment ago has let go of the lock
_NAME = re.compile(r"(\d{6,})-rank-(\d{4,})-of-(\d{4,})[-.].*", re.ASCII)
_RECORD = re.compile(r"(\d{6,})-rank-(\d{4,})-of-(\d{4,})\.commit-[01]", re.ASCII)


@dataclass(frozen=True)
class _Found:
    """A record in the folder: which commit of which rank it is of, and its file."""

    generation: int
    number: int
    rank: int
    ranks: int
    path: str


class StateFolder:
    """The folders of a training's durable state, which is this process's until close().

    Attributes:
        files: the names of what this start of the training makes.
        last: the records of the last commit of an earlier start, of all its ranks; empty without.
        notes: lines for the user.
    """

    def __init__(self, directories: Sequence[str], world: ProcessGroups) -> None:
        """Takes the folders for this training, and looks for its last commit. All ranks call it.

        Removes nothing but files of starts that came to no commit.

        Raises:
            StoreError: the folders cannot be made or read.
            CheckpointError: another process has them, or what they have is damaged.
            HeteroError: another rank met one of these.
        """
        everyone = world.everyone
        self._rank, self._ranks = (0, 1) if everyone is None else (everyone.rank, everyone.size)
        self._world = world
        self._lock = -1
        self.folders = tuple(os.path.join(directory, FOLDER) for directory in directories)
        self.notes: list[str] = []
        self.last: tuple[Record, ...] = ()
        failure: Exception | None = None
        found: list[_Found] = []
        try:
            try:
                self._make()
            except Exception as error:
                failure = error
            world.all_or_none(failure, "use the folders of the durable state", (CheckpointError,))
            failure = None
            try:
                self._take(self._is_first_of_folder())
                found = _look(self.folders[0], self.notes)
            except Exception as error:
                failure = error
            world.all_or_none(failure, "take the folders of the durable state", (CheckpointError,))
            everywhere = self._gather(found)
            chosen = _last_whole(everywhere)
            generation = 1 + max((each.generation for each in everywhere), default=0)
            generation = max(generation, 1 + self._newest_name())
            generation = world.agree(generation, max, "the number of this start")
            failure = None
            try:
                self._read(chosen)
            except Exception as error:
                failure = error
            world.all_or_none(failure, "read the last commit", (CheckpointError,))
        except BaseException:
            self.close()
            raise
        self.files = StateFiles(self.folders, generation, self._rank, self._ranks)
        kept = self.last[0].generation if self.last else None
        self._remove(lambda each: each < generation and each != kept)
        self._has_older = kept is not None

    def _make(self) -> None:
        for folder in self.folders:
            try:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                sync_path(Path(folder).parent)
            except OSError as error:
                raise StoreError(
                    error.errno, f"cannot make the folder: {error.strerror}", folder
                ) from error

    def _is_first_of_folder(self) -> bool:
        """Whether this rank takes the lock for all that see the same folder."""
        if self._world.everyone is None:
            return True
        status = os.stat(self.folders[0])
        mine = f"{os.uname().nodename} {status.st_dev} {status.st_ino}".encode()
        found = self._world.everyone.all_gather_bytes(mine, "comparing the ranks' folders")
        return found.index(mine) == self._rank

    def _take(self, is_first: bool) -> None:
        """Takes the lock. Raises CheckpointError if another process has it."""
        if not is_first:
            return
        path = os.path.join(self.folders[0], _LOCK)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    raise StoreError(
                        error.errno, f"cannot be locked: {error.strerror}", path
                    ) from error
            if time.monotonic() > until:
                owner = os.pread(self._lock, 100, 0).decode(errors="replace").strip()
                raise CheckpointError(
                    f"{self.folders[0]} is the durable state of another process that runs "
                    f"({owner or 'unknown'}); end it, or give this training another nvme_path"
                )
            time.sleep(0.05)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)

    def _gather(self, found: Sequence[_Found]) -> list[_Found]:
        """What all ranks have found."""
        if self._world.everyone is None:
            return list(found)
        content = json.dumps([list(vars(each).values()) for each in found]).encode()
        gathered = self._world.everyone.all_gather_bytes(content, "looking for the last commit")
        everything = [_Found(*each) for one in gathered for each in json.loads(one)]
        return list(dict.fromkeys(everything))

    def _newest_name(self) -> int:
        """The largest generation in any name in the folders."""
        found = [0]
        for folder in self.folders:
            for name in os.listdir(folder):
                match = _NAME.fullmatch(name)
                if match is not None:
                    found.append(int(match[1]))
        return max(found)

    def _read(self, chosen: Mapping[int, _Found]) -> None:
        """Reads the records of the last commit, of all ranks that made it."""
        records = []
        for rank in sorted(chosen):
            path = chosen[rank].path
            try:
                with open(path, "rb") as stream:
                    record = decode(stream.read(), path)
            except OSError as error:
                raise CheckpointError(
                    f"the last commit needs {path}, which another rank sees and {self._world.name} "
                    f"does not ({error.strerror}); with another number of ranks all must see all "
                    f"of the directories"
                ) from error
            assert record is not None
            records.append(record)
        self.last = tuple(records)

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
            for name in _listed(folder):
                match = _NAME.fullmatch(name)
                if match is None or rank not in (None, int(match[2])):
                    continue
                if goes(int(match[1])):
                    with contextlib.suppress(OSError):  # another rank was faster
                        os.unlink(os.path.join(folder, name))

    def close(self) -> None:
        """Other processes may take the folders; idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _look(folder: str, notes: list[str]) -> list[_Found]:
    """The records in the folder. Raises CheckpointError, StoreError."""
    found: list[_Found] = []
    names = sorted(os.listdir(folder))
    damaged: dict[str, list[str]] = {}
    blank: set[str] = set()
    for name in names:
        match = _RECORD.fullmatch(name)
        if match is None:
            continue
        path = os.path.join(folder, name)
        stem = name[:-1]
        try:
            with open(path, "rb") as stream:
                record = decode(stream.read(), path)
        except OSError as error:
            raise StoreError(error.errno, f"cannot be read: {error.strerror}", path) from error
        except CheckpointError as error:
            damaged.setdefault(stem, []).append(str(error))
            continue
        if record is None:
            blank.add(stem)
            continue
        said = (record.generation, record.rank, record.ranks)
        if said != tuple(int(group) for group in match.groups()):
            raise CheckpointError(
                f"{path} is of another file: it says generation {said[0]}, rank {said[1]} of "
                f"{said[2]}"
            )
        found.append(_Found(record.generation, record.number, record.rank, record.ranks, path))
    whole = {os.path.basename(each.path)[:-1] for each in found}
    for stem, errors in damaged.items():
        # The first commit of a start may have been cut off: then there is no other record.
        both = all(f"{stem}{turn}" in names for turn in (0, 1))
        if stem not in whole and both:
            raise CheckpointError(
                f"both commit records of {stem[:-8]} are damaged: {'; '.join(errors)}"
            )
        notes.append(
            f"a commit was not completed, or its record is damaged, and the one before it is "
            f"used: {'; '.join(errors)}"
        )
    return found


def _last_whole(found: Iterable[_Found]) -> dict[int, _Found]:
    """By rank, the records of the last commit that all its ranks have made; empty without any.

    Raises CheckpointError if there are commits, and of none the records of all ranks.
    """
    commits: dict[tuple[int, int, int], dict[int, _Found]] = {}
    for each in found:
        commits.setdefault((each.generation, each.number, each.ranks), {})[each.rank] = each
    whole = [key for key, ranks in commits.items() if len(ranks) == key[2]]
    if whole:
        return commits[max(whole)]
    if any(number > 1 for _, number, _ in commits):
        generation, number, count = max(commits)
        has = sorted(commits[generation, number, count])
        raise CheckpointError(
            f"commit {number} of {count} ranks has records of the ranks {has} alone; the "
            f"directories of the others are needed, too"
        )
    return {}


def read_last_commit(folder: Path) -> tuple[Record, ...]:
    """The records of the last commit in a folder that nobody takes; empty if there is none.

    Raises CheckpointError, StoreError.
    """
    chosen = _last_whole(_look(str(folder), []))
    records = (decode(Path(chosen[rank].path).read_bytes(), chosen[rank].path) for rank in chosen)
    found = sorted((each for each in records if each is not None), key=lambda each: each.rank)
    return tuple(found)
