"""The names of the files that a durable state is in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = "hetero-state"  # in each directory of nvme_path


@dataclass(frozen=True)
class StateFiles:
    """The files of one rank: data files, one a chunk group, and those of the commit records.

    A data file has a member of the same name in each folder; records are in the first one. Each
    start of a training makes files of its own, with the next `generation` in their names; those of
    the start before go when the new ones have a commit.

    Attributes:
        folders: one in each directory of nvme_path.
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

    def record_path(self, number: int) -> Path:
        """Where the record of commit `number` is: two files take turns."""
        return Path(self.folders[0]) / f"{self.prefix}.commit-{number % 2}"
