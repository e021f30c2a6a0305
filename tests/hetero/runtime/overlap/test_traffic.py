"""Bytes that a step of speculative updates reads and writes, by formula and to the byte.

Of a tile let S be the bytes of its optimizer state, P of its parameters and G of its gradient; for
bf16 these are 10, 2 and 2 an element. In a step that finds nothing in buffers
(`read`, `written` of each tile):

    parameters and gradients in RAM         read            written
    not speculative                         S               S
    the guess was right                     S               S + P: the old parameters, too
    taken back before it began              S               S
    begun, and taken back: it was wrong,
    or for a use                            S + P + S       (S + P) + S

    parameters in the file                  read            written
    not speculative, right, or taken back
    before it began                         S + P           S + P
    wrong, and begun before step()          2 (S + P)       2 (S + P)

The old parameters that are read, P, are not read by an update, and not counted with what these
move. Beside that gradients in the file are read, G, by each update that finds them in no slot. What
has begun at step() is a matter of timing, so the tests wait for all updates, or hold the first one:
then it has begun, and so have those whose reads are made ahead of it, one for each two buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn

from hetero.chunk_groups.update_tasks import Update
from hetero.chunks.layout import Chunk
from hetero.state.grads import Grads
from offload._native import Location
from offload.memory.tiers import Tier
from tests.support.training.overlap_net import Begun, Net, build, loss_of, one_step
from tests.support.waiting import until

LATE, RIGHT, WRONG = "late", "right", "wrong"


@dataclass(frozen=True)
class Moved:
    """Bytes of one tile, or of all."""

    read: int
    written: int

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.read + other.read, self.written + other.written)

    def __mul__(self, count: int) -> Moved:
        return Moved(self.read * count, self.written * count)


class Steps:
    """A training whose steps find nothing in buffers, and the bytes that each moves."""

    def __init__(self, path: Path, place: str) -> None:
        """Two steps are made: the second is the first one that speculates."""
        self.model, self.optimizer = build(
            lambda: Net(tied=False),
            path,
            place,
            "backward",
            debug={"prefetch": False},  # what is read ahead may be read in vain
        )
        self.engine = self.optimizer.engine
        (self.chunk_group,) = self.engine.chunk_groups
        self.pipeline = self.chunk_group.pipeline
        chunks = self.engine.layout.chunks
        assert all(chunk.trainable for chunk in chunks)
        self.tiles = sum(chunk.slots for chunk in chunks)
        self.in_file = {
            chunk.id for chunk in chunks if self.engine.placement.param[chunk.id] is Tier.DISK
        }
        self.begun = Begun(self.optimizer)
        for step in range(2):
            one_step(self.model, self.optimizer, step)
        self.pipeline.forget()
        self.before = self.moved

    @property
    def moved(self) -> Moved:
        """By updates, since the beginning."""
        stats = self.pipeline.stats
        return Moved(int(stats["read_bytes"]), int(stats["written_bytes"]))

    def backward(self) -> None:
        """All of its chunks are submitted for an update."""
        loss_of(self.model, 2).backward()
        assert self.begun.now == self.begun.chunks

    def step(self, wrong: bool = False) -> Moved:
        """What this step has moved until nothing more is to be written."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3 if wrong else 1e6)
        self.optimizer.step()
        self.pipeline.forget()
        moved = self.moved
        return Moved(moved.read - self.before.read, moved.written - self.before.written)

    def hold_until_submitted(self) -> None:
        """The next update waits until step() has compared and submitted all."""
        self.pipeline.hold(0)
        tasks = self.chunk_group.update_tasks
        submit = tasks.submit

        def watched(update: Update, last: bool) -> None:
            submit(update, last)
            if last:
                self.pipeline.release()

        tasks.submit = watched  # type: ignore[method-assign]

    def per_tile(self, kind: str, in_file: bool = False) -> Moved:
        """The formula above, but for G."""
        numel = self.engine.layout.tile_numel
        dtypes = self.chunk_group.dtypes
        state, param = dtypes.optim_state_bytes(numel), numel * dtypes.param_bytes
        assert (state, param) == (10 * numel, 2 * numel)
        if in_file:
            return Moved(state + param, state + param) * (2 if kind == WRONG else 1)
        return {
            LATE: Moved(state, state),
            RIGHT: Moved(state, state + param),
            WRONG: Moved(state + state, state + param + state),
        }[kind]


class GradReads:
    """Counts the bytes of gradients that updates read in the file, and not in slots."""

    def __init__(self, grads: Grads, tile_bytes: int) -> None:
        """Counts from now on."""
        self.nbytes = 0
        locate = grads.locations

        def watched(chunk: Chunk, speculative: bool = False) -> list[Location]:
            if chunk not in grads.homes and not grads.slots.cache.holds(chunk.id):
                self.nbytes += chunk.slots * tile_bytes
            return locate(chunk, speculative)

        grads.locations = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("wrong", [False, True])
def test_all_have_begun_with_parameters_in_the_file(tmp_path: Path, wrong: bool) -> None:
    """Of some chunks they are in RAM. Gradients are in the file, or still in a slot."""
    steps = Steps(tmp_path, "disk")
    assert 0 < len(steps.in_file) < steps.tiles
    numel = steps.engine.layout.tile_numel
    grads = GradReads(steps.chunk_group.grads, numel * steps.chunk_group.dtypes.grad_bytes)
    steps.backward()
    steps.pipeline.wait_updated()
    kind = WRONG if wrong else RIGHT
    found = steps.step(wrong)
    expected = steps.per_tile(kind, in_file=True) * len(steps.in_file)
    expected += steps.per_tile(kind) * (steps.tiles - len(steps.in_file))
    assert (grads.nbytes > 0) == wrong
    assert found == expected + Moved(grads.nbytes, 0)
    steps.engine.close()


def test_all_but_the_first_are_taken_back(tmp_path: Path) -> None:
    """Those cost what they cost without speculation."""
    steps = Steps(tmp_path, "optim_states")
    steps.hold_until_submitted()
    steps.backward()
    begun = 1 + steps.engine.placement.buffers // 2
    late = steps.per_tile(LATE)
    until(lambda: steps.moved.read == steps.before.read + begun * late.read)
    assert begun < steps.tiles
    assert steps.step() == steps.per_tile(RIGHT) * begun + late * (steps.tiles - begun)
    steps.engine.close()


def test_all_are_taken_back_for_a_use(tmp_path: Path) -> None:
    """The old parameters are read by whoever uses them, who is no update."""
    steps = Steps(tmp_path, "optim_states")
    steps.backward()
    steps.pipeline.wait_written()
    numel, before = steps.engine.layout.tile_numel, steps.engine.traffic
    assert all(p.isfinite().all() for p in steps.model.parameters())
    assert steps.begun.now == 0
    assert steps.engine.traffic.disk_read - before.disk_read == 2 * numel * steps.tiles
    assert steps.engine.traffic.disk_write == before.disk_write
    guess, late = steps.per_tile(RIGHT), steps.per_tile(LATE)
    assert steps.step() == (guess + late) * steps.tiles
    steps.backward()  # of the next step, in which they are updated early again
    steps.engine.close()
