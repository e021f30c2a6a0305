"""Slots of a chunk group for what is elsewhere at home, and the pipeline over its buffers."""

from __future__ import annotations

from contextlib import ExitStack

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.planning.placement import Placement, SlotBytes
from hetero.state.scratch_space import ScratchSpace
from offload._native import StepPipeline, UpdateKind
from offload.device.backend import Backend
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier


class SlotArenas:
    """One arena per purpose, without slots where a placement needs none.

    Between steps, when no slot is in use, they may get other sizes: empty(), then fill(). Slots on
    a DEVICE of its own may be given up before the others.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        placement: Placement,
        backend: Backend,
        ledger: Ledger,
        file: ScratchSpace,
        notes: list[str],
        spare_bytes: int,
        resources: ExitStack,
    ) -> None:
        """Takes what `placement` says from the budgets. `resources` give it back.

        `spare_bytes` of RAM are nobody's: with several ranks all parameters may be gathered at
        once, if wanted, as far as that goes. Raises BudgetError.
        """
        self._layout, self._dtypes = layout, dtypes
        self._slot = SlotBytes.of(layout, dtypes)
        self._separate = backend.separate
        self._file = file
        self._notes = notes

        def arena(account: Account, linked: bool = True) -> HostArena:
            """`linked`: the device's copies use it."""
            make = backend.host_arena if linked else HostArena
            made = make(0, 1, ledger, account)
            resources.callback(made.close)
            return made

        self.staged = arena(Account.GATHERED)  # RAM, on the way to DEVICE
        self.shards = arena(Account.SHARD)
        self.grads = arena(Account.GRAD_SLOT)
        self.buffers = arena(Account.BUFFER, linked=False)
        # Where compute happens.
        self.gathered = backend.arena(0, self._slot.gathered, ledger, Account.GATHERED)
        resources.callback(self.gathered.close)
        self.pipeline: StepPipeline
        # Changes whenever the pipeline has lost what it was told to read ahead.
        self.read_ahead_epoch = 0
        self.fill(placement, spare_bytes)
        resources.callback(lambda: self.pipeline.close())

    def fill(self, placement: Placement, spare_bytes: int) -> None:
        """Takes the sizes of `placement`, and a new pipeline. Raises BudgetError."""
        made, slot = placement, self._slot
        spare_slots = 0
        if self._layout.shard.ranks > 1 and made.gathered_slots and not self._separate:
            spare_slots = min(self._layout.slot_count, max(0, spare_bytes) // slot.gathered)
        self.fill_gathered(made.gathered_slots, spare_slots)
        shape = self._buffer_shape(made)
        for arena, slots, nbytes in (
            (self.staged, made.staged_slots, slot.gathered),
            (self.shards, made.shard_slots, slot.param),
            (self.grads, made.grad_slots, slot.grad),
            (self.buffers, made.buffers, StepPipeline.buffer_bytes(*shape)),
        ):
            arena.resize(slots, nbytes)
            arena.commit(0, slots)
        self._register()
        disk = self._file.parts
        self.pipeline = StepPipeline(
            # (Frozen parameters alone on DISK need no buffers, and so no engine.)
            disk.io if disk is not None and made.buffers else None,
            disk.transfers.file if disk is not None else -1,
            self.buffers.memory if made.buffers else None,
            made.buffers,
            *shape,
        )
        self.read_ahead_epoch += 1

    def forget_read_ahead(self) -> None:
        """Frees the pipeline's buffers of what they have read, or keep, for the next step.

        What the file lacks is written first.
        """
        self.pipeline.forget()
        self.read_ahead_epoch += 1

    def fill_gathered(self, slots: int, spare_slots: int = 0) -> None:
        """Takes slots where compute happens; `spare_slots` may be used for a while, too."""
        self.gathered.resize(slots + spare_slots)
        self.gathered.commit(0, slots)

    def empty(self) -> None:
        """Gives all slots back; the pipeline is closed.

        Nobody may use them; the pipeline must have nothing that the file has not.
        """
        self.pipeline.close()
        disk = self._file.parts
        for arena in (self.gathered, self.staged, self.shards, self.grads, self.buffers):
            if disk is not None and arena.slots and arena.tier is Tier.HOST:
                disk.io.unregister(arena.memory)
            arena.resize(0)

    def _register(self) -> None:
        """What the file is read into and written from."""
        disk = self._file.parts
        if disk is None:
            return
        params = self.gathered if self.read_in_place else self.shards
        for arena in (params, self.grads, self.buffers):
            if arena.slots and not disk.io.register(arena.memory):
                self._notes.extend(n for n in disk.io.notes if n not in self._notes)

    @property
    def read_in_place(self) -> bool:
        """Whether shards, being whole chunks, are read to where compute finds them."""
        return self._layout.shard.ranks == 1 and not self._separate

    def _buffer_shape(self, placement: Placement) -> tuple[UpdateKind, int, bool, bool]:
        """What of the pipeline's buffers follows from the placement."""
        return (
            self._dtypes.kind,
            self._layout.tile_numel,
            placement.trained_param_on_disk,
            Tier.DISK in placement.grad,
        )
