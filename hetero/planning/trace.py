"""What a training step uses, when, and how long it computes: what predictions are made from.

trace     one step's uses of chunks in order, its seconds of computing, and the memory beside the
          model state at each moment.
use       a chunk is needed by compute, in forward or in backward. Uses of one chunk in a row are
          one.
pass      a run of uses in which no chunk comes twice.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetero.chunks.layout import Layout
from offload.cache.use_order import UseOrder


class Phase(enum.Enum):
    """Parts of a step that compute with chunks; a step with several micro-batches alternates."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Use:
    """A chunk (ids count within a chunk group) is needed."""

    chunk_group: int
    chunk: int
    phase: Phase


@dataclass(frozen=True)
class Moment:
    """Bytes that are not model state when `use` uses of the step were made; RAM, and of a device
    with memory of its own."""

    use: int
    host_bytes: int
    device_bytes: int = 0


@dataclass(frozen=True)
class Trace:
    """One step; `forward_s` and `backward_s` are seconds of computing alone, of all micro-batches.

    Without micro-batches it is a forward without gradients, which is not timed.
    `expected`: nothing was measured yet.
    """

    uses: tuple[Use, ...]
    micro_batches: int
    forward_s: float
    backward_s: float
    memory: tuple[Moment, ...] = ()
    expected: bool = False

    def of_chunk_group(self, chunk_group: int, part: float = 1.0) -> Trace:
        """One chunk group's uses, and its `part` of the computing."""
        return replace(
            self,
            uses=tuple(use for use in self.uses if use.chunk_group == chunk_group),
            forward_s=self.forward_s * part,
            backward_s=self.backward_s * part,
        )

    def peak(self) -> Moment:
        """The largest bytes at any moment, of each tier by itself."""
        return Moment(
            0,
            max((m.host_bytes for m in self.memory), default=0),
            max((m.device_bytes for m in self.memory), default=0),
        )


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step.

    `tokens` of one micro-batch; `checkpointing`: backward computes forward once more.
    """

    tokens: int
    micro_batches: int = 1
    checkpointing: bool = False


def expected_trace(layouts: Sequence[Layout], work: Work, flop_per_s: float) -> Trace:
    """A trace of a step before any was made, of the chunk groups `layouts`.

    Forward uses chunks in the order of registration, backward in the reverse, with every parameter
    once. Computing takes 2 floating-point operations per parameter and token in forward and 4 in
    backward (6 if it computes forward again), at `flop_per_s`; attention's own products, which
    grow with the sequence, are left out: they are few beside these unless sequences are longer than
    some six times the width of the model.
    """
    # By the place of the first parameter in the model, over all chunk groups.
    order = sorted(
        (min(s.param.index for s in chunk.slices), chunk_group, chunk.id)
        for chunk_group, layout in enumerate(layouts)
        for chunk in layout.chunks
    )
    forward = [Use(chunk_group, chunk, Phase.FORWARD) for _, chunk_group, chunk in order]
    backward = [
        Use(chunk_group, chunk, Phase.BACKWARD) for _, chunk_group, chunk in reversed(order)
    ]
    numel = sum(layout.numel for layout in layouts)
    second = numel * work.tokens * work.micro_batches / flop_per_s
    return Trace(
        uses=tuple(forward + backward) * work.micro_batches,
        micro_batches=work.micro_batches,
        forward_s=2 * second,
        backward_s=(6 if work.checkpointing else 4) * second,
        expected=True,
    )


@dataclass
class TraceRecorder:
    """Makes a trace of the steps that are made, from what `orders` (one per chunk group) note
    anyway.

    A use costs nothing beyond what it costs without a recorder. begin() takes the length of each
    order and a look at the clock, and what `memory` takes ((host, device) bytes beside the model
    state; reading them from /proc takes some 20 us).

    `waits_s` says how many seconds compute has waited for transfers so far: they are not computing.
    """

    orders: Sequence[UseOrder]
    memory: Callable[[], tuple[int, int]] | None = None
    waits_s: Callable[[], float] = lambda: 0.0
    clock: Callable[[], float] = time.perf_counter
    _marks: list[tuple[Phase | None, tuple[int, ...], float, float]] = field(default_factory=list)
    _moments: list[Moment] = field(default_factory=list)

    def begin(self, phase: Phase | None) -> None:
        """A phase begins, and the one before it ends; None: neither, as between micro-batches."""
        counts = tuple(order.recorded for order in self.orders)
        self._marks.append((phase, counts, self.clock(), self.waits_s()))
        if self.memory is not None:
            self._moments.append(Moment(sum(counts), *self.memory()))

    @property
    def moments(self) -> int:
        """How many times a phase began since the last step's end."""
        return len(self._marks)

    def has(self, phase: Phase) -> bool:
        """Whether the phase began since the last step's end."""
        return any(mark[0] is phase for mark in self._marks)

    def reset(self) -> None:
        """Forgets what was recorded since the last step's end."""
        self._marks, self._moments = [], []

    def end_step(self) -> Trace | None:
        """The step's trace; None if nothing was begun. Call it before the orders' end_step()."""
        if not self._marks:
            return None
        self.begin(None)
        uses: list[Use] = []
        seconds = dict.fromkeys(Phase, 0.0)
        micro_batches = 0
        recordings = [order.recording() for order in self.orders]
        for before, after in zip(self._marks, self._marks[1:], strict=False):
            phase, counts, began_s, waited_s = before
            if phase is None:
                continue
            micro_batches += phase is Phase.FORWARD
            seconds[phase] += after[2] - began_s - (after[3] - waited_s)
            for chunk_group, recording in enumerate(recordings):
                chunks = (
                    recording[counts[chunk_group] : after[1][chunk_group]]
                    if chunk_group < len(counts)
                    else []
                )
                uses += [Use(chunk_group, chunk, phase) for chunk in chunks]
        trace = Trace(
            tuple(uses),
            max(1, micro_batches),
            max(0.0, seconds[Phase.FORWARD]),
            max(0.0, seconds[Phase.BACKWARD]),
            tuple(self._moments),
        )
        self.reset()
        return trace


def completed(trace: Trace, layouts: Sequence[Layout]) -> Trace:
    """`trace` with uses of chunks that never were gathered, where they are to be expected.

    A chunk that is at home where compute is leaves no use in a recording; another placement may
    have it elsewhere. It is expected between its neighbours in the model, in every pass of the recording.
    """
    known: Mapping[tuple[int, int], int] = {
        (chunk_group, chunk.id): min(s.param.index for s in chunk.slices)
        for chunk_group, layout in enumerate(layouts)
        for chunk in layout.chunks
    }
    missing = sorted(
        known.keys() - {(u.chunk_group, u.chunk) for u in trace.uses}, key=known.__getitem__
    )
    if not missing:
        return trace
    runs: list[list[Use]] = []
    for use in trace.uses:
        if not runs or runs[-1][-1].phase is not use.phase:
            runs.append([])
        runs[-1].append(use)
    if not runs:
        runs = [[], []] * trace.micro_batches
    made: list[Use] = []
    for number, run in enumerate(runs):
        phase = run[0].phase if run else (Phase.BACKWARD if number % 2 else Phase.FORWARD)
        sign = 1 if phase is Phase.FORWARD else -1
        rest = [Use(chunk_group, chunk, phase) for chunk_group, chunk in missing][::sign]
        for use in run:
            place = sign * known[use.chunk_group, use.chunk]
            while rest and sign * known[rest[0].chunk_group, rest[0].chunk] < place:
                made.append(rest.pop(0))
            made.append(use)
        made += rest
    return replace(trace, uses=tuple(made))
