"""Where the chunks of one chunk group are in the optimizer step, and the waits for their updates.

Parameters, gradients, optimizer states and the server of other ranks ask here before they touch a
chunk's memory. When an update is submitted, and whether step() waits for it, is decided in
hetero/runtime/update_schedule.py.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from hetero.chunks.layout import Chunk, Layout
from hetero.overlap import STREAMING_BUFFERS, OverlapUpdates
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.committed import CommittedState
from hetero.state.memory.homes import Homes
from hetero.state.memory.slot_arenas import SlotArenas
from hetero.state.memory.spare_extents import SpareExtents, TileOffsets
from hetero.state.snapshot import Snapshot
from offload._native import Hyper, Location, StepPipeline
from offload.errors import BudgetError
from offload.memory.tiers import StateKind

_NOT_USED_YET = 1 << 30  # comes after all chunks that forward has used


class UpdateState(enum.Enum):
    """Who holds a chunk's memory while a step is made.

    A chunk goes from each state to the next, and from DONE to NO_GRADS of the next step; or from
    GRADS_FINAL to SUBMITTED at once. Back to NO_GRADS from GRADS_FINAL and from SPECULATIVE, if
    gradients are cleared or changed, another one comes, or a value is used.
    """

    NO_GRADS = "parameters have their values, and backward may add gradients"
    GRADS_FINAL = "parameters have their values, and backward adds no more gradients"
    SPECULATIVE = "an update is made with a guess of what step() will say, and can be taken back"
    SUBMITTED = "the update reads the gradient, and writes parameters and optimizer state"
    DONE = "the gradient is free, new values are at home, and param.data does not point to them yet"


@dataclass(frozen=True)
class Speculation:
    """A speculative update: of which parameters, and with which hyper-parameters of each."""

    members: Sequence[ManagedParam]
    hypers: Sequence[Hyper]


class ChunkUpdates:
    """The state of each chunk of a chunk group, and waiting for its update.

    Calls come from under Params' lock or from the thread that runs backward; wait_updated(),
    wait_computed() and revoke() may come from any thread.
    """

    def __init__(
        self,
        layout: Layout,
        homes: Mapping[StateKind, Homes],
        arenas: SlotArenas,
        spare: SpareExtents,
        overlap: OverlapUpdates,
        committed: CommittedState | None = None,
    ) -> None:
        """The pipeline of `arenas` makes the updates. `committed` is of a durable state."""
        self.overlap = overlap
        self._layout = layout
        self._homes = homes[StateKind.PARAM]
        self._optim_states = homes[StateKind.OPTIM_STATE]
        self._arenas = arenas
        self._spare = spare
        # By chunk id, the pipeline's name of its first tile.
        self._first_key = list(accumulate((chunk.slots for chunk in layout.chunks), initial=0))
        self._states: dict[int, UpdateState] = {}  # by chunk id: SPECULATIVE, SUBMITTED or DONE
        self._final: dict[int, Chunk] = {}  # by chunk id: GRADS_FINAL; others are in NO_GRADS
        self._speculations: dict[int, Speculation] = {}  # by chunk id
        # Guards the step from an update that is not begun to one that is, and back.
        self._speculating = threading.RLock()
        self._readers: Counter[int] = Counter()  # by chunk id: reading()
        self._remade: set[int] = set()  # ids of chunks whose submitted update is made again
        # Chunks whose next update leaves what it reads, by id, and whether it can be undone.
        self._leaving: dict[int, bool] = {}
        self.revoked: set[int] = set()  # ids of chunks whose update was taken back in this step
        self._first_use: dict[int, int] = {}  # by chunk id: the order of forward's first uses
        # The epoch of the arenas in which expect() was called, since the last step, or None.
        self._expects_in_epoch: int | None = None
        self.wait_s = 0.0  # for updates of chunks that were needed
        self.committed = committed
        self._snapshots: list[Snapshot] = []  # of a save and a commit that go on

    # States

    def state(self, chunk: Chunk) -> UpdateState:
        """Who holds the chunk's memory."""
        before = UpdateState.GRADS_FINAL if chunk.id in self._final else UpdateState.NO_GRADS
        return self._states.get(chunk.id, before)

    @property
    def final(self) -> list[Chunk]:
        """The chunks in GRADS_FINAL, in the order in which they came to it."""
        return list(self._final.values())

    @property
    def under_way(self) -> list[Chunk]:
        """The chunks in SUBMITTED and DONE, the first submitted first."""
        return [self._layout.chunks[c] for c in list(self._states) if c not in self._speculations]

    def set_final(self, chunk: Chunk, final: bool) -> None:
        """Between NO_GRADS and GRADS_FINAL: whether backward adds no more gradients."""
        assert chunk.id not in self._states
        if final:
            self._final.setdefault(chunk.id, chunk)
        else:
            self._final.pop(chunk.id, None)

    def is_under_way(self, chunk: Chunk) -> bool:
        """Whether it is in SUBMITTED or DONE: its parameters do not have the new values yet."""
        return self.state(chunk) in (UpdateState.SUBMITTED, UpdateState.DONE)

    def submit(self, chunk: Chunk) -> None:
        """To SUBMITTED: an update that stays is about to be submitted."""
        assert chunk.id not in self._states
        self._final.pop(chunk.id, None)
        self._states[chunk.id] = UpdateState.SUBMITTED
        if self.committed is not None:
            self.committed.note_change(chunk)

    def finish(self, chunk: Chunk) -> None:
        """From DONE to NO_GRADS: the parameters have the new values."""
        assert self._states[chunk.id] is UpdateState.DONE
        del self._states[chunk.id]
        self._remade.discard(chunk.id)

    def end_step(self) -> None:
        """step() has submitted all: the next forward is another one."""
        self._final.clear()
        self.revoked.clear()
        self._first_use.clear()

    # Speculation

    @property
    def speculative(self) -> dict[int, Speculation]:
        """The speculative updates by chunk id, the first submitted first."""
        return dict(self._speculations)

    def can_speculate(self, chunk: Chunk) -> bool:
        """Whether an update of the chunk could be taken back, and is worth being made early.

        What buffers keep unwritten from step to step is not: it is updated as fast as memory. Where
        the spare extents have what the last commit has, none could.
        """
        if chunk.id in self.revoked or not self._spare.suit(chunk):
            return False
        if self.committed is not None and self.committed.has_changed(chunk):
            return False
        keys = (self.key(chunk, tile) for tile in range(chunk.slots))
        return not any(map(self.pipeline.keeps, keys)) and self._spare.reserve(chunk)

    @contextmanager
    def speculating(self, chunk: Chunk, speculation: Speculation) -> Iterator[bool]:
        """To SPECULATIVE: members are UPDATING. Inside the block, in which no other thread takes
        the update back, it is submitted; or not, if this yields False: somebody reads the chunk.
        """
        assert chunk.id not in self._states
        self._final.pop(chunk.id, None)
        with self._speculating:
            self._speculations[chunk.id] = speculation
            self._states[chunk.id] = UpdateState.SPECULATIVE
            if is_read := self._readers[chunk.id] > 0:
                self._end_speculation(chunk)
            yield not is_read

    @contextmanager
    def reading(self, chunk: Chunk) -> Iterator[None]:
        """Inside the block, in any thread, no speculative update writes to the chunk's memory: one
        that was submitted is taken back, and none begins. Raises as revoke()."""
        with self._speculating:
            self._readers[chunk.id] += 1
        try:
            self.revoke(chunk)
            yield
        finally:
            with self._speculating:
                self._readers[chunk.id] -= 1

    def offsets(self, chunk: Chunk, tile: int) -> TileOffsets:
        """What the task of the tile's update says beside where its parts are."""
        speculative = chunk.id in self._speculations
        if speculative or chunk.id in self._leaving:
            return self._spare.targets(chunk, tile, speculative or self._leaving[chunk.id])
        return self._spare.sources(chunk, tile) if chunk.id in self._remade else TileOffsets()

    def decide(self, chunk: Chunk, confirmed: bool) -> Sequence[ManagedParam]:
        """From SPECULATIVE to SUBMITTED. Returns the update's members.

        It stays if it is `confirmed`. Else it is about to be submitted once more, of the same
        members, with what the file had before the first.
        """
        with self._speculating:
            speculation = self._speculations.pop(chunk.id)
            if self.committed is not None:
                self.committed.note_change(chunk)
            if confirmed:
                self._spare.swap(chunk)
                self._leaving.pop(chunk.id, None)
            else:
                self._remade.add(chunk.id)
            self._states[chunk.id] = UpdateState.SUBMITTED
        return speculation.members

    def take_back(self, chunk: Chunk) -> bool:
        """From SPECULATIVE to NO_GRADS if the update has not begun; returns whether."""
        with self._speculating:
            if not self.pipeline.take_back(self.key(chunk, 0), chunk.slots):
                return False
            self._end_speculation(chunk)
        return True

    def revoke(self, chunk: Chunk) -> None:
        """From SPECULATIVE, if the chunk is in it, to NO_GRADS, before anybody uses its values or
        changes its gradient: parameters and optimizer state are as before the update.

        Raises what the update met, NativeIoError if old values cannot be read back.
        """
        if chunk.id not in self._speculations:
            return
        with self._speculating:
            if chunk.id not in self._speculations:
                return  # another thread has done it
            self.revoked.add(chunk.id)
            if self.take_back(chunk):
                return
            for tile in range(chunk.slots):
                self.pipeline.forget(self.key(chunk, tile))
            self._spare.restore(chunk)
            self._end_speculation(chunk)

    def _end_speculation(self, chunk: Chunk) -> None:
        home = self._homes.flat(chunk) if self._homes.is_resident(chunk) else None
        for m in self._speculations[chunk.id].members:
            m.revoke_update(home)
        del self._states[chunk.id]
        del self._speculations[chunk.id]

    def revoke_all(self) -> None:
        """revoke() of all chunks."""
        for chunk_id in self.speculative:
            self.revoke(self._layout.chunks[chunk_id])

    def free_spare_extents(self) -> None:
        """Gives the room on NVMe back that only speculative updates need; none is under way."""
        assert not self._speculations
        self._spare.free_all()

    # Old state: of the last commit, and for steps that can be undone

    def leave_committed(self, chunk: Chunk) -> None:
        """The next update of the chunk leaves what the last commit has, and waits for a commit
        that goes on. Raises BudgetError if there is no room for what it writes."""
        if self.committed is None:
            return
        self.wait_copied(chunk)
        if not self.committed.has_changed(chunk) and self.committed.is_in_file(chunk):
            self._reserve_spare(chunk)
            self._leaving.setdefault(chunk.id, False)

    def _reserve_spare(self, chunk: Chunk) -> None:
        if not self._spare.reserve(chunk):
            raise BudgetError(
                f"durable=True needs a second place on NVMe for the chunk of {chunk.name}, whose "
                f"state the last commit has, and there is no room; free space, or raise "
                f"nvme_capacity"
            )

    def begin_write(self, chunk: Chunk) -> None:
        """The chunk's state is about to be changed other than by an update.

        What the last commit has of it stays: the chunk's extents in use are others from here on,
        with the same bits. Raises as leave_committed(), and what a commit met that goes on, and
        NativeIoError.
        """
        if self.committed is None:
            return
        self.wait_copied(chunk)
        if self.committed.has_changed(chunk):
            return
        if self.committed.is_in_file(chunk):
            self._reserve_spare(chunk)
            for tile in range(chunk.slots):
                self.pipeline.forget(self.key(chunk, tile))
            self._spare.copy(chunk)
            self._spare.swap(chunk)
        self.committed.note_change(chunk)

    def keep_old_state(self, chunk: Chunk) -> bool:
        """What the next update of the chunk changes stays in the spare extents; returns whether
        there is room for it.

        Optimizer state in the file is left by the update. What is in RAM is written now, unless the
        update does that. Raises NativeIoError.
        """
        if not self._spare.can_keep(chunk) or not self._spare.reserve(chunk):
            return False
        if self._spare.suit(chunk):
            if self.committed is not None and self.committed.has_changed(chunk):
                return False  # the spare extents have the last commit's
            self._leaving[chunk.id] = True
        else:
            self._spare.save(chunk)
        return True

    def leaves_old_state(self, chunk: Chunk) -> bool:
        """Whether the chunk's update, which is submitted by step(), must leave what it reads."""
        return chunk.id in self._leaving

    def note_submitted(self) -> None:
        """The step's last updates are submitted: what they leave is not in use any more."""
        for chunk_id in self._leaving:
            self._spare.swap(self._layout.chunks[chunk_id])
        self.forget_old_state()

    def forget_old_state(self) -> None:
        """The next updates need not leave anything."""
        self._leaving.clear()

    def bring_old_state(self, chunk: Chunk) -> None:
        """What the chunk's last update has changed is again as it was before; it is finished, and
        buffers keep nothing of it. Raises NativeIoError."""
        self._spare.swap(chunk)
        self._spare.restore(chunk)
        if self.committed is not None:
            self.committed.note_undone(chunk)

    # Waiting

    def goes_on(self, chunk: Chunk) -> bool:
        """Whether step() returns while the chunk's update goes on.

        By default not where both parameters and optimizer state are in memory that compute uses:
        there an update is as fast as memory, and would only share it with forward.
        """
        if self.overlap is OverlapUpdates.AUTO:
            return not (self._homes.is_resident(chunk) and chunk in self._optim_states)
        return self.overlap.in_forward

    def wait_updated(self, chunk: Chunk) -> None:
        """From SUBMITTED to DONE: until the update is made. Raises what it met."""
        if self.state(chunk) is UpdateState.SUBMITTED:
            with self._waiting():
                self.wait_computed(chunk)
            if chunk.id in self._states:  # else another thread has finished it meanwhile
                self._states[chunk.id] = UpdateState.DONE

    def wait_all_computed(self) -> None:
        """wait_computed() of all chunks, in one call of native code."""
        with self._waiting():
            self.pipeline.wait_updated()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.wait_s += time.perf_counter() - began_s

    def wait_computed(self, chunk: Chunk) -> None:
        """Until no update of the chunk is to be computed. Raises what one met. For any thread."""
        for tile in range(chunk.slots):
            self.pipeline.wait_updated(self.key(chunk, tile))

    def is_computed(self, chunk: Chunk) -> bool:
        """Whether wait_computed() would return, or raise, at once."""
        return all(self.pipeline.is_updated(self.key(chunk, tile)) for tile in range(chunk.slots))

    def wait_written(self, chunk: Chunk) -> None:
        """Until the file has the chunk's new parameters. Raises what the update met."""
        for tile in range(chunk.slots):
            self.pipeline.wait_written(self.key(chunk, tile))

    def is_readable(self, chunk: Chunk) -> bool:
        """Whether its parameters can be read from their home now, without waiting."""
        if chunk.id in self._speculations:
            return False
        if chunk in self._homes:
            return self.is_computed(chunk)
        return all(self.pipeline.is_written(self.key(chunk, tile)) for tile in range(chunk.slots))

    def freeze(self, snapshot: Snapshot) -> None:
        """From here on changes of chunks wait for `snapshot`, until it ends."""
        self._snapshots = [each for each in self._snapshots if not each.has_ended]
        self._snapshots.append(snapshot)

    def wait_copied(self, chunk: Chunk) -> None:
        """Until no save or commit has to copy the chunk's state as it is now.

        Raises what a commit has met.
        """
        if self._snapshots:
            with self._waiting():
                for snapshot in self._snapshots:
                    snapshot.wait(chunk)

    def wait_all_copied(self) -> None:
        """wait_copied() of all chunks."""
        for snapshot in self._snapshots:
            snapshot.wait_all()

    def may_change(self, chunk: Chunk) -> bool:
        """Whether wait_copied() would return at once."""
        return all(snapshot.may_change(chunk) for snapshot in self._snapshots)

    # The order in which updates are made

    def note_use(self, chunk: Chunk) -> None:
        """Forward is about to use the chunk."""
        if self.overlap.in_forward:
            self._first_use.setdefault(chunk.id, len(self._first_use))

    def priority(self, chunk: Chunk, backward_waits: bool) -> int:
        """When something will wait for the update: the smallest number is to be made first.

        `backward_waits`: for the slots that the chunk's gradient holds, during backward, before any
        forward. Those for which step() waits have all the same number.
        """
        if not self.goes_on(chunk) or backward_waits:
            return 0
        return 1 + self._first_use.get(chunk.id, _NOT_USED_YET + chunk.id)

    # The pipeline

    def key(self, chunk: Chunk, tile: int) -> int:
        """The pipeline's name of a tile."""
        return self._first_key[chunk.id] + tile

    @property
    def pipeline(self) -> StepPipeline:
        """What makes the updates."""
        return self._arenas.pipeline

    @property
    def is_expecting(self) -> bool:
        """Whether the pipeline reads something ahead of its update, since expect()."""
        return self._expects_in_epoch == self._arenas.read_ahead_epoch

    def expect(self, expected: Sequence[tuple[int, Location, Location, int]]) -> None:
        """The pipeline reads ahead what updates to come will find in the file (StepPipeline)."""
        self._expects_in_epoch = self._arenas.read_ahead_epoch if expected else None
        self.pipeline.expect(expected, STREAMING_BUFFERS if self.overlap.repeats else 0)

    def expect_nothing(self) -> None:
        """Nothing more is read ahead."""
        if self.is_expecting:
            self.expect([])
