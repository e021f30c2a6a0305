"""The folders of one durable state: which set a folder belongs to, and its place there.

Data files are striped over all folders of a state, so that each of them is needed. A file in each
folder therefore names the set and the others, and which start's commits it has data of: a folder
that is missing, is another training's, or has lost its records is recognised before anything in it
is changed. docs/formats.md describes the format.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hetero.checkpoint.schema import crc_of, parse_json, typed
from hetero.durable.record import OWN_FILE, VERSION, later_version
from hetero.state.state_files import SET_NAMES, is_record, is_state_file
from offload.disk.durable import sync_path, write_all
from offload.errors import CheckpointError, StoreError

_FORMAT = "hetero durable state"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class StateSet:
    """What a folder knows of its set.

    Attributes:
        set: 32 hexadecimal digits, which no other set has.
        place: this folder's, from 0; the records are in the folder at place 0.
        folders: all of the set by place, relative to this one, where they were at the last start.
        generation: the last start that has made a commit; 0 before the first one.
    """

    set: str
    place: int
    folders: tuple[str, ...]
    generation: int

    def paths(self, folder: str) -> tuple[str, ...]:
        """All folders of the set, seen from `folder`, which is this one."""
        return tuple(os.path.normpath(os.path.join(folder, each)) for each in self.folders)

    def write(self, folder: str) -> None:
        """Writes both copies, one after the other, so that one is whole. Raises StoreError.

        The first one is a copy that is not whole, as a write that was killed may have left it.
        """
        text = json.dumps({"format": _FORMAT, "version": VERSION, **asdict(self)})
        content = f"{crc_of(text.encode()):08x} {text}\n".encode()
        for path in sorted((os.path.join(folder, name) for name in SET_NAMES), key=_is_whole):
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                descriptor = os.open(path, flags | OWN_FILE, 0o600)
                try:
                    write_all(descriptor, content, 0)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                sync_path(Path(folder))
            except OSError as error:
                raise StoreError(
                    error.errno, f"cannot be written: {error.strerror}", path
                ) from error

    @staticmethod
    def read(folder: str, notes: list[str]) -> StateSet | None:
        """What `folder` has; None if nothing was ever written whole. A damaged copy is noted.

        Raises CheckpointError if both are damaged, StoreError if they cannot be read.
        """
        found: list[StateSet] = []
        damaged: list[str] = []
        missing: list[str] = []
        for name in SET_NAMES:
            path = os.path.join(folder, name)
            content = _content(path)
            if content is None:
                missing.append(f"{path} is missing")
                continue
            try:
                found.append(_parse(content, path))
            except _DamagedError as error:
                damaged.append(str(error))
        if len(damaged) == len(SET_NAMES):
            raise CheckpointError("; ".join(damaged))
        if found:
            notes.extend(f"{each}; its copy is used" for each in (*damaged, *missing))
        return max(found, key=lambda each: each.generation, default=None)


def _content(path: str) -> bytes | None:
    """Of a copy; None if it is missing. Raises StoreError."""
    try:
        with open(os.open(path, os.O_RDONLY | OWN_FILE), "rb") as stream:
            return stream.read(_MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(error.errno, f"cannot be read: {error.strerror}", path) from error


def _is_whole(path: str) -> bool:
    """Whether a copy is there, and not damaged. Raises StoreError."""
    content = _content(path)
    with contextlib.suppress(CheckpointError):
        return content is not None and _parse(content, path) is not None
    return False


class _DamagedError(CheckpointError):
    """One copy cannot be read."""


def _parse(content: bytes, path: str) -> StateSet:
    """Raises _DamagedError; CheckpointError if it is of another version."""
    crc, _, text = content.rstrip(b"\n").partition(b" ")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        version = json.loads(text)["version"]
        if type(version) is int and version != VERSION:
            raise later_version(path, version)
    if not text or crc != f"{crc_of(text):08x}".encode():
        raise _DamagedError(f"{path} is damaged, or was not written to its end")
    try:
        made: StateSet = typed(StateSet, parse_json(text, path), path)
    except CheckpointError as error:
        raise _DamagedError(str(error)) from None
    if made.place >= len(made.folders):
        raise _DamagedError(f"{path} has place {made.place} of {len(made.folders)}")
    return made


def join(folders: Sequence[str], notes: list[str]) -> None:
    """Makes `folders` a set, if nothing in them is of one; they are locked by this process.

    Raises CheckpointError, with nothing changed, if they are not a whole set.
    """
    found = {folder: StateSet.read(folder, notes) for folder in folders}
    names = {folder: os.listdir(folder) for folder in folders}
    for folder, each in found.items():
        if each is None and any(map(is_state_file, names[folder])):
            raise CheckpointError(
                f"{folder} has files of a durable state and no {SET_NAMES[0]}, which says of which "
                f"one: they are of version 1 of the format, which this hetero does not read, or "
                f"{SET_NAMES[0]} and {SET_NAMES[1]} were removed"
            )
    # (What came to no commit has nothing that could be lost.)
    known = {
        folder: each
        for folder, each in found.items()
        if each is not None and (each.generation or any(map(is_record, names[folder])))
    }
    if known:
        ordered = _whole_set(folders, known, found)
        identity = next(iter(known.values())).set
    else:
        ordered, identity = list(folders), os.urandom(16).hex()
    for place, folder in enumerate(ordered):
        relative = tuple(os.path.relpath(each, folder) for each in ordered)
        before = found[folder] if known else None
        made = StateSet(identity, place, relative, before.generation if before else 0)
        if made != before or notes:
            made.write(folder)


def _whole_set(
    folders: Sequence[str],
    known: Mapping[str, StateSet],
    found: Mapping[str, StateSet | None],
) -> list[str]:
    """The folders by place. Raises CheckpointError unless they are one whole set."""
    first, one = next(iter(known.items()))
    wanted = [os.path.dirname(each) for each in one.paths(first)]
    by_place: dict[int, str] = {}
    wrong: list[str] = []
    for folder in folders:
        part = found[folder]
        if part is None or part.set != one.set:
            what = "is of another one" if folder in known else "has no part of it"
            wrong.append(f"{folder} {what}")
        elif part.place in by_place or len(part.folders) != len(wanted):
            wrong.append(f"{folder} is a copy of {by_place.get(part.place, first)}")
        else:
            by_place[part.place] = folder
    wrong += [f"{each} is missing" for i, each in enumerate(wanted) if i not in by_place]
    if wrong:
        raise CheckpointError(
            f"{first} is of a durable state in {wanted}, and {', '.join(wrong)}; give "
            f"nvme_path={wanted}, in any order, wherever these are now. For other folders save a "
            f"checkpoint (hetero.save()), and load it in a training with a new nvme_path"
        )
    return [by_place[place] for place in range(len(wanted))]


def in_order(folders: Sequence[str]) -> tuple[str, tuple[str, ...], int]:
    """The identity of the set that join() has made of `folders`, they by place, and the last start
    that has made a commit, as any of them says.

    Raises CheckpointError, StoreError.
    """
    found = {folder: StateSet.read(folder, []) for folder in folders}
    sets = {folder: each for folder, each in found.items() if each is not None}
    if len(sets) < len(folders) or len({each.set for each in sets.values()}) > 1:
        raise CheckpointError(f"{', '.join(folders)} are not the folders of one durable state")
    ordered = tuple(sorted(sets, key=lambda folder: sets[folder].place))
    identity = sets[ordered[0]].set
    return identity, ordered, max(each.generation for each in sets.values())


def note_commit(folders: Sequence[str], generation: int) -> None:
    """The set in `folders`, by place, has a commit of this start. Raises StoreError."""
    for folder in folders:
        found = StateSet.read(folder, [])
        if found is not None and found.generation != generation:
            replace(found, generation=generation).write(folder)
