"""Parameters under construction, and the RAM, the file and the ranks that they share.

Of several ranks each keeps a part of an offloaded parameter, and all bring it in together.
"""

from __future__ import annotations

import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any

import torch

from hetero.config import Config
from hetero.planning.group_plans import likely_host_bytes, make_shard
from hetero.planning.placement import part_bytes
from hetero.ranks.communicator import Communicator
from hetero.ranks.process_groups import ProcessGroups
from hetero.setup.process_share import FirstBudgets
from hetero.stand_ins.parameter_classes import become, become_plain, memory_in
from hetero.stand_ins.tile_changes import TileChange, largest_tile, tiles
from offload._native import Arena
from offload.cache.slot_cache import Transfers
from offload.disk.scratch_file import ScratchFile, make_io_engine
from offload.errors import BudgetError, HeteroError
from offload.memory.ledger import Ledger
from offload.memory.process_memory import trim_heap
from offload.memory.sizes import PAGE_BYTES, format_bytes, round_up
from offload.memory.tiers import Account, Tier

BLOCK_BYTES = 4 << 20  # of one transfer to or from the file


class ConstructionFile:
    """Bytes of offloaded parameters, in a file that is made when the first ones are written."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self._config, self._ledger = config, ledger
        self._file: ScratchFile | None = None
        self._transfers: Transfers | None = None
        self._resources = ExitStack()

    @property
    def notes(self) -> list[str]:
        """What the user should know of the file; nothing after close()."""
        return self._file.notes if self._file is not None else []

    def write(self, flat: torch.Tensor, space: slice) -> slice:
        """Writes bytes to `space`, or to a new one if they do not fit there. Returns where."""
        file = self._file or self._open()
        if space.stop - space.start < flat.numel():
            offset = file.reserve(flat.numel())
            space = slice(offset, offset + flat.numel())
        for begin, block in _blocks(flat.numel()):
            part = flat[begin : begin + len(block)]
            block[: part.numel()].copy_(part)
            self._write(block[: part.numel()], space.start + begin)
        return space

    def change(self, space: slice, nbytes: int, dtype: torch.dtype, change: TileChange) -> None:
        """Makes a change to the first `nbytes` of a space, in which values of `dtype` are."""
        itemsize = dtype.itemsize
        block = _block(min(largest_tile(BLOCK_BYTES // itemsize) * itemsize, nbytes))
        for tile in tiles(nbytes // itemsize, BLOCK_BYTES // itemsize):
            numel, offset = tile.stop - tile.start, space.start + tile.start * itemsize
            values = block[: numel * itemsize]
            if not change.fills:
                self._read(values, offset)
            change.apply(values.view(dtype))
            self._write(values, offset)

    def read_into(self, raw: torch.Tensor, offset: int) -> None:
        """Fills `raw`, flat bytes, with those from `offset` on."""
        if self._file is None:
            raise HeteroError(
                "a parameter's values went when hetero.initialize() had placed another model of "
                "the same ZeroInitContext; build one model in each ZeroInitContext"
            )
        skip = offset % PAGE_BYTES
        end = skip + raw.numel()
        for begin, block in _blocks(end):
            length = min(len(block), end - begin)
            self._read(block[:length], offset - skip + begin)
            first = max(skip, begin)
            raw[first - skip : begin + length - skip] = block[first - begin : length]

    def close(self) -> None:
        """Frees the file."""
        self._resources.close()
        self._file = None

    def _open(self) -> ScratchFile:
        paths = self._config.nvme_paths
        self._file = made = ScratchFile(paths, self._ledger, Account.INIT)
        self._resources.callback(made.close)
        engine, _ = make_io_engine(self._config.debugging.io_engine, len(paths))
        self._resources.callback(engine.close)
        self._transfers = Transfers(engine, made)
        return made

    def _read(self, block: torch.Tensor, offset: int) -> None:
        """Fills the whole pages that have a block. Raises NativeIoError."""
        assert self._transfers is not None
        nbytes = round_up(len(block), PAGE_BYTES)
        self._transfers.read(block.data_ptr(), nbytes, offset).wait()

    def _write(self, block: torch.Tensor, offset: int) -> None:
        """Writes the whole pages that have a block. Raises NativeIoError."""
        assert self._transfers is not None
        nbytes = round_up(len(block), PAGE_BYTES)
        self._transfers.write(block.data_ptr(), nbytes, offset).wait()


def _blocks(nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (offset, block of whole pages) over `nbytes`; every block is the same memory."""
    if not nbytes:  # a rank's part of a parameter of few elements
        return
    block = _block(min(BLOCK_BYTES, nbytes))
    for begin in range(0, nbytes, len(block)):
        yield begin, block


def _block(nbytes: int) -> torch.Tensor:
    """At least so many bytes, whole pages, which go with it."""
    size = round_up(nbytes, PAGE_BYTES)
    return torch.from_dlpack(Arena(size).export(0, size))  # type: ignore[attr-defined]


_TRIM_BYTES = 16 << 20  # freed, after which the heap is trimmed
_USES_OF_UNSHARED = 2  # of a storage to which only the parameter and the counting code refer
USES_OUTSIDE_GRAPHS = 1  # of a parameter which no graph of autograd has
_NOT_ALIKE = (
    "the ranks need different parameters while they build the model; inside ZeroInitContext all "
    "ranks must run the same code on all parameters"
)


class ConstructionStore:
    """Has the bytes of parameters under construction, and makes room for those that are needed.

    Attributes:
        world: the ranks, which all build the model.
        budgets: of all ranks.
        config: the options.
        file: where parameters wait.
        params: by id(param). One that is offloaded or brought in becomes the last: the first is the
            next to be offloaded.
        in_block: inside the block of ZeroInitContext all ranks run the same code.
        is_placing: initialize() gives parameters their places: graphs over them end with it.
        is_closed: nothing moves to disk any more.
    """

    def __init__(self, config: Config, world: ProcessGroups) -> None:
        self.world = world
        self.budgets = FirstBudgets(config, world)
        self.config = self.budgets.effective(config)
        self.ledger = Ledger(
            {
                Tier.DEVICE: self.budgets.device_bytes or config.budget(Tier.DEVICE),
                Tier.HOST: self.budgets.host_bytes,
                Tier.DISK: self.budgets.disk_bytes,
            },
            weakly(self._relieve),
        )
        self.file = ConstructionFile(config, self.ledger)
        self.params: OrderedDict[int, ConstructionParam] = OrderedDict()
        self.in_block = self.is_placing = self.is_closed = False
        self._untrimmed_bytes = 0
        self._largest_bytes = 0  # of a parameter that was whole in RAM

    @property
    def moves_out(self) -> bool:
        """Whether parameters can be anywhere but whole in RAM."""
        return self.config.nvme_path is not None or self.world.shard is not None

    def part(self, nbytes: int, rank: int) -> slice:
        """The bytes of an offloaded parameter of `nbytes` that a rank keeps."""
        part = part_bytes(nbytes, self.world.ranks)
        return slice(min(nbytes, rank * part), min(nbytes, (rank + 1) * part))

    def require_ranks_together(self, param: torch.Tensor) -> None:
        """Raises HeteroError if ranks keep parts of a parameter, and may not be here at once."""
        if self.world.shard is not None and not self.in_block:
            raise HeteroError(
                f"the values of a parameter of shape {tuple(param.shape)} were used between the "
                f"block of ZeroInitContext and hetero.initialize(): there each rank has a part of "
                f"them alone, and ranks need not run the same code; use them inside the block, or "
                f"after initialize()"
            )

    def forget(self, key: int) -> None:
        """Frees what there is of a parameter that was deleted, or has a home now."""
        param = self.params.pop(key, None)
        if param is not None:
            param.free()

    def charge(self, nbytes: int) -> None:
        """Charges RAM for a part of a parameter. Raises BudgetError."""
        self.ledger.charge(Tier.HOST, Account.INIT, nbytes)

    @contextmanager
    def charged(self, nbytes: int) -> Iterator[None]:
        """Charges RAM for what the block brings into it; no more if that fails. Raises
        BudgetError."""
        self.charge(nbytes)
        try:
            yield
        except BaseException:
            self.release(nbytes)
            raise

    def charge_whole(self, nbytes: int, new: torch.nn.Parameter | None = None) -> None:
        """Charges RAM for a whole parameter, which may be a `new` one. Raises BudgetError."""
        excess = self.budgets.excess(0 if new is not None else nbytes)
        if excess:  # what module code holds beside parameters has grown, too
            self._relieve(Tier.HOST, excess)
            trim_heap()
        try:
            self.charge(nbytes)
        except BudgetError as error:
            raise BudgetError(self._refusal(nbytes, new, error)) from None
        self._largest_bytes = max(self._largest_bytes, nbytes)

    def release(self, nbytes: int) -> None:
        """Gives up charged RAM."""
        self.ledger.release(Tier.HOST, Account.INIT, nbytes)
        self._untrimmed_bytes += nbytes
        if self._untrimmed_bytes >= _TRIM_BYTES:
            self._untrimmed_bytes = 0
            trim_heap()

    def _relieve(self, tier: Tier, nbytes: int) -> None:
        """Frees at least `nbytes` of RAM, as far as it can: called by the ledger."""
        if self.is_closed or tier is not Tier.HOST or not self.moves_out:
            return
        before = self.ledger.used(tier, Account.INIT)
        steps = [param.offload for param in self.params.values()]
        if self.config.nvme_path is not None:
            steps += [param.write_part for param in self.params.values()]
        for step in steps:
            if before - self.ledger.used(tier, Account.INIT) >= nbytes:
                return
            step()

    def _refusal(self, nbytes: int, new: torch.nn.Parameter | None, error: BudgetError) -> str:
        """Why `nbytes` more do not fit, and which budget will do, as far as that is known."""
        least, what = max(self._largest_bytes, nbytes), "the largest parameter so far"
        unmanaged = self.ledger.used(Tier.HOST, Account.UNMANAGED)
        fixed_bytes = sum(each.charged for each in self.params.values() if not each.may_move)
        if not self.moves_out:
            least, what = self.ledger.used(Tier.HOST, Account.INIT) + nbytes, "what is built so far"
        elif fixed_bytes + nbytes > least:
            least = fixed_bytes + nbytes
            what = (
                "what must stay in RAM, because it is used or other tensors have the same memory,"
            )
        likely, model = self._likely_bytes(new), "a model with parameters like those so far"
        if unmanaged:
            beside = f", and {format_bytes(unmanaged)} of parameters that never move,"
            what, least = what + beside, least + unmanaged
            model, likely = model + beside, likely + unmanaged if likely else 0
        rest = "the rest of the model may need more"
        why = self.budgets.too_small(*max((what, least), (model, likely), key=itemgetter(1)))
        if why is None:
            why = (
                f"{error}: {what} takes {format_bytes(least)} ({least} bytes), so host_memory must "
                f"be at least that"
            )
            if likely > least:
                rest = f"{model} takes {format_bytes(likely)} ({likely} bytes), and {rest}"
        return f"{why}; {rest}"

    def _likely_bytes(self, new: torch.nn.Parameter | None) -> int:
        """RAM with which the model is likely to have a placement; 0 if that is its whole state."""
        if not self.moves_out:
            return 0
        found = [new, *(each.param for each in self.params.values())]
        built = [param for param in found if param is not None]
        shard = make_shard(self.config, self.world)
        disk, device = self.budgets.disk_bytes, self.budgets.device_bytes
        return likely_host_bytes(built, self.config, disk, shard, device)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls the bound method as long as its object lives.

    (An arena that is not used any more frees its file at once, not when the garbage collector
    comes.)
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return call


class ConstructionParam:
    """A parameter under construction.

    Attributes:
        number: its place in the order of adoption (an id is used again when a parameter is gone).
        nbytes: its size in the last dtype it had.
        charged: bytes charged for the whole parameter in RAM; 0 if it is offloaded.
        is_offloaded: its memory is the stand-in.
        uses: blocks of present() that it is in.
    """

    def __init__(self, store: ConstructionStore, param: torch.nn.Parameter, number: int) -> None:
        """Nothing is charged for it yet.

        Raises HeteroError if it is not on the CPU.
        """
        if param.device.type != "cpu":
            raise HeteroError(
                f"a parameter of shape {tuple(param.shape)} was made on {param.device}; build the "
                f"model on the CPU: hetero places it"
            )
        self._store, self._reference = store, weakref.ref(param)
        # Not at the interpreter's exit, when modules are empty already.
        self._gone = weakref.finalize(param, weakly(store.forget), id(param))
        self._gone.atexit = False
        self.number, self.nbytes = number, param.numel() * param.element_size()
        self.charged = self.uses = 0
        self.is_offloaded = False
        self._part: torch.Tensor | None = None  # this rank's, if that is in RAM
        self._space = slice(0, 0)  # its bytes in the scratch file; kept while it is in RAM
        # The elements that bring_elements() brought, in the construction dtype, and the first one's
        # number.
        self._brought: tuple[int, torch.Tensor] | None = None

    @property
    def param(self) -> torch.nn.Parameter | None:
        """The parameter; None if it was deleted."""
        return self._reference()

    def alive(self) -> torch.nn.Parameter:
        """The parameter, which somebody uses now."""
        param = self._reference()
        assert param is not None
        return param

    @property
    def may_move(self) -> bool:
        """Whether nothing but the parameter refers to its memory, so that no write can be lost.

        Until initialize() places it, nor has a graph of autograd saved the parameter itself, whose
        backward would read the stand-in.
        """
        param = self.param
        if param is None:
            return True
        with torch._C.DisableTorchFunction():
            in_graphs = param._use_count() > USES_OUTSIDE_GRAPHS  # type: ignore[attr-defined]
        may_leave = self._store.is_placing or not in_graphs
        return may_leave and param.numel() > 0 and not self.is_shared

    @property
    def is_shared(self) -> bool:
        """Whether other tensors have its memory, too."""
        param = self.param
        if param is None:
            return False
        with torch._C.DisableTorchFunction():
            storage = param.untyped_storage()
        uses = torch._C._storage_Use_Count(storage._cdata)
        return uses > _USES_OF_UNSHARED or storage.nbytes() != param.numel() * param.element_size()

    def free(self) -> None:
        """Gives up what there is of it."""
        self._gone.detach()
        self.is_offloaded = False
        self._store.release(self.charged)
        self._drop_part()
        if self._brought is not None:
            self._store.release(self._brought[1].nbytes)

    # Out of RAM

    def offload(self) -> None:
        """Offloads it if it is in RAM, unless something else refers to its memory."""
        if self.charged and self.param is not None and self.may_move:
            self.move_out()

    def move_out(self) -> None:
        """Offloads it: to the file, or with several ranks this rank's part to RAM."""
        store, param = self._store, self.alive()
        values = memory_in(param)
        flat = values.contiguous().view(-1).view(torch.uint8)
        if store.world.shard is not None and not store.is_placing:  # start_alike() has, before that
            make_alike(store.world, self.number, flat)
        self.nbytes = flat.numel()
        part: torch.Tensor | None = None
        if store.world.shard is None:
            self._space = store.file.write(flat, self._space)
        else:
            part = flat[self._own_part()].clone()
        nan = torch.full((), float("nan"), dtype=param.dtype, device="cpu")
        self.is_offloaded = True  # before the class changes: then somebody may ask for it
        become(param, nan.expand(param.shape), absent=True)
        del values, flat
        store.params.move_to_end(id(param))
        charged, self.charged = self.charged, 0
        store.release(charged)
        if part is not None:  # after the whole was given up, if it was in RAM: there is room then
            try:
                store.charge(part_bytes(self.nbytes, store.world.ranks))
                self._part = part
            except BudgetError:
                if store.config.nvme_path is None:
                    raise
                self._space = store.file.write(part, self._space)

    def write_part(self) -> None:
        """Moves this rank's part, if it is in RAM, to the file."""
        if self._part is not None:
            self._space = self._store.file.write(self._part, self._space)
            self._drop_part()

    def _own_part(self) -> slice:
        return self._store.part(self.nbytes, self._store.world.rank)

    def _drop_part(self) -> None:
        if self._part is not None:
            self._part = None
            self._store.release(part_bytes(self.nbytes, self._store.world.ranks))

    # Into RAM

    def bring_in(self) -> None:
        """Makes it plain, with its values. Raises BudgetError, HeteroError."""
        param = self.alive()
        if self.is_offloaded:
            self._store.require_ranks_together(param)
            nbytes = param.numel() * param.element_size()
            self._store.charge_whole(nbytes)
            try:
                values = self.values()
            except BaseException:
                self._store.release(nbytes)
                raise
            self.become_present(values, nbytes)
        become_plain(param)

    def become_present(self, values: torch.Tensor, charged: int) -> None:
        """Gives it `values`, for which `charged` bytes are charged."""
        param = self.alive()
        if self.charged:
            self._store.release(self.charged)
        self.charged = charged
        self._drop_part()
        self._store.params.move_to_end(id(param))
        become(param, values, absent=False)
        become_plain(param)
        self.is_offloaded = False

    def values(self) -> torch.Tensor:
        """A copy of all values, in the parameter's shape."""
        param = self.alive()
        return self.elements(slice(0, param.numel())).view(param.shape)

    def elements(self, wanted: slice) -> torch.Tensor:
        """Some elements of the flat parameter: a view of what is in RAM, or a copy, which no budget
        counts."""
        store, param = self._store, self.alive()
        if self._brought is not None or not self.is_offloaded:
            first, flat = self._brought or (0, memory_in(param).reshape(-1))
            return flat[wanted.start - first : wanted.stop - first]
        values = torch.empty(wanted.stop - wanted.start, dtype=param.dtype, device="cpu")
        if store.world.shard is None:
            begin = self._space.start + self._bytes(wanted).start
            store.file.read_into(values.view(torch.uint8), begin)
        else:
            self._exchange(values.view(torch.uint8), [self._bytes(wanted)] * store.world.ranks)
        return values

    def bring_elements(self, wanted: Sequence[slice]) -> None:
        """Brings the elements wanted[rank] to every rank, for elements(). All ranks call it.

        The ranks' parts are freed.
        """
        store, param, mine = self._store, self.alive(), wanted[self._store.world.rank]
        with store.charged((mine.stop - mine.start) * param.element_size()):
            if self.is_offloaded and self._part is None:  # the file has it
                with store.charged(part_bytes(self.nbytes, len(wanted))):
                    self._part = self._part_in_file()
            values = torch.empty(mine.stop - mine.start, dtype=param.dtype, device="cpu")
            self._exchange(values.view(torch.uint8), list(map(self._bytes, wanted)))
        self._brought = mine.start, values
        self._drop_part()

    def _bytes(self, elements: slice) -> slice:
        itemsize = self.alive().element_size()
        return slice(elements.start * itemsize, elements.stop * itemsize)

    def _part_in_file(self) -> torch.Tensor:
        kept = self._own_part()
        part = torch.empty(kept.stop - kept.start, dtype=torch.uint8, device="cpu")
        self._store.file.read_into(part, self._space.start)
        return part

    def _exchange(self, into: torch.Tensor, wanted: Sequence[slice]) -> None:
        """Gives every rank the bytes wanted[rank] of the whole parameter. All ranks call it.

        `into` takes this rank's bytes, flat.

        Raises HeteroError if ranks are at different parameters, PeerError if one is gone.
        """
        store, param = self._store, self.alive()
        shard = store.world.shard
        assert shard is not None
        kept = [
            store.part(param.numel() * param.element_size(), rank) for rank in range(shard.size)
        ]
        if not self.is_offloaded:
            mine = memory_in(param).contiguous().view(-1).view(torch.uint8)[kept[shard.rank]]
        else:
            mine = self._part_in_file() if self._part is None else self._part
        if not shard.are_same(torch.tensor([self.number], device="cpu"), "building the model"):
            raise HeteroError(_NOT_ALIKE)
        sends = [[_common(mine, kept[shard.rank], wanted[rank])] for rank in range(shard.size)]
        receives = [[_common(into, wanted[shard.rank], kept[rank])] for rank in range(shard.size)]
        shard.exchange(sends, receives, "building the model")

    # Where its values are

    def change(self, change: TileChange) -> bool:
        """Makes a change to an offloaded one tile by tile; False, with nothing changed, if not."""
        store, param = self._store, self.alive()
        if store.world.shard is None:
            store.file.change(self._space, self.nbytes, param.dtype, change)
            return True
        if not store.in_block:
            return False
        part = self._part_in_file() if self._part is None else self._part
        done = self._change_part(part, change)
        if self._part is None:
            self._space = store.file.write(part, self._space)
        return done

    def _change_part(self, part: torch.Tensor, change: TileChange) -> bool:
        """Makes a change to this rank's `part`. All ranks call it.

        Returns False, on all ranks, if elements are cut in two by the ranks' parts.

        What fills is made on all of the parameter, tile by tile, because it may draw random
        numbers, of which each rank draws all; the first rank's count.
        """
        world, param = self._store.world, self.alive()
        if not change.fills:
            cut = part_bytes(param.numel() * param.element_size(), world.ranks)
            if cut % param.element_size():
                return False
            change.apply(part.view(param.dtype))
            return True
        kept = self._own_part()
        for tile in tiles(param.numel(), BLOCK_BYTES // param.element_size()):
            values = torch.empty(tile.stop - tile.start, dtype=param.dtype, device="cpu")
            change.apply(values)
            make_alike(world, self.number, values)
            has = self._bytes(tile)
            _common(part, kept, has).copy_(_common(values.view(torch.uint8), has, kept))
        return True


def _common(flat: torch.Tensor, has: slice, wanted: slice) -> torch.Tensor:
    """The part of `flat` (the elements `has` of a longer array) that is in the range `wanted`."""
    begin = max(has.start, wanted.start)
    return flat[begin - has.start : max(begin, min(has.stop, wanted.stop)) - has.start]


def make_alike(world: ProcessGroups, number: int, values: torch.Tensor) -> None:
    """Makes a parameter's values, flat, those of the first rank, where they differ.

    All ranks call it before each keeps a part alone: ranks may draw other random numbers, as they
    do under DDP, and all parts must be of the same values. `number` is of the parameter.

    Raises HeteroError if the ranks are at different parameters, PeerError if a rank is gone.
    """
    everyone = world.everyone
    assert everyone is not None
    own = torch.tensor([number, zlib.crc32(values.view(torch.uint8).numpy().data)], device="cpu")
    found = everyone.all_gather(own, "building the model")
    differ = found.ne(found[0]).any(dim=0)
    if differ[0]:
        raise HeteroError(_NOT_ALIKE)
    if differ[1]:
        take_from_first(values, everyone)


def take_from_first(values: torch.Tensor, everyone: Communicator) -> None:
    """Copies the first rank's `values`, of any shape, over this rank's. All ranks call it."""
    flat = values.detach().contiguous()
    everyone.broadcast(flat, 0, "the first rank's values")
    if flat.data_ptr() != values.data_ptr():
        values.copy_(flat)
