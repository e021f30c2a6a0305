"""Parameters between their construction and their chunk."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import NamedTuple

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


@dataclass
class _Extent:
    """Where a parameter's bytes are in the scratch file; kept while its values are in RAM."""

    offset: int
    nbytes: int  # reserved


class _Brought(NamedTuple):
    """The elements of an offloaded parameter that bring_elements() brought."""

    first: int
    flat: torch.Tensor  # in the construction dtype


class ConstructionArena:
    """Parameters under construction, in their construction dtype, before they have a chunk.

    They stay ordinary tensors in RAM until the host budget is needed for something else; then the
    least recently used are offloaded: `param.data` becomes a stand-in that reads NaN, and the bytes
    go to a scratch file. Of several ranks, which all build the same model, each first keeps its
    part of an offloaded parameter in RAM; all ranks must then bring in the same parameters in the
    same order. A parameter's arena is its attribute `_hetero_construction`.
    """

    def __init__(self, config: Config, world: ProcessGroups) -> None:
        """An arena without parameters; all ranks of `world` make one.

        Raises:
            ValueError: the backend does not work with so many ranks.
        """
        if config.backend == "cuda" and world.size > 1:
            raise ValueError(
                f"backend='cuda' computes with one rank, and there are {world.size}; several ranks "
                f"compute with backend='cpu' or 'emulated' by now"
            )
        self.config = config
        self.world = world
        # The same on all ranks, or their plans would differ.
        self.host_bytes = world.agree(config.host_bytes(world.local_ranks), min, "budgets")
        self.disk_bytes = world.agree(config.disk_bytes(world.local_ranks), min, "budgets")
        # None unless DEVICE has memory of its own.
        device_bytes = config.device_bytes
        self.device_bytes = (
            None if device_bytes is None else world.agree(device_bytes, min, "budgets")
        )
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
        self._charged: dict[int, int] = {}  # id(param) -> bytes; the order is that of eviction
        self._params: dict[int, weakref.ref[torch.nn.Parameter]] = {}
        self._extents: dict[int, _Extent] = {}  # by id(param)
        self._offloaded: set[int] = set()  # id(param)
        self._parts: dict[int, torch.Tensor] = {}  # id(param) -> this rank's part, if it is in RAM
        self._number: dict[int, int] = {}  # id(param) -> its place in the order of adoption
        self._numbers = count()  # (an id is used again when a parameter is gone)
        self._nbytes: dict[int, int] = {}  # id(param) -> bytes, of the last dtype it had
        self._brought: dict[int, _Brought] = {}  # by id(param)
        self._stand_ins: dict[int, torch.Tensor] = {}  # by id(param)
        self._by_storage: dict[int, int] = {}  # address of a stand-in's element -> id(param)
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
        if (
            getattr(param, "_hetero_construction", None) is not None
            or not param.is_floating_point()
        ):
            return
        if param.device.type != "cpu":
            raise HeteroError(
                f"a parameter of shape {tuple(param.shape)} was made on {param.device}; build the "
                f"model on the CPU: hetero places it"
            )
        key, nbytes = id(param), param.numel() * param.element_size()
        self.ledger.charge(Tier.HOST, Account.INIT, nbytes)
        self._charged[key] = nbytes
        self._number[key] = next(self._numbers)
        self._nbytes[key] = nbytes
        param._hetero_construction = self  # type: ignore[attr-defined]
        forget = _weakly(self._forget)
        self._params[key] = weakref.ref(param, lambda _: forget(key))

    def _forget(self, key: int) -> None:
        """Frees what there is of a parameter that was deleted, or has a home now."""
        self._release_bytes(self._charged.pop(key, 0))
        self._drop_part(key)
        if key in self._brought:
            self._release_bytes(self._brought.pop(key).flat.nbytes)
        self._params.pop(key, None)
        self._nbytes.pop(key, None)
        self._offloaded.discard(key)
        self._extents.pop(key, None)
        stand_in = self._stand_ins.pop(key, None)
        if stand_in is not None:
            del self._by_storage[stand_in.untyped_storage().data_ptr()]

    def _relieve(self, tier: Tier, nbytes: int) -> None:
        """Frees at least `nbytes` of RAM, as far as it can: called by the ledger."""
        has_file = self.config.nvme_path is not None
        if self._ended or tier is not Tier.HOST or not (has_file or self.world.shard):
            return
        before = self.ledger.used(tier, Account.INIT)
        for key in list(self._charged):
            if before - self.ledger.used(tier, Account.INIT) >= nbytes:
                return
            param = self._params[key]()
            if param is not None and _may_be_offloaded(param):
                self._offload(key, param)
        for key in list(self._parts) if has_file else []:
            if before - self.ledger.used(tier, Account.INIT) >= nbytes:
                return
            self._write(key, self._parts[key])
            self._drop_part(key)

    def _offload(self, key: int, param: torch.nn.Parameter) -> None:
        flat = param.data.contiguous().view(-1).view(torch.uint8)
        self._nbytes[key] = flat.numel()
        part: torch.Tensor | None = None
        if self.world.shard is None:
            self._write(key, flat)
        else:
            part = flat[self._part(flat.numel(), self.world.rank)].clone()
        stand_in = self._stand_ins.get(key)
        if stand_in is None:
            stand_in = torch.full((), float("nan"), dtype=param.dtype).expand(param.shape)
            self._stand_ins[key] = stand_in
            self._by_storage[stand_in.untyped_storage().data_ptr()] = key
        param.data = stand_in
        self._offloaded.add(key)
        self._release_bytes(self._charged.pop(key))
        if part is not None:  # after the whole was given up: there is room for a part of it
            self.ledger.charge(Tier.HOST, Account.INIT, self._part_bytes(flat.numel()))
            self._parts[key] = part

    def _part_bytes(self, nbytes: int) -> int:
        """Bytes charged for a rank's part: the same on all ranks, so that they offload the same."""
        return ceil(nbytes / self.world.ranks)

    def _part(self, nbytes: int, rank: int) -> slice:
        """The bytes of an offloaded parameter of `nbytes` that a rank keeps."""
        part_bytes = self._part_bytes(nbytes)
        return slice(min(nbytes, rank * part_bytes), min(nbytes, (rank + 1) * part_bytes))

    def _write(self, key: int, flat: torch.Tensor) -> None:
        """Writes bytes of an offloaded parameter, its whole or this rank's part, to the file."""
        if self._file is None:
            self._file = ScratchFile(self.config.nvme_paths, self.ledger, Account.INIT)
        extent = self._extents.get(key)
        if extent is None or extent.nbytes < flat.numel():  # (or converted to a larger dtype since)
            extent = _Extent(self._file.reserve(flat.numel()), flat.numel())
            self._extents[key] = extent
        for begin, block in _blocks(flat.numel()):
            part = flat[begin : begin + len(block)]
            torch.frombuffer(block, dtype=torch.uint8)[: part.numel()].copy_(part)
            self._file.write_from(
                block[: round_up(part.numel(), PAGE_BYTES)], extent.offset + begin
            )

    def _drop_part(self, key: int) -> None:
        if key in self._parts:
            del self._parts[key]
            self._release_bytes(self._part_bytes(self._nbytes[key]))

    def _release_bytes(self, nbytes: int) -> None:
        self.ledger.release(Tier.HOST, Account.INIT, nbytes)
        self._untrimmed_bytes += nbytes
        if self._untrimmed_bytes >= _TRIM_BYTES:
            self._untrimmed_bytes = 0
            trim_heap()

    def _bring_in(self, key: int, param: torch.nn.Parameter) -> None:
        nbytes = param.numel() * param.element_size()
        self.ledger.charge(Tier.HOST, Account.INIT, nbytes)
        self._charged[key] = nbytes
        param.data = self._values(key, param)
        self._drop_part(key)
        self._offloaded.remove(key)

    def _values(self, key: int, param: torch.nn.Parameter) -> torch.Tensor:
        """An offloaded parameter's values: from the file, or from all ranks' parts."""
        values = torch.empty(param.shape, dtype=param.dtype)
        raw = values.view(-1).view(torch.uint8)
        shard = self.world.shard
        if shard is None:
            self._read_into(raw, key)
            return values
        self._exchange(key, raw, [slice(0, raw.numel())] * shard.size)
        return values

    def _exchange(self, key: int, into: torch.Tensor, wanted: Sequence[slice]) -> None:
        """Gives every rank the bytes wanted[rank] of a parameter. All ranks call it.

        Args:
            key: id of the parameter.
            into: takes this rank's bytes, flat.
            wanted: byte ranges of the whole parameter, by rank.
        """
        shard, param = self.world.shard, self._params[key]()
        assert shard is not None
        assert param is not None
        number = torch.tensor([self._number[key]])
        if any(not torch.equal(n, number) for n in shard.all_gather(number, "building the model")):
            raise HeteroError(
                "the ranks need different parameters while they build the model; inside "
                "ZeroInitContext all ranks must run the same code on all parameters"
            )
        nbytes = param.numel() * param.element_size()
        kept = [self._part(nbytes, rank) for rank in range(shard.size)]
        mine = self._parts.get(key)
        if key not in self._offloaded:
            mine = param.data.contiguous().view(-1).view(torch.uint8)[kept[shard.rank]]
        elif mine is None:
            mine = torch.empty(kept[shard.rank].stop - kept[shard.rank].start, dtype=torch.uint8)
            self._read_into(mine, key)
        sends = [_common(mine, kept[shard.rank], wanted[rank]) for rank in range(shard.size)]
        receives = [_common(into, wanted[shard.rank], kept[rank]) for rank in range(shard.size)]
        shard.all_to_all(
            [part if part.numel() else None for part in sends],
            [part if part.numel() else None for part in receives],
            "building the model",
        ).wait()
        receives[shard.rank].copy_(sends[shard.rank])

    def _read_into(self, raw: torch.Tensor, key: int) -> None:
        for begin, part in self._read(self._extents[key].offset, raw.numel()):
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
        key = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if key is None:
            return tensor
        param = self._params[key]()
        assert param is not None
        if key in self._offloaded:
            self._bring_in(key, param)
        return param.data

    def is_offloaded(self, param: torch.nn.Parameter) -> bool:
        """Whether `param.data` is a stand-in."""
        return id(param) in self._offloaded

    def keep_own_parts(self) -> None:
        """Offloads every parameter, of which each rank then keeps its part. All ranks call it.

        With one rank nothing is done. A parameter that shares its memory stays whole.
        """
        if self.world.shard is None:
            return
        for key in list(self._charged):
            param = self._params[key]()
            if param is not None and _may_be_offloaded(param):
                self._offload(key, param)

    def bring_elements(self, param: torch.nn.Parameter, wanted: Sequence[slice]) -> None:
        """Brings the elements wanted[rank] of the parameter to every rank, for blocks().

        All ranks call it. The ranks' parts of the parameter are freed.
        """
        key, itemsize = id(param), param.element_size()
        mine = wanted[self.world.rank]
        nbytes = (mine.stop - mine.start) * itemsize
        self.ledger.charge(Tier.HOST, Account.INIT, nbytes)
        values = torch.empty(mine.stop - mine.start, dtype=param.dtype)
        as_bytes = [slice(w.start * itemsize, w.stop * itemsize) for w in wanted]
        self._exchange(key, values.view(torch.uint8), as_bytes)
        self._brought[key] = _Brought(mine.start, values)
        self._drop_part(key)

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
        key, itemsize = id(param), param.element_size()
        if key not in self._offloaded or key in self._brought:
            first, flat = self._brought.get(key, _Brought(0, param.data.reshape(-1)))
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
        offset = self._extents[key].offset + first
        for begin, raw in self._read(offset, wanted.stop * itemsize - first):
            values = raw[skip:].view(param.dtype).float()
            yield (first + begin + skip) // itemsize, values
            skip = 0

    def release(self, param: torch.nn.Parameter) -> None:
        """Frees what there is of a parameter that has a home now. Idempotent."""
        if getattr(param, "_hetero_construction", None) is not None:
            self._forget(id(param))
            del param._hetero_construction  # type: ignore[attr-defined]

    def restore(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Gives all parameters their values, as if they had not been adopted, and closes."""
        self._ended = True
        for param in params:
            key = id(param)
            if key in self._offloaded:
                param.data = self._values(key, param)
            self.release(param)
        self.close()

    def close(self) -> None:
        """Frees the scratch file."""
        self._ended = True
        trim_heap()
        if self._file is not None:
            self._file.close()
            self._file = None


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
