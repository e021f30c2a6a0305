"""Where the chunks of one chunk group are in the optimizer step, and the waits for their updates.

Parameters, gradients, optimizer states and the server of other ranks ask here before they touch a
chunk's memory. When an update is submitted, and whether step() waits for it, is decided in
hetero/runtime/update_schedule.py.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from itertools import accumulate

import torch

from hetero.chunks.layout import Chunk, Layout
from hetero.overlap import STREAMING_BUFFERS, OverlapUpdates
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.homes import Homes
from hetero.state.memory.slot_arenas import SlotArenas
from offload._native import Location, StepPipeline
from offload.errors import HeteroError, StaleGraphError

TO_GO_ON = (
    "call optimizer.step() first; to give the step up instead, load a checkpoint with "
    "optimizer.load_state_dict(), because updates cannot be undone"
)

_NOT_USED_YET = 1 << 30  # comes after all chunks that forward has used


class UpdateState(enum.Enum):
    """Who holds a chunk's memory while a step is made.

    A chunk goes from each state to the next, and from DONE to NO_GRADS of the next step. Back from
    GRADS_FINAL to NO_GRADS if its gradients are cleared, or if another one comes.
    """

    NO_GRADS = "parameters have their values, and backward may add gradients"
    GRADS_FINAL = "parameters have their values, and backward adds no more gradients"
    SUBMITTED = "the update reads the gradient, and writes parameters and optimizer state"
    DONE = "the gradient is free, new values are at home, and param.data does not point to them yet"


class ChunkUpdates:
    """The state of each chunk of a chunk group, and waiting for its update.

    A chunk that was submitted during backward is locked until step() has submitted the rest:
    nothing may use it. Calls come from under Params' lock or from the thread that runs backward;
    wait_updated() and wait_computed() may come from any thread.
    """

    def __init__(
        self, layout: Layout, homes: Homes, arenas: SlotArenas, overlap: OverlapUpdates
    ) -> None:
        """`homes` are of PARAM, in memory; the pipeline of `arenas` makes the updates."""
        self.overlap = overlap
        self._layout = layout
        self._homes = homes
        self._arenas = arenas
        # By chunk id, the pipeline's name of its first tile.
        self._first_key = list(accumulate((chunk.slots for chunk in layout.chunks), initial=0))
        self._states: dict[int, UpdateState] = {}  # by chunk id: SUBMITTED or DONE
        self._final: dict[int, Chunk] = {}  # by chunk id: GRADS_FINAL; others are in NO_GRADS
        # By chunk id: what was submitted before step(), and must not be used before it.
        self.locked: dict[int, list[ManagedParam]] = {}
        self._first_use: dict[int, int] = {}  # by chunk id: the order of forward's first uses
        # The epoch of the arenas in which expect() was called, since the last step, or None.
        self._expects_in_epoch: int | None = None
        self.wait_s = 0.0  # for updates of chunks that were needed

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
        """The chunks in SUBMITTED and DONE but for locked ones, the first submitted first."""
        return [self._layout.chunks[c] for c in self._states if c not in self.locked]

    def set_final(self, chunk: Chunk, final: bool) -> None:
        """Between NO_GRADS and GRADS_FINAL: whether backward adds no more gradients."""
        assert not self.is_under_way(chunk)
        if final:
            self._final.setdefault(chunk.id, chunk)
        else:
            self._final.pop(chunk.id, None)

    def is_under_way(self, chunk: Chunk) -> bool:
        """Whether it was submitted, and its parameters do not have the new values yet."""
        return chunk.id in self._states

    def submit(self, chunk: Chunk, members: list[ManagedParam], lock: bool) -> None:
        """To SUBMITTED: `members` are about to be updated; with `lock` before step()."""
        assert not self.is_under_way(chunk)
        self._final.pop(chunk.id, None)
        self._states[chunk.id] = UpdateState.SUBMITTED
        if lock:
            self.locked[chunk.id] = members

    def finish(self, chunk: Chunk) -> None:
        """From DONE to NO_GRADS: the parameters have the new values."""
        assert self._states[chunk.id] is UpdateState.DONE
        del self._states[chunk.id]

    def end_step(self) -> None:
        """step() has submitted all: nothing is locked, and the next forward is another one."""
        self._final.clear()
        self.locked.clear()
        self._first_use.clear()

    # What is refused

    def require_usable(self, chunk: Chunk, name: str) -> None:
        """Raises HeteroError if the value of parameter `name` is not to be used before step()."""
        if chunk.id not in self.locked:
            return
        if torch._C._current_graph_task_id() == -1:
            raise HeteroError(
                f"{name} is used after it was updated during backward "
                f"(overlap_updates={self.overlap.value!r}), and before step(), which updates the "
                f"others; {TO_GO_ON}"
            )
        raise HeteroError(self._needed_later(name))

    def require_unchanged(self, chunk: Chunk) -> None:
        """Raises StaleGraphError if backward needs a value that its updates have overwritten."""
        if chunk.id in self.locked:
            raise StaleGraphError(self._needed_later(chunk.name))

    def _needed_later(self, name: str) -> str:
        return (
            f"backward needs the value of {name} after it was updated "
            f"(overlap_updates={self.overlap.value!r}), because it had as many gradients as in the "
            f"steps before. If this is a further backward of the same step, put all but the last "
            f"into `with hetero.no_sync(model):`; if a part of the model uses it without giving it "
            f"a gradient (detach(), torch.no_grad()), or gives it one only sometimes, leave out "
            f"overlap_updates"
        )

    # Waiting

    def wait_updated(self, chunk: Chunk) -> None:
        """From SUBMITTED to DONE: until the update is made. Raises what it met."""
        if self.state(chunk) is UpdateState.SUBMITTED:
            began_s = time.perf_counter()
            self.wait_computed(chunk)
            self.wait_s += time.perf_counter() - began_s
            if chunk.id in self._states:  # else another thread has finished it meanwhile
                self._states[chunk.id] = UpdateState.DONE

    def wait_computed(self, chunk: Chunk) -> None:
        """Until no update of the chunk is to be computed. Raises what one met. For any thread."""
        for tile in range(chunk.slots):
            self.pipeline.wait_updated(self.key(chunk, tile))

    def wait_written(self, chunk: Chunk) -> None:
        """Until the file has the chunk's new parameters. Raises what the update met."""
        for tile in range(chunk.slots):
            self.pipeline.wait_written(self.key(chunk, tile))

    def is_readable(self, chunk: Chunk) -> bool:
        """Whether its parameters can be read from their home now, without waiting."""
        if chunk.id in self.locked:
            return False
        done = self.pipeline.is_written
        if chunk in self._homes:
            done = self.pipeline.is_updated
        return all(done(self.key(chunk, tile)) for tile in range(chunk.slots))

    # The order in which updates are made

    def note_use(self, chunk: Chunk) -> None:
        """Forward is about to use the chunk."""
        if self.overlap.in_forward:
            self._first_use.setdefault(chunk.id, len(self._first_use))

    def priority(self, chunk: Chunk, backward_waits: bool) -> int:
        """When something will wait for the update: the smallest number is to be made first.

        `backward_waits`: for the slots that the chunk's gradient holds, during backward, before any
        forward. Without overlap with forward all numbers are the same.
        """
        if not self.overlap.in_forward or (self.overlap.in_backward and backward_waits):
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
