"""Reads the tensors of a commit from the data files of all its ranks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hetero.checkpoint.data_writer import open_direct
from hetero.checkpoint.manifest import Manifest
from hetero.checkpoint.model_tensors import STATE_NAMES, master_key
from hetero.durable.record import Record, StoredGroup, StoredSlice
from hetero.state.memory.file_layout import list_names
from hetero.state.optimizer_state import TileCodec, TileState
from offload._native import IoOp, NativeIoError, StripeMap
from offload.disk.scratch_file import make_io_engine
from offload.errors import CheckpointError, StoreError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Account

_PIECE_NUMEL = 1 << 20  # elements that are read at once: what the loader asks for at most
_SLOTS = 3  # pieces: one is used, two are read ahead
_BLOCK_NUMEL = 64  # of states in 8 bits


def merged_manifest(records: Sequence[Record]) -> Manifest:
    """The manifest of a commit, whose records of all ranks these are."""
    tensors = dict(records[0].manifest.tensors)
    for record in records:
        tensors |= {k: t for k, t in record.manifest.tensors.items() if k.startswith("data/")}
    ranks = [record.manifest.ranks[0] for record in records]
    return replace(records[0].manifest, tensors=tensors, ranks=ranks)


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


@dataclass
class _Array:
    """An array of a part: `nbytes` at `at` in a slot, that `read` brings."""

    at: int
    nbytes: int
    read: IoOp


@dataclass
class _Piece:
    """Elements of a parameter that are read: the slot that has them, and their parts' arrays."""

    key: tuple[str, int, int]
    slot: int
    parts: list[tuple[_Part, list[_Array]]]


class CommitReader:
    """The tensors of a commit by the keys of its manifest, as hetero.load() asks for them."""

    def __init__(self, records: Sequence[Record], folder: Path, io_engine: str) -> None:
        """Opens no data file yet.

        Args:
            records: of all ranks, in their order.
            folder: has them.
            io_engine: Config's.

        Raises CheckpointError if the records do not fit each other.
        """
        self._small = {key: t for record in records for key, t in record.small.items()}
        self._records = _shards(records, folder)
        self._shards = [
            {rank: group for rank, (_, group) in shards.items()} for shards in self._records
        ]
        self._places: dict[str, _Place] = {}
        for number, shards in enumerate(self._shards):
            for chunk_id, chunk in enumerate(shards[0].chunks):
                for each in chunk.slices:
                    self._places[each.name] = _Place(number, chunk_id, each)
        self._tensors = records[0].manifest.tensors
        self._resources = ExitStack()
        self._files: dict[tuple[int, int], int] = {}
        self._order: Iterator[tuple[str, int, int]] = iter(())
        self._ahead: deque[_Piece] = deque()
        self._used: _Piece | None = None
        self._io, _ = make_io_engine(io_engine)
        self._resources.callback(self._io.close)
        self._arena = HostArena(_SLOTS, self._slot_bytes(), Ledger({}), Account.BUFFER)
        self._resources.callback(self._arena.close)
        self._arena.commit(0, _SLOTS)
        self._free = list(range(_SLOTS))

    def _slot_bytes(self) -> int:
        """Of a piece: pages of each array of each part, of which there are few."""
        most = PAGE_BYTES
        for shards in self._shards:
            group = shards[0]
            dtypes, tile = group.dtypes, group.tile_numel
            numel = min(_PIECE_NUMEL, max(c.slots * tile * group.ranks for c in group.chunks))
            parts = numel // tile + 2
            arrays = 2 + dtypes.kind.states
            nbytes = numel * (dtypes.param_bytes + dtypes.master_bytes)
            nbytes += dtypes.kind.states * (dtypes.kind.state_bytes(numel) + PAGE_BYTES)
            most = max(most, nbytes + 2 * PAGE_BYTES * parts * arrays)
        return round_up(most, PAGE_BYTES)

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        for piece in (*self._ahead, *([] if self._used is None else [self._used])):
            self._forget(piece)
        self._ahead.clear()
        self._used = None
        self._resources.close()

    def whole(self, key: str) -> torch.Tensor:
        """A tensor, in its shape. Raises CheckpointError."""
        if key in self._small:
            return self._small[key]
        record = self._tensors[key]
        return self.read(key, 0, record.numel).view(record.shape)

    def expect(self, order: Iterator[tuple[str, int, int]]) -> None:
        """What read() is going to be asked for, in this order: it is read ahead."""
        self._order = self._pieces(order)
        self._read_ahead()

    def _pieces(self, order: Iterator[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
        """The same as pieces of parameters: a master and its states are read together."""
        last = None
        for key, begin, end in order:
            name = self._name_of(key)
            for at in range(begin, end, _PIECE_NUMEL):
                piece = (name, at, min(at + _PIECE_NUMEL, end))
                if name in self._places and piece != last:
                    last = piece
                    yield piece

    @staticmethod
    def _name_of(key: str) -> str:
        kind, _, rest = key.partition("/")
        return rest if kind == "model" else rest.rpartition("/")[0]

    def read(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a tensor, flat, in the dtype that the manifest says.

        Raises CheckpointError: they are not as they were committed, or cannot be read.
        """
        if key in self._small:
            return self._small[key].reshape(-1)[begin:end]
        name = self._name_of(key)
        found = torch.empty(end - begin, dtype=self._tensors[key].dtype)
        for at in range(begin, end, _PIECE_NUMEL):
            piece = self._piece(name, at, min(at + _PIECE_NUMEL, end))
            done = at - begin
            for part, arrays in piece.parts:
                values = self._decode(key, name, piece.slot, part, arrays)
                found[done : done + len(values)] = values
                done += len(values)
        return found

    def _piece(self, name: str, begin: int, end: int) -> _Piece:
        """The piece, read; it stays until the next one is asked for."""
        key = (name, begin, end)
        if self._used is not None and self._used.key == key:
            return self._used
        if self._used is not None:
            self._forget(self._used)
            self._used = None
        while self._ahead and self._ahead[0].key != key:
            self._forget(self._ahead.popleft())  # it was not asked for in that order
        self._used = self._ahead.popleft() if self._ahead else self._start(key)
        self._read_ahead()
        for _, arrays in self._used.parts:
            for array in arrays:
                try:
                    array.read.wait()
                except NativeIoError as error:
                    raise CheckpointError(
                        f"{name} of the last commit cannot be read: {error.args[1]}: {error}"
                    ) from error
        return self._used

    def _read_ahead(self) -> None:
        while len(self._free) > (0 if self._used is not None else 1):
            key = next(self._order, None)
            if key is None:
                return
            self._ahead.append(self._start(key))

    def _forget(self, piece: _Piece) -> None:
        for _, arrays in piece.parts:
            for array in arrays:
                with suppress(NativeIoError):
                    array.read.wait()
        self._free.append(piece.slot)

    def _start(self, key: tuple[str, int, int]) -> _Piece:
        """Starts reading a piece."""
        name, begin, end = key
        place = self._places[name]
        slot, at = self._free.pop(), 0
        piece = _Piece(key, slot, [])
        try:
            for part in self._parts(place, begin, end):
                arrays = []
                for offset, nbytes in self._ranges(place, part):
                    first = offset // PAGE_BYTES * PAGE_BYTES
                    whole = round_up(offset + nbytes, PAGE_BYTES) - first
                    address = self._arena.address(slot) + at
                    file = self._file(place.group, part.rank)
                    read = self._io.read(file, address, whole, first)
                    arrays.append(_Array(at + offset - first, nbytes, read))
                    at += whole
                piece.parts.append((part, arrays))
        except BaseException:
            self._forget(piece)
            raise
        assert at <= self._arena.slot_bytes
        return piece

    def _parts(self, place: _Place, begin: int, end: int) -> Iterator[_Part]:
        """The parts of elements [begin, end) of a parameter, cut at the borders of tiles."""
        group = self._shards[place.group][0]
        slots, tile_numel = group.chunks[place.chunk].slots, group.tile_numel
        at, stop = place.slice.offset + begin, place.slice.offset + end
        while at < stop:
            tile, first = divmod(at, tile_numel)
            last = min(first + stop - at, tile_numel)
            yield _Part(tile // slots, tile % slots, first, last)
            at += last - first

    def _ranges(self, place: _Place, part: _Part) -> list[tuple[int, int]]:
        """Of each array of a part, the parameters first, its offset in the file and its bytes."""
        group = self._shards[place.group][part.rank]
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

    def _decode(
        self, key: str, name: str, slot: int, part: _Part, arrays: Sequence[_Array]
    ) -> torch.Tensor:
        place = self._places[name]
        group = self._shards[place.group][part.rank]
        dtypes, numel = group.dtypes, part.end - part.begin
        buffer = self._arena.view(slot, 1, torch.uint8)

        def array(number: int, dtype: torch.dtype) -> torch.Tensor:
            each = arrays[number]
            return buffer[each.at : each.at + each.nbytes].view(dtype)

        param = array(0, dtypes.torch_compute)
        if not group.chunks[place.chunk].trained:
            return param
        master = None
        if dtypes.master_bytes:
            master = array(1, torch.int16 if dtypes.compute == "bf16" else torch.float32)
        states = tuple(array(2 + i, dtypes.torch_state) for i in range(dtypes.kind.states))
        tile_state = TileState(master, states)
        codec = TileCodec(group.tile_numel, dtypes, None)
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
            number = self._files[group, rank] = self._open(*self._records[group][rank])
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
            number = self._io.add_striped_file(members, stripes, checksums=True)
        try:
            with open(record.path, "rb") as stream:
                stream.seek(group.checksums_at)
                for _, offset, nbytes in group.pieces():
                    checksums = stream.read(nbytes // PAGE_BYTES * 4)
                    self._io.set_checksums(number, offset, checksums)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{record.path} cannot be read again: {error}") from error
        for chunk, offset, nbytes in group.extents():
            names = list_names([each.name for each in chunk.slices])
            self._io.name_range(number, offset, nbytes, names)
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
