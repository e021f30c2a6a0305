"""What a loss of power could leave of the changes that recorder.cpp has noted.

A file has what was there when its last fsync() began that has returned; of what was written since,
any sectors, and its size as after any of the changes since. A folder has the names as after any of
its changes since its own last fsync(), which is more than a journal would allow.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECTOR_BYTES = 512
MARKS = "marks"  # the file that the program notes in what it was told
_ENTRY = struct.Struct("=IIQQQ")
_WRITE, _RESIZE, _CREATE, _MAKE_FOLDER, _REMOVE, _RENAME, _EXCHANGE, _SYNC, _SYNCED = range(9)


@dataclass(frozen=True)
class Entry:
    """One change."""

    kind: int
    inode: int
    other: int
    offset: int
    data: bytes


def read_log(path: Path) -> list[Entry]:
    """All changes, in order."""
    content, at, found = path.read_bytes(), 0, []
    while at < len(content):
        kind, nbytes, inode, other, offset = _ENTRY.unpack_from(content, at)
        at += _ENTRY.size
        found.append(Entry(kind, inode, other, offset, content[at : at + nbytes]))
        at += nbytes
    return found


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)  # durable
    changes: list[Entry] = field(default_factory=list)  # since
    dropped: int = 0  # how many changes before them

    def make_durable(self, until: int) -> None:
        count = max(0, until - self.dropped)
        for change in self.changes[:count]:
            _apply(self.content, change)
        self.changes = self.changes[count:]
        self.dropped += count

    def after_loss(self, chances: random.Random, kept: float) -> bytes:
        content, resizes = bytearray(self.content), True
        for change in self.changes:
            if change.kind == _RESIZE:
                resizes = resizes and chances.random() < kept
                if resizes:
                    _apply(content, change)
                continue
            for at in range(0, len(change.data), SECTOR_BYTES):
                if chances.random() < kept:
                    part = change.data[at : at + SECTOR_BYTES]
                    _apply(content, Entry(_WRITE, 0, 0, change.offset + at, part))
        return bytes(content)


def _apply(content: bytearray, change: Entry) -> None:
    size = change.offset + (len(change.data) if change.kind == _WRITE else 0)
    if change.kind == _RESIZE:
        del content[size:]
    if len(content) < size:
        content.extend(bytes(size - len(content)))
    if change.kind == _WRITE:
        content[change.offset : size] = change.data


Names = dict[str, "_File | _Folder"]


@dataclass
class _Folder:
    names: Names = field(default_factory=dict)  # now
    durable: Names = field(default_factory=dict)
    changes: list[Names] = field(default_factory=list)  # what there was after each since
    dropped: int = 0

    def changed(self) -> None:
        self.changes.append(dict(self.names))

    def make_durable(self, until: int) -> None:
        count = max(0, until - self.dropped)
        if count:
            self.durable = self.changes[count - 1]
            self.changes = self.changes[count:]
            self.dropped += count

    def after_loss(self, chances: random.Random, kept: float) -> Names:
        count = sum(chances.random() < kept for _ in self.changes)
        return self.changes[count - 1] if count else self.durable


class Disk:
    """A folder as it is after the changes so far, and what a loss of power would leave of it."""

    def __init__(self, root: int) -> None:
        """An empty folder of this inode."""
        self.root = _Folder()
        self._objects: dict[int, _File | _Folder] = {root: self.root}
        self._syncs: dict[int, int] = {}

    def apply(self, entry: Entry) -> None:
        """Makes one change."""
        one = self._objects.get(entry.inode)
        if one is None:
            return  # of a file that had no name when it was made
        if entry.kind in (_SYNC, _SYNCED):
            if entry.kind == _SYNC:
                self._syncs[entry.other] = one.dropped + len(one.changes)
            else:
                one.make_durable(self._syncs.pop(entry.other))
        elif isinstance(one, _File):
            one.changes.append(entry)
        else:
            self._change_names(one, entry)
            one.changed()

    def _change_names(self, folder: _Folder, entry: Entry) -> None:
        first, _, second = entry.data.decode().partition("\0")
        if entry.kind in (_CREATE, _MAKE_FOLDER):
            made = _File() if entry.kind == _CREATE else _Folder()
            folder.names[first] = self._objects[entry.other] = made
        elif entry.kind == _REMOVE:
            del folder.names[first]
        else:
            assert entry.other == entry.inode, f"{first} goes to another folder"
            moved = folder.names.pop(first)
            if entry.kind == _EXCHANGE:
                folder.names[first] = folder.names[second]
            folder.names[second] = moved

    def marks(self) -> list[str]:
        """What the program has noted so far: lines."""
        file = self.root.names.get(MARKS)
        if not isinstance(file, _File):
            return []
        return file.after_loss(random.Random(0), 1.0).decode().split()

    def write_after_loss(self, to: Path, chances: random.Random, kept: float) -> None:
        """Makes the folder `to` of what is left; each change that may be lost is kept by chance."""
        _write(self.root, to, chances, kept)


def _write(folder: _Folder, to: Path, chances: random.Random, kept: float) -> None:
    os.mkdir(to, 0o700)
    for name, each in folder.after_loss(chances, kept).items():
        if isinstance(each, _Folder):
            _write(each, to / name, chances, kept)
        elif name != MARKS:
            (to / name).write_bytes(each.after_loss(chances, kept))


def losses(log: list[Entry], root: int, count: int, seed: int) -> Iterator[tuple[Disk, float]]:
    """The disk at `count` moments of the log, spread evenly, each with the chance of a change."""
    disk, chances, done = Disk(root), random.Random(seed), 0
    for number in range(count):
        until = (number + 1) * len(log) // count
        for entry in log[done:until]:
            disk.apply(entry)
        done = until
        yield disk, chances.choice([0.0, 0.2, 0.5, 0.8, 1.0])
