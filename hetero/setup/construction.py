"""Parameters between their construction and their chunk."""

from __future__ import annotations

import mmap
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil

import torch

from hetero.config import Config
from hetero.ranks.process_groups import ProcessGroups
from offload.disk.scratch_file import ScratchFile
from offload.errors import HeteroError
from offload.memory.c_heap import trim_heap
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Account, Tier

_BLOCK_BYTES = 4 << 20  # of one transfer to or from the file
_TRIM_BYTES = 16 << 20  # freed, after which the heap is trimmed
_USES_OF_UNSHARED = 2  # of a storage to which only the parameter and the counting code refer


@dataclass(eq=False)
class _Record:
    """A parameter under construction, and where its bytes are.

    Attributes:
        param: the parameter.
        number: its place in the order of adoption (an id is used again when a parameter is gone).
        nbytes: its size in the last dtype it had.
        charged: bytes charged for the whole parameter in RAM; 0 if it is offloaded.
        stand_in: what takes its place while it is offloaded.
        part: this rank's part of it, if that is in RAM.
        offset, reserved: where it is in the scratch file, and bytes there; kept while it is in RAM.
        brought: the elements that bring_elements() brought, in the construction dtype, and the
            first one's number.
    """

    param: weakref.ref[torch.nn.Parameter]
    number: int
    nbytes: int
    charged: int
    stand_in: torch.Tensor | None = None
    part: torch.Tensor | None = None
    offset: int = 0
    reserved: int = 0
    brought: tuple[int, torch.Tensor] | None = None


class ConstructionArena:
    """Parameters under construction, in their construction dtype, before they have a chunk.

    They stay ordinary tensors in RAM until the host budget is needed for something else; then the
    least recently used are offloaded: `param.data` becomes a stand-in that reads NaN, and the bytes
    go to a scratch file. Of several ranks, which all build the same model, each first keeps its
    part of an offloaded parameter in RAM; all ranks must then bring in the same parameters in the
    same order.
    """

    def __init__(self, config: Config, world: ProcessGroups) -> None:
        """An arena without parameters; all ranks of `world` make one.

        Raises ValueError if the backend does not work with so many ranks.
        """
        if config.backend == "cuda" and world.size > 1:
            raise ValueError(
                f"backend='cuda' computes with one rank, and there are {world.size}; several ranks "
                f"compute with backend='cpu' or 'emulated' by now"
            )
        self.config = config
        self.world = world

        def agreed(nbytes: int) -> int:  # the same on all ranks, or their plans would differ
            return world.agree(nbytes, min, "budgets")

        self.host_bytes = agreed(config.host_bytes(world.local_ranks))
        self.disk_bytes = agreed(config.disk_bytes(world.local_ranks))
        # None unless DEVICE has memory of its own.
        device_bytes = config.device_bytes
        self.device_bytes = None if device_bytes is None else agreed(device_bytes)
        self.ledger = Ledger(
            {
                Tier.DEVICE: self.device_bytes or config.budget(Tier.DEVICE),
                Tier.HOST: self.host_bytes,
                Tier.DISK: self.disk_bytes,
            },
            # Weak, here and in what params refer to: an arena that is not used any more frees its
            # file at once, not when the garbage collector comes.
            _weakly(self._relieve),
        )
        self._ended = False  # nothing moves to disk any more
        # By id(param). One that is offloaded or brought in becomes the last: the first is the next.
        self._records: OrderedDict[int, _Record] = OrderedDict()
        self._offloaded: set[_Record] = set()  # those whose `param.data` is the stand-in
        self._numbers = count()
        self._by_storage: dict[int, _Record] = {}  # by the address of a stand-in's element
        self._file: ScratchFile | None = None
        self._untrimmed_bytes = 0

    @property
    def notes(self) -> list[str]:
        """What the user should know of the scratch file; nothing after close()."""
        return self._file.notes if self._file is not None else []

    @property
    def any_offloaded(self) -> bool:
        """Whether some parameter is offloaded."""
        return bool(self._offloaded)

    def adopt(self, param: torch.nn.Parameter) -> None:
        """Takes charge of a parameter, unless an arena has it or it is not of a floating dtype.

        Raises:
            HeteroError: it is not on the CPU.
            BudgetError: it does not fit the host budget.
        """
        if arena_of(param) is not None or not param.is_floating_point():
            return
        if param.device.type != "cpu":
            raise HeteroError(
                f"a parameter of shape {tuple(param.shape)} was made on {param.device}; build the "
                f"model on the CPU: hetero places it"
            )
        key, nbytes = id(param), param.numel() * param.element_size()
        self.ledger.charge(Tier.HOST, Account.INIT, nbytes)
        param._hetero_construction = self  # type: ignore[attr-defined]
        forget = _weakly(self._forget)
        reference = weakref.ref(param, lambda _: forget(key))
        self._records[key] = _Record(reference, next(self._numbers), nbytes, charged=nbytes)

    def _forget(self, key: int) -> None:
        """Frees what there is of a parameter that was deleted, or has a home now."""
        record = self._records.pop(key, None)
        if record is None:
            return
        self._offloaded.discard(record)
        self._release_bytes(record.charged)
        self._drop_part(record)
        if record.brought is not None:
            self._release_bytes(record.brought[1].nbytes)
        if record.stand_in is not None:
            del self._by_storage[record.stand_in.untyped_storage().data_ptr()]

    def _relieve(self, tier: Tier, nbytes: int) -> None:
        """Frees at least `nbytes` of RAM, as far as it can: called by the ledger."""
        has_file = self.config.nvme_path is not None
        if self._ended or tier is not Tier.HOST or not (has_file or self.world.shard):
            return
        before = self.ledger.used(tier, Account.INIT)
        for record in list(self._records.values()):
            if before - self.ledger.used(tier, Account.INIT) >= nbytes:
                return
            self._offload(record)
        for record in list(self._records.values()) if has_file else []:
            if before - self.ledger.used(tier, Account.INIT) >= nbytes:
                return
            if record.part is not None:
                self._write(record, record.part)
                self._drop_part(record)

    def _offload(self, record: _Record) -> None:
        """Offloads a parameter that is in RAM, unless something else refers to its memory."""
        param = record.param()
        if not record.charged or param is None or not _may_be_offloaded(param):
            return
        flat = param.data.contiguous().view(-1).view(torch.uint8)
        record.nbytes = flat.numel()
        part: torch.Tensor | None = None
        if self.world.shard is None:
            self._write(record, flat)
        else:
            part = flat[self._part(flat.numel(), self.world.rank)].clone()
        if record.stand_in is None:
            nan = torch.full((), float("nan"), dtype=param.dtype)
            record.stand_in = nan.expand(param.shape)
            self._by_storage[nan.untyped_storage().data_ptr()] = record
        param.data = record.stand_in
        self._offloaded.add(record)
        self._records.move_to_end(id(param))
        charged, record.charged = record.charged, 0
        self._release_bytes(charged)
        if part is not None:  # after the whole was given up: there is room for a part of it
            self.ledger.charge(Tier.HOST, Account.INIT, self._part_bytes(flat.numel()))
            record.part = part

    def _part_bytes(self, nbytes: int) -> int:
        """Bytes charged for a rank's part: the same on all ranks, so that they offload the same."""
        return ceil(nbytes / self.world.ranks)

    def _part(self, nbytes: int, rank: int) -> slice:
        """The bytes of an offloaded parameter of `nbytes` that a rank keeps."""
        part_bytes = self._part_bytes(nbytes)
        return slice(min(nbytes, rank * part_bytes), min(nbytes, (rank + 1) * part_bytes))

    def _write(self, record: _Record, flat: torch.Tensor) -> None:
        """Writes bytes of an offloaded parameter, its whole or this rank's part, to the file."""
        if self._file is None:
            self._file = ScratchFile(self.config.nvme_paths, self.ledger, Account.INIT)
        if record.reserved < flat.numel():  # (it may have been converted to a larger dtype since)
            record.offset = self._file.reserve(flat.numel())
            record.reserved = flat.numel()
        for begin, block in _blocks(flat.numel()):
            part = flat[begin : begin + len(block)]
            torch.frombuffer(block, dtype=torch.uint8)[: part.numel()].copy_(part)
            self._file.write_from(
                block[: round_up(part.numel(), PAGE_BYTES)], record.offset + begin
            )

    def _drop_part(self, record: _Record) -> None:
        if record.part is not None:
            record.part = None
            self._release_bytes(self._part_bytes(record.nbytes))

    def _release_bytes(self, nbytes: int) -> None:
        self.ledger.release(Tier.HOST, Account.INIT, nbytes)
        self._untrimmed_bytes += nbytes
        if self._untrimmed_bytes >= _TRIM_BYTES:
            self._untrimmed_bytes = 0
            trim_heap()

    def _bring_in(self, record: _Record, param: torch.nn.Parameter) -> None:
        nbytes = param.numel() * param.element_size()
        self.ledger.charge(Tier.HOST, Account.INIT, nbytes)
        record.charged = nbytes
        self._records.move_to_end(id(param))
        param.data = self._values(record, param)
        self._drop_part(record)
        self._offloaded.remove(record)

    def _values(self, record: _Record, param: torch.nn.Parameter) -> torch.Tensor:
        """An offloaded parameter's values: from the file, or from all ranks' parts."""
        values = torch.empty(param.shape, dtype=param.dtype)
        raw = values.view(-1).view(torch.uint8)
        if self.world.shard is None:
            self._read_into(raw, record)
        else:
            self._exchange(record, param, raw, [slice(0, raw.numel())] * self.world.ranks)
        return values

    def _exchange(
        self,
        record: _Record,
        param: torch.nn.Parameter,
        into: torch.Tensor,
        wanted: Sequence[slice],
    ) -> None:
        """Gives every rank the bytes wanted[rank] of a parameter. All ranks call it.

        `into` takes this rank's bytes, flat; `wanted` are byte ranges of the whole parameter.
        """
        shard = self.world.shard
        assert shard is not None
        number = torch.tensor([record.number])
        if any(not torch.equal(n, number) for n in shard.all_gather(number, "building the model")):
            raise HeteroError(
                "the ranks need different parameters while they build the model; inside "
                "ZeroInitContext all ranks must run the same code on all parameters"
            )
        nbytes = param.numel() * param.element_size()
        kept = [self._part(nbytes, rank) for rank in range(shard.size)]
        mine = record.part
        if record not in self._offloaded:
            mine = param.data.contiguous().view(-1).view(torch.uint8)[kept[shard.rank]]
        elif mine is None:
            mine = torch.empty(kept[shard.rank].stop - kept[shard.rank].start, dtype=torch.uint8)
            self._read_into(mine, record)
        sends = [_common(mine, kept[shard.rank], wanted[rank]) for rank in range(shard.size)]
        receives = [_common(into, wanted[shard.rank], kept[rank]) for rank in range(shard.size)]
        shard.all_to_all(
            [part if part.numel() else None for part in sends],
            [part if part.numel() else None for part in receives],
            "building the model",
        ).wait()
        receives[shard.rank].copy_(sends[shard.rank])

    def _read_into(self, raw: torch.Tensor, record: _Record) -> None:
        for begin, part in self._read(record.offset, raw.numel()):
            raw[begin : begin + part.numel()] = part

    def _read(self, offset: int, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        assert self._file is not None
        for begin, block in _blocks(nbytes):
            wanted = min(len(block), nbytes - begin)
            self._file.read_into(block[: round_up(wanted, PAGE_BYTES)], offset + begin)
            yield begin, torch.frombuffer(block, dtype=torch.uint8)[:wanted]

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or the values if it is an offloaded parameter's stand-in or an alias of it."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return tensor
        record = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if record is None:
            return tensor
        param = record.param()
        assert param is not None
        if record in self._offloaded:
            self._bring_in(record, param)
        return param.data

    def is_offloaded(self, param: torch.nn.Parameter) -> bool:
        """Whether `param.data` is a stand-in."""
        return self._records.get(id(param)) in self._offloaded

    def keep_own_parts(self) -> None:
        """Offloads every parameter, of which each rank then keeps its part. All ranks call it.

        With one rank nothing is done. A parameter that shares its memory stays whole.
        """
        if self.world.shard is None:
            return
        for record in list(self._records.values()):
            self._offload(record)

    def bring_elements(self, param: torch.nn.Parameter, wanted: Sequence[slice]) -> None:
        """Brings the elements wanted[rank] of the parameter to every rank, for blocks().

        All ranks call it. The ranks' parts of the parameter are freed.
        """
        record, itemsize = self._records[id(param)], param.element_size()
        mine = wanted[self.world.rank]
        nbytes = (mine.stop - mine.start) * itemsize
        self.ledger.charge(Tier.HOST, Account.INIT, nbytes)
        values = torch.empty(mine.stop - mine.start, dtype=param.dtype)
        as_bytes = [slice(w.start * itemsize, w.stop * itemsize) for w in wanted]
        self._exchange(record, param, values.view(torch.uint8), as_bytes)
        record.brought = mine.start, values
        self._drop_part(record)

    def blocks(
        self, param: torch.nn.Parameter, wanted: slice
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the elements `wanted` of the flat parameter, wherever they are.

        With several ranks they must be in RAM, or bring_elements() must have brought them.

        Yields:
            (first element, values as a flat fp32 tensor); a tensor is valid until the next one.

        Raises:
            HeteroError: the parameter was converted or replaced while it was in the file.
        """
        record, itemsize = self._records.get(id(param)), param.element_size()
        brought = None if record is None else record.brought
        if record is None or record not in self._offloaded or brought is not None:
            first, flat = brought or (0, param.data.reshape(-1))
            for begin in range(wanted.start, wanted.stop, _BLOCK_BYTES // itemsize):
                end = min(begin + _BLOCK_BYTES // itemsize, wanted.stop)
                yield begin, flat[begin - first : end - first].float()
            return
        if param.data.untyped_storage().data_ptr() not in self._by_storage:
            raise HeteroError(
                f"a parameter of shape {tuple(param.shape)} was moved or converted after "
                f"ZeroInitContext had put it on disk; do that inside the context"
            )
        first = wanted.start * itemsize // PAGE_BYTES * PAGE_BYTES
        skip = wanted.start * itemsize - first
        for begin, raw in self._read(record.offset + first, wanted.stop * itemsize - first):
            values = raw[skip:].view(param.dtype).float()
            yield (first + begin + skip) // itemsize, values
            skip = 0

    def release(self, param: torch.nn.Parameter) -> None:
        """Frees what there is of a parameter that has a home now. Idempotent."""
        if arena_of(param) is not None:
            self._forget(id(param))
            del param._hetero_construction  # type: ignore[attr-defined]

    def restore(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Gives all parameters their values, as if they had not been adopted, and closes."""
        self._ended = True
        for param in params:
            record = self._records.get(id(param))
            if record is not None and record in self._offloaded:
                param.data = self._values(record, param)
            self.release(param)
        self.close()

    def close(self) -> None:
        """Frees the scratch file."""
        self._ended = True
        trim_heap()
        if self._file is not None:
            self._file.close()
            self._file = None


def arena_of(param: torch.Tensor) -> ConstructionArena | None:
    """The arena in which a parameter waits for its chunk, if it does."""
    return getattr(param, "_hetero_construction", None)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls the bound method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return call


def _may_be_offloaded(param: torch.nn.Parameter) -> bool:
    """Whether nothing but the parameter refers to its memory, so that no write can be lost."""
    storage = param.untyped_storage()
    nbytes = param.numel() * param.element_size()
    return (
        0 < nbytes == storage.nbytes()
        and torch._C._storage_Use_Count(storage._cdata) <= _USES_OF_UNSHARED
    )


def _common(flat: torch.Tensor, has: slice, wanted: slice) -> torch.Tensor:
    """The part of `flat` (the elements `has` of a longer array) that is in the range `wanted`."""
    begin = max(has.start, wanted.start)
    return flat[begin - has.start : max(begin, min(has.stop, wanted.stop)) - has.start]


def _blocks(nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Yields (offset, page-aligned block) over `nbytes`; every block is the same memory."""
    size = min(_BLOCK_BYTES, round_up(nbytes, PAGE_BYTES))
    memory = memoryview(mmap.mmap(-1, size))
    for begin in range(0, nbytes, size):
        yield begin, memory
