"""Parameters between their construction and their chunk.

A parameter is moved only if nothing else refers to its memory. One that is larger than the budget
is offloaded when it is registered: memory that nobody has written to, as torch.empty() gives it,
takes no room while it is read. An operator that fills it then works tile by tile in the file
(tile_changes.py). One that needs such a parameter whole is refused with the budget that it takes.

With several ranks a parameter is brought in by all of them together, which is possible inside the
block alone. From there to initialize() a use of an offloaded one is refused, but for conversions to
what it is (`model.to("cpu")`).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

import torch

from hetero.chunks.dtypes import is_manageable
from hetero.config import Config
from hetero.planning.group_plans import likely_host_bytes, make_shard
from hetero.planning.placement import part_bytes
from hetero.ranks.process_groups import ProcessGroups
from hetero.setup.construction_file import BLOCK_BYTES, ConstructionFile
from hetero.setup.construction_parts import change_part, exchange_parts, make_alike, part_of
from hetero.setup.construction_record import Record, check_adoptable, may_be_offloaded, weakly
from hetero.setup.process_share import FirstBudgets, ProcessShare
from hetero.stand_ins.construction_uses import ConstructionUses, arena_of
from hetero.stand_ins.parameter_classes import become, become_plain, memory_in
from hetero.stand_ins.tile_changes import TileChange
from hetero.state.unmanaged_params import UnmanagedParams
from offload.errors import BudgetError, HeteroError
from offload.memory.c_heap import trim_heap
from offload.memory.ledger import Ledger
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Account, Tier

_TRIM_BYTES = 16 << 20  # freed, after which the heap is trimmed


class ConstructionArena:
    """Parameters under construction, in their construction dtype, before they have a chunk.

    They stay plain parameters in RAM until the host budget is needed for something else; then the
    least recently used are offloaded: they get the class AbsentParameter and a stand-in for memory,
    and their bytes go to a scratch file. Who uses one gets its values back first. Of several ranks,
    which all build the same model, each first keeps its part of an offloaded parameter in RAM; all
    ranks must then bring in the same parameters in the same order, so they can only inside the
    context's block.

    Where some are offloaded at the block's end, those in RAM get the class AbsentParameter, too,
    except while they are used: so that a state_dict() does not hold all the memory there is.
    """

    def __init__(self, config: Config, world: ProcessGroups) -> None:
        """An arena without parameters; all ranks of `world` make one."""
        self.given_config, self.world = config, world
        self.process_share = ProcessShare(config, world.local_ranks)
        self.first_budgets = budgets = FirstBudgets(config, world, self.process_share)
        self.config = budgets.effective(config)
        self.host_bytes, self.disk_bytes = budgets.host_bytes, budgets.disk_bytes
        self.device_bytes = budgets.device_bytes
        self.ledger = Ledger(
            {
                Tier.DEVICE: self.device_bytes or config.budget(Tier.DEVICE),
                Tier.HOST: self.host_bytes,
                Tier.DISK: self.disk_bytes,
            },
            # Weak, here and in what params refer to: an arena that is not used any more frees its
            # file at once, not when the garbage collector comes.
            weakly(self._relieve),
        )
        self.unmanaged = UnmanagedParams(self.ledger)
        self._in_block = False
        self._guards = False  # parameters in RAM have the class of absent ones between their uses
        self._placing = False  # initialize() gives parameters their places
        self.is_closed = False  # nothing moves to disk any more
        self._bringing = threading.RLock()
        # By id(param). One that is offloaded or brought in becomes the last: the first is the next.
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._offloaded: set[Record] = set()  # those whose memory is the stand-in
        self._adopted = 0
        self._file = ConstructionFile(config.nvme_paths, self.ledger)
        self._untrimmed_bytes = 0
        self._largest_bytes = 0  # of a parameter that was whole in RAM

    @property
    def notes(self) -> list[str]:
        """What the user should know of the scratch file; nothing after close()."""
        return self._file.notes

    @property
    def any_offloaded(self) -> bool:
        """Whether some parameter is offloaded."""
        return bool(self._offloaded)

    @property
    def is_empty(self) -> bool:
        """Whether no parameter was adopted so far."""
        return self._adopted == 0

    def has_no_others_than(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Whether these are all parameters that are under construction."""
        return self._records.keys() <= {id(param) for param in params}

    def take_options(self, config: Config) -> None:
        """initialize() is going to use `config`; those of memory and disk must be as before."""
        self.given_config, self.config = config, self.first_budgets.effective(config)

    def begin_block(self) -> None:
        """The block of a ZeroInitContext begins."""
        self._in_block = True

    def end_block(self) -> None:
        """It ends."""
        self._in_block = False
        self._guards = self.any_offloaded
        for record in list(self._records.values()):
            self._guard(record)

    def _guard(self, record: Record) -> None:
        param = record.param()
        if self._guards and param is not None and not record.uses:
            become(param, memory_in(param), absent=True)

    def adopt(self, param: torch.nn.Parameter, name: str = "a parameter") -> None:
        """Takes charge of a parameter, unless an arena has it; one that is not of a floating dtype
        only counts.

        One that does not fit the host budget is offloaded at once, if a tile of it fits and there
        is a file for it, or several ranks that keep parts of it.

        Raises:
            HeteroError: it is not on the CPU, has no values of its own, or is of a dtype that
                cannot be managed.
            BudgetError: it does not fit the host budget, and cannot be offloaded.
        """
        if not is_manageable(param, name):
            if arena_of(param) is not None:  # its .data is of another dtype now
                with self.present([param]):
                    pass
                self.release(param)
            if param.device.type == "cpu":
                self.unmanaged.charge(param, Tier.HOST, name)
            return
        if arena_of(param) is not None:
            return
        check_adoptable(param)
        key, nbytes = id(param), param.numel() * param.element_size()
        with self._bringing:
            gone = weakref.finalize(param, weakly(self._forget), key)
            gone.atexit = False
            record = Record(weakref.ref(param), gone, self._adopted, nbytes, charged=0)
            try:
                self._charge(nbytes, param)
                record.charged = nbytes
            except BudgetError:  # (memory that was never written to takes no room while it is read)
                tile_fits = self.host_bytes >= min(nbytes, BLOCK_BYTES)
                if not (tile_fits and self._moves_out and self._may_move(param)):
                    raise
            param._hetero_owner = ConstructionUses(self)  # type: ignore[attr-defined]
            self._records[key] = record
            self._adopted += 1
            if record.charged < nbytes:  # (some parameters have no elements)
                self._move_out(record, param)

    def _forget(self, key: int) -> None:
        """Frees what there is of a parameter that was deleted, or has a home now."""
        record = self._records.pop(key, None)
        if record is None:
            return
        record.gone.detach()
        self._offloaded.discard(record)
        self._release_bytes(record.charged)
        self._drop_part(record)
        if record.brought is not None:
            self._release_bytes(record.brought[1].nbytes)

    @property
    def _moves_out(self) -> bool:
        """Whether parameters can be anywhere but whole in RAM."""
        return self.config.nvme_path is not None or self.world.shard is not None

    def _relieve(self, tier: Tier, nbytes: int) -> None:
        """Frees at least `nbytes` of RAM, as far as it can: called by the ledger."""
        if self.is_closed or tier is not Tier.HOST or not self._moves_out:
            return
        has_file = self.config.nvme_path is not None
        before = self.ledger.used(tier, Account.INIT)
        for record in list(self._records.values()):
            if before - self.ledger.used(tier, Account.INIT) >= nbytes:
                return
            self._offload(record)
        for record in list(self._records.values()) if has_file else []:
            if before - self.ledger.used(tier, Account.INIT) >= nbytes:
                return
            if record.part is not None:
                record.space = self._file.write(record.part, record.space)
                self._drop_part(record)

    def _offload(self, record: Record) -> None:
        """Offloads a parameter that is in RAM, unless something else refers to its memory."""
        param = record.param()
        if record.charged and param is not None and self._may_move(param):
            self._move_out(record, param)

    def _move_out(self, record: Record, param: torch.nn.Parameter) -> None:
        values = memory_in(param)
        flat = values.contiguous().view(-1).view(torch.uint8)
        if self.world.shard is not None and not self._placing:  # start_alike() has, before that
            make_alike(self.world, record.number, flat)
        record.nbytes = flat.numel()
        part: torch.Tensor | None = None
        if self.world.shard is None:
            record.space = self._file.write(flat, record.space)
        else:
            part = flat[self._part(flat.numel(), self.world.rank)].clone()
        nan = torch.full((), float("nan"), dtype=param.dtype)
        self._offloaded.add(record)  # before the class changes: then somebody may ask for it
        become(param, nan.expand(param.shape), absent=True)
        del values, flat
        self._records.move_to_end(id(param))
        charged, record.charged = record.charged, 0
        self._release_bytes(charged)
        if part is not None:  # after the whole was given up, if it was in RAM: there is room then
            kept_bytes = part_bytes(record.nbytes, self.world.ranks)
            try:
                self.ledger.charge(Tier.HOST, Account.INIT, kept_bytes)
                record.part = part
            except BudgetError:
                if self.config.nvme_path is None:
                    raise
                record.space = self._file.write(part, record.space)

    def _may_move(self, param: torch.nn.Parameter) -> bool:
        return may_be_offloaded(param, heed_graphs=not self._placing)

    def _part(self, nbytes: int, rank: int) -> slice:
        return part_of(nbytes, rank, self.world.ranks)

    def _drop_part(self, record: Record) -> None:
        if record.part is not None:
            record.part = None
            self._release_bytes(part_bytes(record.nbytes, self.world.ranks))

    def _release_bytes(self, nbytes: int) -> None:
        self.ledger.release(Tier.HOST, Account.INIT, nbytes)
        self._untrimmed_bytes += nbytes
        if self._untrimmed_bytes >= _TRIM_BYTES:
            self._untrimmed_bytes = 0
            trim_heap()

    @contextmanager
    def present(self, params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Inside the block the parameters are plain and stay in RAM.

        Yields:
            aliases of them; memory to which something refers is not moved.

        Raises:
            BudgetError: they do not fit the host budget together.
            HeteroError: all ranks keep parts of one, and need not be here together.
        """
        held, used = list[torch.Tensor](), list[Record]()
        try:
            with self._bringing:
                for record in [self._records[id(param)] for param in params]:
                    record.uses += 1
                    used.append(record)
                    held.append(self._in_ram(record))
            yield held
        finally:
            held.clear()  # an error's frames would go on holding them
            for record in used:
                record.uses -= 1
                self._guard(record)

    def _in_ram(self, record: Record) -> torch.Tensor:
        param = record.param()
        assert param is not None
        if record in self._offloaded:
            self._bring_in(record, param)
        become_plain(param)
        return memory_in(param)

    def _bring_in(self, record: Record, param: torch.nn.Parameter) -> None:
        self._require_ranks_together(param)
        nbytes = param.numel() * param.element_size()
        self._charge(nbytes)
        try:
            values = self._values(record, param)
        except BaseException:
            self._release_bytes(nbytes)
            raise
        self._are_present(record, param, values, nbytes)

    def _are_present(
        self, record: Record, param: torch.nn.Parameter, values: torch.Tensor, charged: int
    ) -> None:
        """The parameter has `values` now, for which `charged` bytes are."""
        if record.charged:
            self._release_bytes(record.charged)
        record.charged = charged
        self._drop_part(record)
        self._records.move_to_end(id(param))
        become(param, values, absent=False)
        become_plain(param)
        self._offloaded.discard(record)

    def _require_ranks_together(self, param: torch.Tensor) -> None:
        if self.world.shard is not None and not self._in_block:
            raise HeteroError(
                f"the values of a parameter of shape {tuple(param.shape)} were used between the "
                f"block of ZeroInitContext and hetero.initialize(): there each rank has a part of "
                f"them alone, and ranks need not run the same code; use them inside the block, or "
                f"after initialize()"
            )

    def change(self, param: torch.Tensor, change: TileChange) -> bool:
        """Makes a change to an offloaded parameter where its values are, tile by tile.

        Returns False, with nothing changed, if it must be made on the whole parameter.
        """
        with self._bringing:
            record = self._records[id(param)]
            if record not in self._offloaded or self.is_closed:
                return False
            if self.world.shard is None:
                self._file.change(record.space, record.nbytes, param.dtype, change)
                return True
            if not self._in_block:
                return False
            part = self._part_in_file(record) if record.part is None else record.part
            kept = self._part(record.nbytes, self.world.rank)
            done = change_part(self.world, record.number, part, kept, param, change)
            if record.part is None:
                record.space = self._file.write(part, record.space)
            return done

    def elements(self, param: torch.Tensor, wanted: slice) -> torch.Tensor:
        """A copy of some elements of the flat parameter, in memory that no budget counts."""
        with self._bringing:
            record = self._records[id(param)]
            if record not in self._offloaded:
                return memory_in(param).reshape(-1)[wanted].clone()
            self._require_ranks_together(param)
            values = torch.empty(wanted.stop - wanted.start, dtype=param.dtype)
            if self.world.shard is None:
                for begin, part in self._file.elements(record.space, wanted, param.dtype):
                    values[begin - wanted.start :][: part.numel()] = part
            else:
                size = param.element_size()
                wanted = slice(wanted.start * size, wanted.stop * size)
                self._exchange(record, param, values.view(torch.uint8), [wanted] * self.world.ranks)
            return values

    def replace(self, param: torch.nn.Parameter, values: torch.Tensor) -> None:
        """Points a parameter to other values, of whatever shape and dtype.

        Raises BudgetError if they do not fit the host budget.
        """
        with self._bringing:
            record = self._records[id(param)]
            nbytes = values.numel() * values.element_size()
            self._charge(nbytes)
            self._are_present(record, param, values, nbytes)
            self._guard(record)

    def copy(self, param: torch.nn.Parameter) -> torch.Tensor:
        """A plain copy of a parameter's values, in memory that no budget counts."""
        return self.elements(param, slice(0, param.numel())).view(param.shape)

    def _charge(self, nbytes: int, new: torch.nn.Parameter | None = None) -> None:
        """Charges RAM for a whole parameter, which may be a `new` one. Raises BudgetError."""
        excess = self.process_share.excess(0 if new is not None else nbytes)
        if excess:  # what module code holds beside parameters has grown, too
            self._relieve(Tier.HOST, excess)
            trim_heap()
        try:
            self.ledger.charge(Tier.HOST, Account.INIT, nbytes)
        except BudgetError as error:
            raise BudgetError(self._refusal(nbytes, new, error)) from None
        self._largest_bytes = max(self._largest_bytes, nbytes)

    def _refusal(self, nbytes: int, new: torch.nn.Parameter | None, error: BudgetError) -> str:
        """Why `nbytes` more do not fit, and which budget will do, as far as that is known."""
        least, what = max(self._largest_bytes, nbytes), "the largest parameter so far"
        unmanaged = self.ledger.used(Tier.HOST, Account.UNMANAGED)
        if not self._moves_out:
            least, what = self.ledger.used(Tier.HOST, Account.INIT) + nbytes, "what is built so far"
        elif self._fixed_bytes() + nbytes > least:
            least = self._fixed_bytes() + nbytes
            what = (
                "what must stay in RAM, because it is used or other tensors have the same memory,"
            )
        likely, model = self._likely_bytes(new), "a model with parameters like those so far"
        if unmanaged:
            beside = f", and {format_bytes(unmanaged)} of parameters that never move,"
            what, least = what + beside, least + unmanaged
            model, likely = model + beside, likely + unmanaged if likely else 0
        rest = "the rest of the model may need more"
        if likely > least:
            rest = f"{model} takes {format_bytes(likely)} ({likely} bytes), and {rest}"
        why = self.process_share.too_small(*max((what, least), (model, likely), key=itemgetter(1)))
        if why is None:
            why = (
                f"{error}: {what} takes {format_bytes(least)} ({least} bytes), so host_memory must "
                f"be at least that"
            )
        return f"{why}; {rest}"

    def _likely_bytes(self, new: torch.nn.Parameter | None) -> int:
        """RAM with which the model is likely to have a placement; 0 if that is its whole state."""
        if not self._moves_out:
            return 0
        found = [new, *(record.param() for record in self._records.values())]
        built = [param for param in found if param is not None]
        shard = make_shard(self.config, self.world)
        return likely_host_bytes(built, self.config, self.disk_bytes, shard, self.device_bytes)

    def _fixed_bytes(self) -> int:
        """Bytes of parameters in RAM that cannot be offloaded now."""
        held = [(record, record.param()) for record in self._records.values() if record.charged]
        return sum(r.charged for r, p in held if p is not None and not self._may_move(p))

    def _values(self, record: Record, param: torch.nn.Parameter) -> torch.Tensor:
        """An offloaded parameter's values: from the file, or from all ranks' parts."""
        values = torch.empty(param.shape, dtype=param.dtype)
        raw = values.view(-1).view(torch.uint8)
        if self.world.shard is None:
            self._file.read_into(raw, record.space.start)
        else:
            self._exchange(record, param, raw, [slice(0, raw.numel())] * self.world.ranks)
        return values

    def _exchange(
        self,
        record: Record,
        param: torch.Tensor,
        into: torch.Tensor,
        wanted: Sequence[slice],
    ) -> None:
        """Gives every rank the bytes wanted[rank] of a parameter. All ranks call it.

        `into` takes this rank's bytes, flat; `wanted` are byte ranges of the whole parameter.
        """
        nbytes = param.numel() * param.element_size()
        mine = record.part
        if record not in self._offloaded:
            mine = memory_in(param).contiguous().view(-1).view(torch.uint8)
            mine = mine[self._part(nbytes, self.world.rank)]
        elif mine is None:
            mine = self._part_in_file(record)
        exchange_parts(self.world, record.number, nbytes, mine, into, wanted)

    def _part_in_file(self, record: Record) -> torch.Tensor:
        """Reads this rank's part of an offloaded parameter."""
        kept = self._part(record.nbytes, self.world.rank)
        part = torch.empty(kept.stop - kept.start, dtype=torch.uint8)
        self._file.read_into(part, record.space.start)
        return part

    def is_offloaded(self, param: torch.nn.Parameter) -> bool:
        """Whether its values are not in its memory."""
        return self._records.get(id(param)) in self._offloaded

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Inside the block parameters get their places: graphs over them end with it."""
        self._placing = True
        try:
            yield
        finally:
            self._placing = False

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
        self.ledger.charge(Tier.HOST, Account.INIT, (mine.stop - mine.start) * itemsize)
        if record in self._offloaded and record.part is None:  # the file has it
            self.ledger.charge(Tier.HOST, Account.INIT, part_bytes(record.nbytes, len(wanted)))
            record.part = self._part_in_file(record)
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
        """
        record, itemsize = self._records.get(id(param)), param.element_size()
        brought = None if record is None else record.brought
        if record is None or record not in self._offloaded or brought is not None:
            first, flat = brought or (0, memory_in(param).reshape(-1))
            for begin in range(wanted.start, wanted.stop, BLOCK_BYTES // itemsize):
                end = min(begin + BLOCK_BYTES // itemsize, wanted.stop)
                yield begin, flat[begin - first : end - first].float()
            return
        for begin, values in self._file.elements(record.space, wanted, param.dtype):
            yield begin, values.float()

    def release(self, param: torch.nn.Parameter) -> None:
        """Frees what there is of a parameter that has a home now. Idempotent."""
        if arena_of(param) is not None:
            if not self.is_offloaded(param):
                become_plain(param)
            self._forget(id(param))
            del param._hetero_owner  # type: ignore[attr-defined]

    def restore(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Gives all parameters their values, as if they had not been adopted, and closes."""
        self.is_closed = True
        for param in params:
            if self.is_offloaded(param):
                become(param, self._values(self._records[id(param)], param), absent=False)
                become_plain(param)
            self.release(param)
        self.close()

    def close(self) -> None:
        """Frees the scratch file."""
        self.is_closed = True
        trim_heap()
        self._file.close()
