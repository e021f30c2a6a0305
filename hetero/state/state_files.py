"""The files of a durable state: where they are, and what their names say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = "hetero-state"  # in each directory of nvme_path
LOCK_NAME = "lock"
SET_NAMES = ("set-0", "set-1")
COPIES = (0, 1)  # of a commit record
_NAME = re.compile(r"(\d{6,})-rank-(\d{4,})-of-(\d{4,})[-.].*", re.ASCII)
_RECORD = re.compile(r"(\d{6,})-rank-(\d{4,})-of-(\d{4,})\.commit-[01]", re.ASCII)


@dataclass(frozen=True)
class StateFiles:
    """The files of one rank: data files, one a chunk group, and those of the commit records.

    A data file has a member of the same name in each folder; records are in the first one. Each
    start of a training makes files of its own, with the next `generation` in their names; those of
    the start before go when the new ones have a commit.

    Attributes:
        folders: one in each directory of nvme_path, by their places in the set (StateSet).
        generation: from 1.
        rank: this rank's number among all `ranks` of the training.
    """

    folders: tuple[str, ...]
    generation: int
    rank: int
    ranks: int

    @property
    def prefix(self) -> str:
        """What the names of all these files begin with."""
        return f"{self.generation:06}-rank-{self.rank:04}-of-{self.ranks:04}"

    def data_name(self, chunk_group: int) -> str:
        """The name of the data file of a chunk group."""
        return f"{self.prefix}-group-{chunk_group:03}.data"

    def record_path(self, copy: int) -> Path:
        """Where one of the two COPIES of the last commit's record is."""
        return Path(self.folders[0]) / f"{self.prefix}.commit-{copy}"


def is_state_file(name: str) -> bool:
    """Whether a start has made a file of this name."""
    return _NAME.fullmatch(name) is not None


def is_record(name: str) -> bool:
    """Whether a file of this name has a commit record."""
    return _RECORD.fullmatch(name) is not None


def numbers_of(name: str) -> tuple[int, int, int] | None:
    """Generation, rank and ranks in the name of a file of a start; None of other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))
