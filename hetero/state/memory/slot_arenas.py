"""The slots of a chunk group for copies and buffers, and the step pipeline over the buffers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout
from hetero.planning.placement import Placement, SlotBytes
from hetero.state.memory.scratch_space import ScratchSpace
from offload._native import Location, StepPipeline
from offload.device.backend import Backend
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier


class SlotArenas:
    """A chunk group's slots for copies and buffers: one arena per purpose, and the step pipeline.

    The arenas have slots after allocate(). Between steps, when no slot is in use, free() and
    allocate() change their sizes.

    Attributes:
        pipeline: the step pipeline over `buffers`; another one after each allocate().
        is_reading_ahead: whether the pipeline reads ahead, or has read, what the next step needs.
    """

    pipeline: StepPipeline

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        backend: Backend,
        ledger: Ledger,
        file: ScratchSpace,
        resources: ExitStack,
    ) -> None:
        """Makes arenas without slots, which `resources` close."""
        self._layout, self._dtypes = layout, dtypes
        self._slot = SlotBytes.of(layout, dtypes)
        self._separate = backend.separate
        self._file = file

        def arena(account: Account, linked: bool = True) -> HostArena:
            """`linked`: a device copies from it and to it."""
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
        # There, too: what devices gather and this rank does not keep there.
        self.unkept = backend.arena(0, self._slot.gathered, ledger, Account.GATHERED)
        resources.callback(self.unkept.close)
        self.is_reading_ahead = False
        resources.callback(self._close_pipeline)

    def _close_pipeline(self) -> None:
        if hasattr(self, "pipeline"):
            self.pipeline.close()

    def allocate(self, placement: Placement, spare_bytes: int) -> None:
        """Gives the arenas the numbers of slots that `placement` says, and makes a new pipeline.

        `spare_bytes` is RAM that no plan counts on. With several ranks as many slots for gathered
        parameters as fit there may be used while it is free. Raises BudgetError.
        """
        made, slot = placement, self._slot
        spare_slots = 0
        if self._layout.shard.ranks > 1 and made.gathered_slots and not self._separate:
            spare_slots = min(self._layout.slot_count, max(0, spare_bytes) // slot.gathered)
        self.resize_gathered(made.gathered_slots, spare_slots)
        shape = (
            self._dtypes.kind,
            self._layout.tile_numel,
            made.trained_param_on_disk,
            Tier.DISK in made.grad,
        )
        for arena, slots, nbytes in (
            (self.staged, made.staged_slots, slot.gathered),
            (self.unkept, made.unkept_slots, slot.gathered),
            (self.shards, made.shard_slots, slot.param),
            (self.grads, made.grad_slots, slot.grad),
            (self.buffers, made.buffers, StepPipeline.buffer_bytes(*shape)),
        ):
            arena.resize(slots, nbytes)
            arena.commit(0, slots)
        self._register()
        disk = self._file.parts
        self.pipeline = StepPipeline(
            # Frozen parameters alone on DISK need no buffers, and so no I/O engine.
            disk.io if disk is not None and made.buffers else None,
            disk.transfers.file if disk is not None else -1,
            self.buffers.memory if made.buffers else None,
            made.buffers,
            *shape,
        )
        self.is_reading_ahead = False

    def expect(
        self, expected: Sequence[tuple[int, Location, Location, int]], streaming: int
    ) -> None:
        """The pipeline reads ahead what updates to come will find in the file (StepPipeline)."""
        self.is_reading_ahead = bool(expected)
        self.pipeline.expect(expected, streaming)

    def forget_read_ahead(self) -> None:
        """Frees the pipeline's buffers of what they have read, or keep, for the next step.

        What the file lacks is written first.
        """
        self.pipeline.forget()
        self.is_reading_ahead = False

    def resize_gathered(self, slots: int, spare_slots: int = 0) -> None:
        """Gives `gathered` other numbers of slots; none may be in use. Raises BudgetError.

        `slots` are charged at once, `spare_slots`, beside them, while they are used.
        """
        self.gathered.resize(slots + spare_slots)
        self.gathered.commit(0, slots)

    def resize_unkept(self, slots: int) -> None:
        """Gives `unkept` another number of slots; none may be in use. Raises BudgetError."""
        self.unkept.resize(slots, self._slot.gathered)
        self.unkept.commit(0, slots)

    def free(self) -> None:
        """Frees all slots and closes the pipeline.

        No slot may be in use, and the pipeline may have nothing that the file lacks.
        """
        self._close_pipeline()
        disk = self._file.parts
        made = self.staged, self.shards, self.grads, self.buffers
        for arena in (self.gathered, self.unkept, *made):
            if disk is not None and arena.slots and arena.tier is Tier.HOST:
                disk.io.unregister(arena.memory)
            arena.resize(0)

    def _register(self) -> None:
        """Registers what is read from the file and written to it with the I/O engine."""
        disk = self._file.parts
        if disk is None:
            return
        params = self.gathered if self.read_in_place else self.shards
        for arena in (params, self.grads, self.buffers):
            if arena.slots and not disk.io.register(arena.memory):
                self._file.note(disk.io.notes)

    @property
    def read_in_place(self) -> bool:
        """Whether a shard is a whole chunk and is read from the file to where compute uses it."""
        return self._layout.shard.ranks == 1 and not self._separate
