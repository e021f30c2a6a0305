"""The last commit of a durable state as a stored checkpoint, with or without a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import tee
from pathlib import Path

import torch

from hetero.checkpoint.data_writer import Range, open_direct
from hetero.checkpoint.engine_checkpoint import STATE_NAMES
from hetero.checkpoint.formats import open_checkpoint
from hetero.checkpoint.manifest import Manifest, master_key, name_of
from hetero.checkpoint.piece_reader import FileRange, FileRanges, PieceReader
from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
from hetero.durable.record import Record, StoredGroup, StoredSlice
from hetero.durable.state_folder import read_last_commit
from hetero.state.memory import list_names
from hetero.state.optimizer_state import TileCodec, TileState
from hetero.state.state_files import FOLDER
from offload._native import NativeIoError, StripeMap
from offload.errors import CheckpointError, StoreError
from offload.memory.sizes import PAGE_BYTES, round_up

_PIECE_NUMEL = 1 << 20  # elements that are read at once: what the loader asks for at most
_SLOTS = 3  # pieces: one is used, two are read ahead
_BLOCK_NUMEL = 64  # of states in 8 bits


@dataclass(frozen=True)
class _Place:
    """A parameter's place: its chunk group's number, its chunk, and where it is in that."""

    group: int
    chunk: int
    slice: StoredSlice


@dataclass(frozen=True)
class _Part:
    """Elements [begin, end) of a tile of one rank's shard."""

    rank: int
    tile: int
    begin: int
    end: int


class StoredCommit(StoredCheckpoint):
    """What hetero.commit(), or step() with durable=True, has made durable last."""

    kind = "commit of a durable state"

    def __init__(self, path: Path, records: Sequence[Record], io_engine: str = "auto") -> None:
        """Opens no data file yet; `records` are of all ranks, in their order, in the folder `path`.

        The training may go on: what it overwrites meanwhile is an error of a checksum.
        """
        super().__init__(path)
        self.manifest = _merged_manifest(records)
        self._records, self._io_engine = records, io_engine
        self._files: dict[tuple[int, int], int] = {}
        self._resources = ExitStack()

    @classmethod
    def of_folder(cls, path: Path) -> StoredCommit:
        """That of a folder that nobody takes; notes go to stderr, too.

        Raises CheckpointError, StoreError.
        """
        notes: list[str] = []
        records = read_last_commit(path, notes)
        for note in notes:
            print(f"hetero: {note}", file=sys.stderr)
        if not records:
            raise CheckpointError(f"{path} has no commit yet")
        made = cls(path, records)
        paths = {each for r in records for group in r.groups for each in data_paths(r, group)}
        made.files = {os.path.relpath(each, path): os.stat(each).st_size for each in sorted(paths)}
        return made

    @cached_property
    def _small(self) -> dict[str, torch.Tensor]:
        return {key: t for record in self._records for key, t in record.small.items()}

    @cached_property
    def _shards(self) -> list[dict[int, tuple[Record, StoredGroup]]]:
        """By chunk group and its rank. Raises CheckpointError if the records do not fit."""
        return _shards(self._records, self.path)

    @cached_property
    def _places(self) -> dict[str, _Place]:
        return {
            each.name: _Place(number, chunk_id, each)
            for number, shards in enumerate(self._shards)
            for chunk_id, chunk in enumerate(shards[0][1].chunks)
            for each in chunk.slices
        }

    @cached_property
    def _reader(self) -> PieceReader:
        made = PieceReader(self._io_engine, _SLOTS, self._slot_bytes())
        self._resources.callback(made.close)
        return made

    def _slot_bytes(self) -> int:
        """Of a piece: pages of each array of each part, of which there are few."""
        most = PAGE_BYTES
        for shards in self._shards:
            _, group = shards[0]
            dtypes, tile = group.dtypes, group.tile_numel
            numel = min(_PIECE_NUMEL, max(c.slots * tile * group.ranks for c in group.chunks))
            parts = numel // tile + 2
            arrays = 2 + dtypes.kind.states
            nbytes = numel * (dtypes.param_bytes + dtypes.master_bytes)
            nbytes += dtypes.kind.states * (dtypes.kind.state_bytes(numel) + PAGE_BYTES)
            most = max(most, nbytes + 2 * PAGE_BYTES * parts * arrays)
        return round_up(most, PAGE_BYTES)

    def close(self) -> None:
        """See StoredCheckpoint."""
        self._resources.close()

    def open(self) -> None:
        """See StoredCheckpoint."""
        _ = self._reader

    def values(self, order: Iterable[Sequence[Range]]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """See StoredCheckpoint; checksums are verified."""
        ahead, steps = tee(self._steps(each for chunk in order for each in chunk))
        places = (place for _, places in ahead for place, is_new in places if is_new)
        read = self._reader.pieces(self._piece(*place) for place in places)
        arrays: Sequence[torch.Tensor] = ()
        for (key, begin, end), cuts in steps:
            if key in self._small:
                yield key, begin, self._small[key].reshape(-1)[begin:end]
                continue
            found = torch.empty(end - begin, dtype=self.manifest.tensors[key].dtype)
            for (name, at, stop), is_new in cuts:
                if is_new:
                    try:
                        arrays = next(read).contents()
                    except NativeIoError as error:
                        raise CheckpointError(
                            f"{name} of the last commit cannot be read: {error.args[1]}: {error}"
                        ) from error
                rest, done = iter(arrays), at - begin
                for part in self._parts(name, at, stop):
                    count = len(self._ranges(self._places[name], part))
                    values = self._decode(key, part, [next(rest) for _ in range(count)])
                    found[done : done + len(values)] = values
                    done += len(values)
            yield key, begin, found

    def _steps(self, ranges: Iterable[Range]) -> Iterator[tuple[Range, list[tuple[Range, bool]]]]:
        """Of each range what of its parameter a slot takes at a time, and whether that is read for
        it: a master and its states are read together."""
        last: Range | None = None
        for key, begin, end in ranges:
            cuts = []
            for at in range(begin, end, _PIECE_NUMEL) if key not in self._small else ():
                cut = name_of(key), at, min(at + _PIECE_NUMEL, end)
                cuts.append((cut, cut != last))
                last = cut
            yield (key, begin, end), cuts

    def _piece(self, name: str, begin: int, end: int) -> FileRanges:
        """The arrays of elements [begin, end) of a parameter."""
        place = self._places[name]
        return tuple(
            FileRange(self._file(place.group, part.rank), offset, nbytes)
            for part in self._parts(name, begin, end)
            for offset, nbytes in self._ranges(place, part)
        )

    def _parts(self, name: str, begin: int, end: int) -> Iterator[_Part]:
        """The parts of elements [begin, end) of a parameter, cut at the borders of tiles."""
        place = self._places[name]
        _, group = self._shards[place.group][0]
        slots, tile_numel = group.chunks[place.chunk].slots, group.tile_numel
        at, stop = place.slice.offset + begin, place.slice.offset + end
        while at < stop:
            tile, first = divmod(at, tile_numel)
            last = min(first + stop - at, tile_numel)
            yield _Part(tile // slots, tile % slots, first, last)
            at += last - first

    def _ranges(self, place: _Place, part: _Part) -> list[tuple[int, int]]:
        """Of each array of a part, the parameters first, its offset in the file and its bytes."""
        _, group = self._shards[place.group][part.rank]
        chunk, dtypes, numel = group.chunks[place.chunk], group.dtypes, part.end - part.begin
        size = dtypes.param_bytes
        found = [(chunk.param + part.tile * group.param_bytes + part.begin * size, numel * size)]
        if chunk.optim_state is None:
            return found
        kind, tile_numel, size = dtypes.kind, group.tile_numel, dtypes.master_bytes
        state_at = chunk.optim_state + part.tile * group.optim_state_bytes
        found.append((state_at + part.begin * size, numel * size))
        begin, end = part.begin, part.end
        if dtypes.state == "8bit":  # whole blocks
            begin = begin // _BLOCK_NUMEL * _BLOCK_NUMEL
        for i in range(kind.states):
            first = kind.state_bytes(begin)
            nbytes = kind.state_bytes(end) - first
            found.append((state_at + kind.state_at(i, tile_numel) + first, nbytes))
        return found

    def _decode(self, key: str, part: _Part, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        name = name_of(key)
        place = self._places[name]
        _, group = self._shards[place.group][part.rank]
        dtypes, numel = group.dtypes, part.end - part.begin
        param = arrays[0].view(dtypes.torch_compute)
        if not group.chunks[place.chunk].trained:
            return param
        master = None
        if dtypes.master_bytes:
            master = arrays[1].view(torch.int16 if dtypes.compute == "bf16" else torch.float32)
        states = tuple(each.view(dtypes.torch_state) for each in arrays[2:])
        tile_state = TileState(master, states)
        codec = TileCodec(group.tile_numel, dtypes)
        if key == master_key(name):
            return codec.join(param, tile_state, slice(0, numel))
        shift = part.begin % _BLOCK_NUMEL if dtypes.state == "8bit" else 0
        number = STATE_NAMES[dtypes.rule].index(key.rpartition("/")[2])
        return codec.states(tile_state, slice(0, shift + numel))[number][shift:]

    def _file(self, group: int, rank: int) -> int:
        """The I/O engine's number of a data file, which is opened now if it is not.

        Raises CheckpointError.
        """
        number = self._files.get((group, rank))
        if number is None:
            number = self._files[group, rank] = self._open(*self._shards[group][rank])
        return number

    def _open(self, record: Record, group: StoredGroup) -> int:
        if group.checksums_at is None:
            raise CheckpointError(
                f"the last commit needs the data files of {record.path}, which another rank sees "
                f"and this one does not; with other budgets, chunks or numbers of ranks than it "
                f"was made with all must see all of the directories"
            )
        members = []
        with ExitStack() as opened:
            for path in data_paths(record, group):
                try:
                    descriptor = open_direct(Path(path), os.O_RDONLY)
                except StoreError as error:
                    raise CheckpointError(f"the last commit needs {path}: {error}") from error
                opened.callback(os.close, descriptor)
                members.append((descriptor, path))
            stripes = StripeMap(group.weights, group.unit_bytes)
            number = self._reader.io.add_striped_file(members, stripes, checksums=True)
        try:
            with open(record.path, "rb") as stream:
                stream.seek(group.checksums_at)
                for _, offset, nbytes in group.pieces():
                    checksums = stream.read(nbytes // PAGE_BYTES * 4)
                    self._reader.io.set_checksums(number, offset, checksums)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{record.path} cannot be read again: {error}") from error
        for chunk, offset, nbytes in group.extents():
            names = list_names([each.name for each in chunk.slices])
            self._reader.io.name_range(number, offset, nbytes, names)
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
            return StoredCommit.of_folder(folder)
    return open_checkpoint(path)
