"""The last optimizer step: whether its old state is still there, and the way back to it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero.chunk_groups.shared import Shared
from hetero.ranks.process_groups import ProcessGroups
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.runtime.update_schedule import OptimizerView, UpdateSchedule
from hetero.state.loss_scale import LossScale
from hetero.state.managed_param import ManagedParam
from offload.errors import HeteroError


class OldState(enum.Enum):
    """Where the state from before the last step is: in the spare extents, or why it cannot be had.

    Without undoable_steps it is NEVER_KEPT, before the first step NO_STEP. A step that is made
    brings KEPT, or NO_ROOM, and what is done afterwards UNDONE to MOVED. IN_USE and OTHERS are what
    one call of undo_last_step() finds; the old state is still there then.
    """

    KEPT = "the spare extents have it, or the step has changed nothing"
    NEVER_KEPT = "its old state was not kept; give undoable_steps=True to hetero.initialize()"
    NO_STEP = "none was made since hetero.initialize()"
    NO_ROOM = (
        "its old state was not kept, because NVMe had no room for it (optimizer.engine.notes), or "
        "has parameters whose optimizer state is in RAM"
    )
    UNFINISHED = "an error has ended a step() since"
    UNDONE = "it was undone already, and of the step before nothing is kept"
    BACKWARD = "a gradient of the next step has come since; undo a step before the next backward"
    WRITTEN = "parameters or optimizer state were loaded or written to since"
    MOVED = "homes have moved since (engine.set_budget(), process_memory, added parameters)"
    IN_USE = "a parameter is in use, as in hetero.gathered() or a forward, or was moved"
    OTHERS = "another optimizer has made the last step"


@dataclass(frozen=True)
class _Record:
    """A step that was made: what it has changed, and how that was before."""

    optimizer: OptimizerView
    members: Sequence[Sequence[ManagedParam]]  # by chunk
    writes: Mapping[ManagedParam, int]  # of all parameters in these chunks
    loss_scale: LossScale


class LastStep:
    """Has the old state kept of what a step is about to change, and brings it back on request.

    With undoable_steps=True all updates leave the optimizer state that they read, in one of a
    chunk's two extents (ChunkVersions). The next speculative update needs that extent, so the old
    state is gone when the next step's first gradient comes, whether or not there is such an update.

    Attributes:
        listeners: are called when a step was made, to its end, or undone.
    """

    def __init__(
        self, params: ParamRegistry, schedule: UpdateSchedule, shared: Shared, world: ProcessGroups
    ) -> None:
        """No step was made."""
        self._params = params
        self._schedule = schedule
        self._loss_scale = shared.loss_scale
        self._world = world
        self._keeps = shared.config.undoable_steps
        self._old_state = OldState.NO_STEP if self._keeps else OldState.NEVER_KEPT
        self._record: _Record | None = None
        self.listeners: list[Callable[[], None]] = []

    def tell(self) -> None:
        """The state is that of another step now."""
        for listener in self.listeners:
            listener()

    def begin(self, optimizer: OptimizerView, members: Iterable[ManagedParam]) -> None:
        """A step is about to change `members`, which all have gradients.

        Raises NativeIoError if old state cannot be written, with nothing changed.
        """
        if not self._keeps:
            return
        self._old_state, self._record = OldState.UNFINISHED, None
        by_chunk: dict[tuple[int, int], list[ManagedParam]] = {}
        for m in members:
            by_chunk.setdefault((m.chunk.group_index, m.chunk.id), []).append(m)
        chunks = [some[0].chunk for some in by_chunk.values()]
        self._leave_nothing()
        if not all(self._params.group(c).updates.versions.keep_old_state(c) for c in chunks):
            self._leave_nothing()
            return
        beside = (m for c in chunks for m in self._params.group(c).grads.members(c))
        writes = {m: m.writes for m in beside}
        made = list(by_chunk.values())
        self._record = _Record(optimizer, made, writes, replace(self._loss_scale))

    def _leave_nothing(self) -> None:
        for chunk_group in self._params.chunk_groups:
            chunk_group.updates.versions.forget_old_state()

    def end(self) -> None:
        """The step was made."""
        if self._keeps:
            self._old_state = OldState.NO_ROOM if self._record is None else OldState.KEPT

    def forget(self, why: OldState) -> None:
        """The old state cannot be had any more, if it was kept."""
        if self._old_state is OldState.KEPT:
            self._old_state, self._record = why, None

    def undo(self, optimizer: OptimizerView) -> None:
        """Brings all that the optimizer's last step has changed back; all ranks must call it.

        Raises HeteroError, on all ranks and with nothing changed, if that is impossible on one;
        NativeIoError if old state cannot be read, after which the engine refuses further steps.
        """
        self._schedule.wait_all()
        self._params.finish_transfers("optimizer.undo_last_step()")
        states = list(OldState)
        mine = states.index(self._can_undo(optimizer))
        found = states[self._world.agree(mine, max, "optimizer.undo_last_step()")]
        if found is not OldState.KEPT:
            raise HeteroError(f"the last step cannot be undone: {found.value}")
        assert self._record is not None
        record, self._record, self._old_state = self._record, None, OldState.UNDONE
        try:
            self._bring_back(record)
        except BaseException as error:
            why = (
                f"optimizer.undo_last_step() was ended in the middle by {error!r}; close the "
                f"engine, and load the last checkpoint into another one"
            )
            for chunk_group in self._params.chunk_groups:
                chunk_group.pipeline.give_up(why)
                chunk_group.fail_waiting_ranks(why)
            raise
        self._loss_scale.restore(record.loss_scale)
        self.tell()

    def _can_undo(self, optimizer: OptimizerView) -> OldState:
        """KEPT, or why this rank cannot undo the step."""
        if self._old_state is not OldState.KEPT:
            return self._old_state
        assert self._record is not None
        if self._record.optimizer is not optimizer:
            return OldState.OTHERS
        if any(m.uses or not m.is_at_home for m in self._record.writes):
            return OldState.IN_USE
        if any(m.writes != before for m, before in self._record.writes.items()):
            return OldState.WRITTEN
        return OldState.KEPT

    def _bring_back(self, record: _Record) -> None:
        for number, chunk_group in enumerate(self._params.chunk_groups):
            made = [some for some in record.members if some[0].chunk.group_index == number]
            if made:
                with chunk_group.optim_states.lock:
                    chunk_group.memory.arenas.forget_read_ahead()
                    for members in made:
                        chunk_group.params.updates.undo(members[0].chunk, members)
                chunk_group.params.updates.gather([members[0].chunk for members in made])
