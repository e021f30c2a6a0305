"""Checkpoints that are written into a new folder: each rank its part, then the first one the rest.

A CheckpointWrite is a format, and a StoredCheckpoint that it writes: one of another format, or a
model in training.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import torch

from hetero.checkpoint.data_writer import DataWriter, Range, WrittenFile
from hetero.checkpoint.engine_checkpoint import finish_updates
from hetero.checkpoint.manifest import NAME, Manifest, TensorRecord, master_key
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.engine import Engine
from offload.disk.durable import write_durably
from offload.disk.new_folder import NewFolder
from offload.errors import CheckpointError, HeteroError, StoreError

SAME_CLASS: tuple[type[HeteroError], ...] = (CheckpointError, StoreError)


class CheckpointWrite(ABC):
    """One rank's part of a checkpoint that is written.

    Attributes:
        stored: has the values; of a model in training this rank's.
        digest: the same on all ranks if they write the same.
    """

    digest = ""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self.stored = stored

    def begin(self, folder: Path) -> None:  # noqa: B027
        """Writes what comes first; the first rank calls it. Raises OSError."""

    @abstractmethod
    def write(self, folder: Path) -> bytes:
        """Writes this rank's files, durably; returns what finish() needs of it.

        Raises OSError, NativeIoError, and what reading the values raises.
        """

    @abstractmethod
    def finish(self, folder: NewFolder, parts: Sequence[bytes]) -> None:
        """Writes the rest, durably, when all ranks have written; the first rank calls it.

        Args:
            folder: the folder.
            parts: what write() has returned on each rank.

        Raises OSError, CheckpointError.
        """


class HeteroWrite(CheckpointWrite):
    """Writes hetero's own format: a data file of each rank, and the manifest."""

    def __init__(
        self,
        stored: StoredCheckpoint,
        manifest: Manifest,
        rank: int = 0,
        ranks: int = 1,
        io_engine: str = "auto",
    ) -> None:
        """Nothing is written yet.

        Args:
            stored: has the values.
            manifest: what is written of them, and in which dtypes; of `data` and `ranks` this
                rank's alone.
            rank: this rank's number.
            ranks: how many there are.
            io_engine: as in Config.
        """
        super().__init__(stored)
        self._manifest = manifest
        self._name = f"rank-{rank:04}-of-{ranks:04}.safetensors"
        self._io_engine = io_engine

    @classmethod
    def of_stored(cls, stored: StoredCheckpoint, dtype: torch.dtype | None) -> HeteroWrite:
        """Of a checkpoint of another format; `dtype` is that of parameters that were not trained.

        What a rank alone has (random numbers, extra) is left out: loading leaves random numbers as
        they are.
        """
        manifest = stored.manifest
        tensors = _shared(manifest)
        for name, param in manifest.params.items():
            wanted = torch.float32 if param.trained else dtype
            if wanted is not None:
                tensors[master_key(name)] = replace(tensors[master_key(name)], dtype=wanted)
        return cls(stored, replace(manifest, tensors=tensors, ranks=()))

    def regions(self) -> list[list[Range]]:
        """The ranges that are written together, by region."""
        return [list(ranges) for _, ranges in groupby(self.stored.ranges(), lambda each: each[0])]

    def fill(self, writer: DataWriter) -> None:
        """Writes all regions. Raises as write()."""
        contents = self.stored.contents(self._manifest.tensors)
        for number, (_, of_key) in enumerate(groupby(contents, lambda each: each[0])):
            writer.write_region(
                number, (flat.to(self._manifest.tensors[key].dtype) for key, _, flat in of_key)
            )

    def write(self, folder: Path) -> bytes:
        """See CheckpointWrite."""
        dtypes = {key: tensor.dtype for key, tensor in self._manifest.tensors.items()}
        path = folder / self._name
        with closing(DataWriter(path, self.regions(), dtypes, self._io_engine)) as writer:
            self.fill(writer)
            written = writer.finish()
        shared, tensors = _shared(self._manifest), self._manifest.tensors
        part = {
            "name": self._name,
            "file": asdict(written),
            "tensors": {key: t.to_json() for key, t in tensors.items() if key not in shared},
            "data": list(self._manifest.ranks),
        }
        return json.dumps(part).encode()

    def finish(self, folder: NewFolder, parts: Sequence[bytes]) -> None:
        """See CheckpointWrite."""
        found = [json.loads(part) for part in parts]
        tensors = _shared(self._manifest)
        for each in found:
            own = each["tensors"].items()
            tensors |= {key: TensorRecord.of_json(tensor, key) for key, tensor in own}
        files = {each["name"]: WrittenFile(**each["file"]) for each in found}
        ranks = [data for each in found for data in each["data"]]
        whole = replace(self._manifest, files=files, tensors=tensors, ranks=ranks)
        folder.require_files(files)
        write_durably(folder.incomplete / NAME, whole.to_json())


def _shared(manifest: Manifest) -> dict[str, TensorRecord]:
    """The tensors without those that a rank alone has."""
    return {key: t for key, t in manifest.tensors.items() if not key.startswith("data/")}


def write_together(
    world: ProcessGroups,
    folder: NewFolder,
    what: str,
    write: CheckpointWrite,
    same_class: tuple[type[HeteroError], ...] = SAME_CLASS,
) -> None:
    """Each rank writes its part into a folder that was begun, which then gets its name.

    All ranks must call it.

    Args:
        world: the ranks.
        folder: the first rank's changes.
        what: what all ranks do, with a verb first.
        write: this rank's part.
        same_class: as ProcessGroups.all_or_none() has it.

    Raises what this rank met, or another one.
    """
    everyone = world.everyone

    def write_part() -> bytes:
        folder.require_seen(world.name)
        with folder.as_store_error(f"write {folder.noun}"):
            return write.write(folder.incomplete)

    def complete() -> None:
        if everyone is None or everyone.rank == 0:
            with folder.as_store_error(f"complete {folder.noun}"):
                write.finish(folder, parts)
            folder.complete()

    part = world.together(what, write_part, same_class)
    parts = [part] if everyone is None else everyone.all_gather_bytes(part, what)
    world.together(f"{what} to its end", complete, same_class)


def export(
    engine: Engine,
    folder: NewFolder,
    what: str,
    make: Callable[[], CheckpointWrite],
    refuse: Callable[[Path], None],
) -> None:
    """Writes a model in training in another format, while training waits. All ranks call it.

    Args:
        engine: the model's.
        folder: where.
        what: what all ranks do, with a verb first.
        make: makes this rank's part, when no updates are under way.
        refuse: raises ValueError if at the folder's place is something that must stay.

    Raises what this rank met, or another one; HeteroError if ranks would write different things.
    """
    world = engine.world

    def plan() -> CheckpointWrite:
        finish_updates(engine)
        return make()

    def begin() -> None:
        if world.everyone is None or world.everyone.rank == 0:
            refuse(folder.path)
            folder.begin()
            with folder.as_store_error(f"write {folder.noun}"):
                write.begin(folder.incomplete)

    write = world.together(f"plan to {what}", plan, SAME_CLASS)
    try:
        world.require_equal({"the files": write.digest}, "the exports")
        world.together(f"begin to {what}", begin, SAME_CLASS)
        write_together(world, folder, what, write)
    finally:
        write.stored.close()
        folder.abandon()
