"""The last commit of a durable state as a stored checkpoint, with or without a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from hetero.checkpoint.engine_checkpoint import STATE_NAMES
from hetero.checkpoint.formats import open_checkpoint
from hetero.checkpoint.manifest import Manifest, master_key, name_of
from hetero.checkpoint.piece_reader import FileRange, PieceCheckpoint, StoredPiece
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.durable.record import Record, StoredChunk, StoredGroup, StoredSlice
from hetero.durable.state_folder import read_last_commit
from hetero.state.memory import list_names
from hetero.state.optimizer_state import TileCodec, TileState
from hetero.state.state_files import FOLDER
from offload._native import IoEngine, StripeMap
from offload.disk.file_member import open_direct
from offload.errors import CheckpointError
from offload.memory.sizes import PAGE_BYTES

_PIECE_NUMEL = 1 << 20  # elements that are read at once
_BLOCK_NUMEL = 64  # of states in 8 bits; parameters and tiles begin with a block


@dataclass(frozen=True, slots=True)
class CommitPiece(StoredPiece):
    """A part of a parameter in one tile: of its value, and its master and states if it has them.

    Attributes:
        file: the number of the data file.
        group: the chunk group of the rank that has it.
        chunk: its chunk.
        tile: in that rank's shard.
        first: its first element, in the tile.
    """

    file: int
    group: StoredGroup
    chunk: StoredChunk
    tile: int
    first: int

    @property
    def where(self) -> str:
        """See StoredPiece."""
        return f"{name_of(self.key)} of the last commit"

    def ranges(self) -> list[FileRange]:
        """See StoredPiece: parameters, masters, and each state."""
        group, dtypes, numel = self.group, self.group.dtypes, self.end - self.begin

        def array(tile_at: int, size: int) -> FileRange:
            return FileRange(self.file, tile_at + self.first * size, numel * size)

        found = [array(self.chunk.param + self.tile * group.param_bytes, dtypes.param_bytes)]
        if self.chunk.optim_state is None:
            return found
        kind, tile_at = dtypes.kind, self.chunk.optim_state + self.tile * group.optim_state_bytes
        if dtypes.master_bytes:
            found.append(array(tile_at, dtypes.master_bytes))
        first, end = kind.state_bytes(self.first), kind.state_bytes(self.first + numel)
        for i in range(kind.states):
            state_at = tile_at + kind.state_at(i, group.tile_numel)
            found.append(FileRange(self.file, state_at + first, end - first))
        return found

    def values(
        self, key: str, arrays: Sequence[torch.Tensor], begin: int, end: int
    ) -> torch.Tensor:
        """See StoredPiece."""
        dtypes, (first, *others) = self.group.dtypes, arrays
        param = first.view(dtypes.torch_compute)[begin:end]
        if not self.chunk.trained:
            return param
        master = None
        if dtypes.master_bytes:
            master = others.pop(0).view(torch.int16 if dtypes.compute == "bf16" else torch.float32)
        tile_state = TileState(master, tuple(each.view(dtypes.torch_state) for each in others))
        codec = TileCodec(self.group.tile_numel, dtypes)
        if key == self.key:
            return codec.join(param, tile_state, slice(begin, end))
        shift = begin % _BLOCK_NUMEL
        number = STATE_NAMES[dtypes.rule].index(key.rpartition("/")[2])
        return codec.states(tile_state, slice(begin - shift, end))[number][shift:]


class StoredCommit(PieceCheckpoint):
    """What hetero.commit(), or step() with durable=True, has made durable last."""

    kind = "commit of a durable state"

    def __init__(self, path: Path, records: Sequence[Record], io_engine: str = "auto") -> None:
        """Opens no data file yet; `records` are of all ranks, in their order, in the folder `path`.

        The training may go on: what it overwrites meanwhile is an error of a checksum.
        """
        super().__init__(path, io_engine)
        self.manifest = _merged_manifest(records)
        self.small = {key: t for record in records for key, t in record.small.items()}
        self._records = records

    @classmethod
    def of_folder(cls, path: Path) -> StoredCommit | None:
        """That of a folder that nobody takes; None if it has none yet. Notes go to stderr, too.

        Raises CheckpointError, StoreError.
        """
        notes: list[str] = []
        records = read_last_commit(path, notes)
        for note in notes:
            print(f"hetero: {note}", file=sys.stderr)
        if not records:
            return None
        made = cls(path, records)
        paths = {each for r in records for group in r.groups for each in data_paths(r, group)}
        made.files = {os.path.relpath(each, path): os.stat(each).st_size for each in sorted(paths)}
        return made

    @cached_property
    def _shards(self) -> list[dict[int, tuple[Record, StoredGroup]]]:
        """By chunk group and its rank. Raises CheckpointError if the records do not fit."""
        return _shards(self._records, self.path)

    @cached_property
    def _files(self) -> list[tuple[Record, StoredGroup]]:
        """The data files by number: of each chunk group those of its ranks, in their order."""
        return [shards[rank] for shards in self._shards for rank in sorted(shards)]

    @cached_property
    def _pieces(self) -> dict[str, list[CommitPiece]]:
        """By the parameter's key, cut at the borders of tiles. Raises CheckpointError."""
        found: dict[str, list[CommitPiece]] = {}
        first_file = 0
        for shards in self._shards:
            for chunk_id, chunk in enumerate(shards[0][1].chunks):
                for each in chunk.slices:
                    key = master_key(each.name)
                    found[key] = [*self._pieces_in(shards, first_file, chunk_id, each)]
            first_file += len(shards)
        return found

    def _pieces_in(
        self,
        shards: Mapping[int, tuple[Record, StoredGroup]],
        first_file: int,
        chunk_id: int,
        place: StoredSlice,
    ) -> Iterator[CommitPiece]:
        """Those of a parameter, whose chunk group has its files from number `first_file` on."""
        tile_numel, slots = shards[0][1].tile_numel, shards[0][1].chunks[chunk_id].slots
        key, at, end = master_key(place.name), place.offset, place.offset + place.numel
        numel = self.manifest.tensors[key].numel
        has_place = end <= len(shards) * slots * tile_numel and not at % _BLOCK_NUMEL
        if not has_place or place.numel != numel:
            raise CheckpointError(
                f"the last commit in {self.path} has {place.name!r} of {numel} elements at "
                f"elements {at} to {end} of a chunk, where it has no place"
            )
        while at < end:
            tile, first = divmod(at, tile_numel)
            stop = min(at + _PIECE_NUMEL, at + tile_numel - first, end)
            rank, tile = divmod(tile, slots)
            group = shards[rank][1]
            begin, file = at - place.offset, first_file + rank
            yield CommitPiece(
                key, begin, stop - place.offset, file, group, group.chunks[chunk_id], tile, first
            )
            at = stop

    def _pieces_of(self, key: str) -> Sequence[CommitPiece]:
        return self._pieces.get(master_key(name_of(key)), ())

    def _open_file(self, io: IoEngine, file: int) -> int:
        record, group = self._files[file]
        if group.checksums_at is None:
            raise CheckpointError(
                f"the last commit needs the data files of {record.path}, which another rank sees "
                f"and this one does not; with other budgets, chunks or numbers of ranks than it "
                f"was made with all must see all of the directories"
            )
        members = []
        with ExitStack() as opened:
            for path in data_paths(record, group):
                if os.path.exists(path) and not os.path.isfile(path):  # (a pipe has no end)
                    raise CheckpointError(f"the last commit needs {path}: it is no regular file")
                try:
                    descriptor, _ = open_direct(path, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"the last commit needs {path}: {error}") from error
                opened.callback(os.close, descriptor)
                members.append((descriptor, path))
            stripes = StripeMap(group.weights, group.unit_bytes)
            number = io.add_striped_file(members, stripes, checksums=True)
        try:
            with open(record.path, "rb") as stream:
                stream.seek(group.checksums_at)
                for _, offset, nbytes in group.pieces():
                    checksums = stream.read(nbytes // PAGE_BYTES * 4)
                    io.set_checksums(number, offset, checksums)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{record.path} cannot be read again: {error}") from error
        for chunk, offset, nbytes in group.extents():
            names = list_names([each.name for each in chunk.slices])
            io.name_range(number, offset, nbytes, names)
        return number


def data_paths(record: Record, group: StoredGroup) -> list[str]:
    """The members of a group's data file. Raises CheckpointError if its set has fewer folders."""
    if max(group.places) >= len(record.folders):
        raise CheckpointError(
            f"{record.path} has data in folder {max(group.places)} of {len(record.folders)}"
        )
    return [os.path.join(record.folders[place], group.name) for place in group.places]


def _shards(records: Sequence[Record], folder: Path) -> list[dict[int, tuple[Record, StoredGroup]]]:
    """By chunk group, the shards by rank, and the records that have them; of replicas, which have
    the same, the first ones that are seen here."""
    found: list[dict[int, tuple[Record, StoredGroup]]] = []
    first = records[0]
    for record in records:
        if len(record.groups) != len(first.groups):
            raise CheckpointError(f"the ranks of the last commit in {folder} do not fit each other")
        for number, group in enumerate(record.groups):
            like = first.groups[number]
            facts = [
                (
                    (g.compute, g.rule, g.state, g.tile_numel, g.ranks),
                    [(c.slots, c.trained, c.slices) for c in g.chunks],
                )
                for g in (group, like)
            ]
            if facts[0] != facts[1]:
                raise CheckpointError(f"the ranks of the last commit in {folder} have other chunks")
            if number == len(found):
                found.append({})
            known = found[number].get(group.rank)
            if known is None or known[1].checksums_at is None:
                found[number][group.rank] = record, group
    for number, shards in enumerate(found):
        missing = sorted(set(range(first.groups[number].ranks)) - set(shards))
        if missing:
            raise CheckpointError(f"the last commit in {folder} lacks shards {missing}")
    return found


def _merged_manifest(records: Sequence[Record]) -> Manifest:
    """The manifest of a commit, whose records of all ranks these are."""
    tensors = dict(records[0].manifest.tensors)
    for record in records:
        tensors |= {k: t for k, t in record.manifest.tensors.items() if k.startswith("data/")}
    ranks = [record.manifest.ranks[0] for record in records]
    return replace(records[0].manifest, tensors=tensors, ranks=ranks)


def open_stored(path: Path) -> StoredCheckpoint:
    """Opens a checkpoint in any format, or the last commit in a folder "hetero-state".

    `path` may be the folder that has it.

    Raises as open_checkpoint(), and CheckpointError.
    """
    for folder in (path, path / FOLDER):
        if folder.name == FOLDER and folder.is_dir():
            commit = StoredCommit.of_folder(folder)
            if commit is None:
                raise CheckpointError(f"{folder} has no commit yet")
            return commit
    return open_checkpoint(path)
