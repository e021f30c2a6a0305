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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hetero.chunks.dtypes import is_manageable
from hetero.config import Config
from hetero.ranks.process_groups import ProcessGroups
from hetero.setup.construction_store import (
    BLOCK_BYTES,
    USES_OUTSIDE_GRAPHS,
    ConstructionParam,
    ConstructionStore,
)
from hetero.stand_ins.construction_uses import ConstructionUses, arena_of
from hetero.stand_ins.parameter_classes import become, become_plain, memory_in
from hetero.stand_ins.tile_changes import TileChange
from hetero.state.unmanaged_params import UnmanagedParams
from offload.errors import BudgetError
from offload.memory.process_memory import trim_heap
from offload.memory.tiers import Tier


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
        self.store = store = ConstructionStore(config, world)
        self.ledger, self.budgets = store.ledger, store.budgets
        self.unmanaged = UnmanagedParams(self.ledger)
        self._guards = False  # parameters in RAM have the class of absent ones between their uses
        self._bringing = threading.RLock()
        self._adopted = 0

    @property
    def config(self) -> Config:
        """The options, with the activations counted if any rank's process has a limit."""
        return self.store.config

    @property
    def notes(self) -> list[str]:
        """Notes for the user about the scratch file; none after close()."""
        return self.store.file.notes

    @property
    def any_offloaded(self) -> bool:
        """Whether some parameter is offloaded."""
        return any(record.is_offloaded for record in self.store.params.values())

    @property
    def is_empty(self) -> bool:
        """Whether no parameter was adopted so far."""
        return self._adopted == 0

    @property
    def is_closed(self) -> bool:
        """Whether nothing moves to disk any more."""
        return self.store.is_closed

    def is_offloaded(self, param: torch.nn.Parameter) -> bool:
        """Whether its values are not in its memory."""
        record = self.store.params.get(id(param))
        return record is not None and record.is_offloaded

    def staying(self, model: torch.nn.Module) -> set[str]:
        """Names of the model's parameters that stay in RAM until they have a chunk, because other
        tensors have their memory, on some rank. All ranks call it.

        Raises PeerError.
        """
        records = self.store.params
        named = [(name, records.get(id(p))) for name, p in model.named_parameters()]
        mine = "\0".join(name for name, each in named if each and each.charged and each.is_shared)
        found, everyone = [mine.encode()], self.world.everyone
        if everyone is not None:
            found = everyone.all_gather_bytes(found[0], "what stays in RAM")
        return {name for names in found for name in names.decode().split("\0")}

    def has_no_others_than(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Whether these are all parameters that are under construction."""
        return self.store.params.keys() <= {id(param) for param in params}

    def take_options(self, config: Config) -> None:
        """initialize() is going to use `config`; those of memory and disk must be as before."""
        self.given_config, self.store.config = config, self.budgets.effective(config)

    @contextmanager
    def block(self) -> Iterator[None]:
        """The block of a ZeroInitContext, in which all ranks run the same code."""
        self.store.in_block = True
        try:
            yield
        finally:
            self.store.in_block = False
            self._guards = self.any_offloaded
            for record in list(self.store.params.values()):
                self._guard(record)

    def _guard(self, record: ConstructionParam) -> None:
        param = record.param
        if self._guards and param is not None and not record.uses:
            become(param, memory_in(param), absent=True)

    def adopt(self, param: torch.nn.Parameter, name: str = "a parameter") -> None:
        """Takes charge of a parameter, unless an arena has it; one that is not of a floating dtype
        only counts.

        One that does not fit the host budget is offloaded at once, if a tile of it fits and there
        is a file for it, or several ranks that keep parts of it.

        Raises:
            HeteroError: it is not on the CPU, or is of a dtype that cannot be managed.
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
        store = self.store
        with self._bringing:
            _count_alone(param)
            record = ConstructionParam(store, param, self._adopted)
            try:
                store.charge_whole(record.nbytes, param)
                record.charged = record.nbytes
            except BudgetError:  # (memory that was never written to takes no room while it is read)
                tile_fits = self.budgets.host_bytes >= min(record.nbytes, BLOCK_BYTES)
                if not (tile_fits and store.moves_out and record.may_move):
                    raise
            param._hetero_owner = ConstructionUses(self)  # type: ignore[attr-defined]
            store.params[id(param)] = record
            self._adopted += 1
            if record.charged < record.nbytes:  # (some parameters have no elements)
                record.move_out()

    @contextmanager
    def present(self, params: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Inside the block the parameters are plain and stay in RAM.

        Yields:
            aliases of them; memory to which something refers is not moved.

        Raises:
            BudgetError: they do not fit the host budget together.
            HeteroError: all ranks keep parts of one, and need not be here together.
        """
        held, used = list[torch.Tensor](), list[ConstructionParam]()
        try:
            with self._bringing:
                for record in [self.store.params[id(param)] for param in params]:
                    record.uses += 1
                    used.append(record)
                    record.bring_in()
                    held.append(memory_in(record.alive()))
            yield held
        finally:
            held.clear()  # an error's frames would go on holding them
            for record in used:
                record.uses -= 1
                self._guard(record)

    def change(self, param: torch.Tensor, change: TileChange) -> bool:
        """Makes a change to an offloaded parameter where its values are, tile by tile.

        Returns False, with nothing changed, if it must be made on the whole parameter.
        """
        with self._bringing:
            record = self.store.params[id(param)]
            return record.is_offloaded and not self.is_closed and record.change(change)

    def elements(self, param: torch.Tensor, wanted: slice) -> torch.Tensor:
        """A copy of some elements of the flat parameter, in memory that no budget counts."""
        with self._bringing:
            record = self.store.params[id(param)]
            if not record.is_offloaded:
                return record.elements(wanted).clone()
            self.store.require_ranks_together(param)
            return record.elements(wanted)

    def replace(self, param: torch.nn.Parameter, values: torch.Tensor) -> None:
        """Points a parameter to other values, of whatever shape and dtype.

        Raises BudgetError if they do not fit the host budget.
        """
        with self._bringing:
            record = self.store.params[id(param)]
            nbytes = values.numel() * values.element_size()
            self.store.charge_whole(nbytes)
            record.become_present(values, nbytes)
            self._guard(record)

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Inside the block parameters get their places: graphs over them end with it.

        Each rank keeps its part of every parameter at first, but of those that share their memory.
        """
        self.store.is_placing = True
        try:
            if self.world.shard is not None:
                for record in list(self.store.params.values()):
                    record.offload()
            yield
        finally:
            self.store.is_placing = False

    def release(self, param: torch.nn.Parameter) -> None:
        """Frees what there is of a parameter that has a home now. Idempotent."""
        if arena_of(param) is not None:
            if not self.is_offloaded(param):
                become_plain(param)
            self.store.forget(id(param))
            del param._hetero_owner  # type: ignore[attr-defined]

    def restore(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Gives all parameters their values, as if they had not been adopted, and closes."""
        self.store.is_closed = True
        for param in params:
            if self.is_offloaded(param):
                become(param, self.store.params[id(param)].values(), absent=False)
                become_plain(param)
            self.release(param)
        self.close()

    def close(self) -> None:
        """Frees the scratch file."""
        self.store.is_closed = True
        trim_heap()
        self.store.file.close()


def _count_alone(param: torch.nn.Parameter) -> None:
    """Gives a parameter that is a part of a tensor, as nn.Parameter(t[0]) is, a version of its own.

    torch counts changes of all such parts together, so an update of one would end graphs over all.
    One that has hooks, or is in a graph, keeps the tensor that these belong to.
    """
    with torch._C.DisableTorchFunction():
        is_whole = param.untyped_storage().nbytes() == param.nbytes
        in_graphs = param._use_count() > USES_OUTSIDE_GRAPHS  # type: ignore[attr-defined]
        if is_whole or in_graphs or param._backward_hooks or param._post_accumulate_grad_hooks:
            return
        alone = torch.nn.Parameter(param.data, param.requires_grad)
        alone.grad = param.grad
        torch._C._swap_tensor_impl(param, alone)
