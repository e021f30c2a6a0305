"""What is gathered before it is needed, from other ranks and from the file. Counts, not times.

A step drops every gathered copy, and prefetch goes on from a use: so the first chunk of a step is
late, and no other one, if there is a slot besides that of the chunk in use. Forward uses the chunks
in turn and backward in reverse, beginning with what forward left in the slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.amp import GradScaler

from hetero.state.gathering.all_gather import Gathering
from offload.cache.slot_cache import FileBacking, SlotCache
from offload.memory.operation import Operation
from tests.support.ranks.processes import RankPool
from tests.support.ranks.rank_training import inputs, make

STEPS = 5


@dataclass
class Gathers:
    """The chunks that one step gathered, in the order in which their requests were posted."""

    ahead: list[int] = field(default_factory=list)  # nobody waited for them yet
    late: list[int] = field(default_factory=list)  # by SlotCache.get(), which then waits


@dataclass
class Counts:
    """What a training run gave."""

    steps: list[Gathers]
    chunks: int  # whose parameters are gathered
    slots: int  # for gathered copies


@contextmanager
def counted(backing: type[Gathering] | type[FileBacking]) -> Iterator[list[Gathers]]:
    """Counts what `backing` reads to the last of the Gathers, to which the block may append."""
    read, get, begin = backing.read, SlotCache.get, SlotCache.begin
    found = [Gathers()]
    needed = threading.local()  # the chunk that get() is called for

    def note(chunk: int) -> None:
        late = getattr(needed, "chunk", None) == chunk
        (found[-1].late if late else found[-1].ahead).append(chunk)

    def reading(self: Any, chunk: int, slot: int) -> Operation:
        note(chunk)
        return read(self, chunk, slot)

    def getting(self: SlotCache, chunk: int) -> None:
        # To gather a chunk calls get() for this rank's shard of it.
        before, needed.chunk = getattr(needed, "chunk", None), chunk
        try:
            get(self, chunk)
        finally:
            needed.chunk = before

    def beginning(
        self: SlotCache,
        chunk: int,
        must: bool,
        by_all: Callable[[int, Callable[[], Operation]], Operation] | None = None,
    ) -> bool:
        def reading_by_all(chunk: int, by_backing: Callable[[], Operation]) -> Operation:
            assert by_all is not None
            note(chunk)
            return by_all(chunk, by_backing)

        needed.chunk = chunk if must else None
        try:
            return begin(self, chunk, must, by_all and reading_by_all)
        finally:
            needed.chunk = None

    with (
        patch.object(backing, "read", reading),
        patch.object(SlotCache, "get", getting),
        patch.object(SlotCache, "begin", beginning),
    ):
        yield found


def train(rank: int, world: int, options: dict[str, Any], skipped: tuple[int, ...] = ()) -> Counts:
    """Trains Layers, a chunk each; of the steps in `skipped` a GradScaler makes no update."""
    model, optimizer = make("layers", {"chunk_numel": 16384} | options)
    engine = optimizer.engine
    scaler = GradScaler("cpu", init_scale=2.0**8, enabled=bool(skipped))
    with counted(Gathering if world > 1 else FileBacking) as found:
        for step in range(STEPS):
            # Inputs that need gradients, so that backward uses the first layer's weight, too.
            loss = model(inputs(rank, step, 128).requires_grad_()).square().mean()
            scaler.scale(loss * float("inf") if step in skipped else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            engine.synchronize()  # what is still being written is not read ahead
            found.append(Gathers())
    assert scaler.get_scale() == (2.0 ** (8 - len(skipped)) if skipped else 1.0)
    counts = Counts(
        found[:-1],
        sum(not engine.params.is_resident(chunk) for chunk in engine.layout.chunks),
        engine.placement.gathered_slots,
    )
    engine.close()
    return counts


# Budgets that leave so many slots.
HOST_MEMORY = {
    "ranks": {1: "1728KiB", 2: "1900KiB", 3: "64MiB"},
    "file": {1: "400KiB", 2: "800KiB"},
}
PLACES = [(where, slots) for where, budgets in HOST_MEMORY.items() for slots in budgets]


def counts(
    where: str, slots: int, request: pytest.FixtureRequest, path: Path, *skipped: int, **debug: Any
) -> list[Counts]:
    """Of every rank."""
    options: dict[str, Any] = {
        "host_memory": HOST_MEMORY[where][slots],
        "debug": {"overlap_updates": "none", **debug},
    }
    if where == "ranks":
        pool: RankPool = request.getfixturevalue("ranks2")
        found = pool.run(train, {"zero_stage": 3, **options}, skipped)
    else:
        options |= {"placement_policy": "nvme", "nvme_path": str(path)}
        found = [train(0, 1, options, skipped)]
    assert all(one.slots == slots and one.chunks > 2 * slots for one in found)
    return found


@pytest.mark.parametrize(("where", "slots"), PLACES)
def test_all_but_the_first_chunk_of_a_step_are_asked_for_before_they_are_needed(
    where: str, slots: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for found in counts(where, slots, request, tmp_path):
        first, *others = found.steps
        if where == "file":
            assert not first.ahead, "nothing is known of the first step"
        else:  # ranks gather in the order of registration
            assert len(first.late) + len(first.ahead) == 2 * found.chunks - slots
        for step in others:
            assert len(step.late) + len(step.ahead) == 2 * found.chunks - slots
            assert not step.ahead if slots == 1 else len(step.late) == 1


@pytest.mark.parametrize("where", HOST_MEMORY)
def test_without_prefetch_nothing_is_asked_for_before_it_is_needed(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for found in counts(where, 2, request, tmp_path, prefetch=False):
        for step in found.steps:
            assert not step.ahead
            assert step is found.steps[0] or len(step.late) == 2 * found.chunks - 2


@pytest.mark.parametrize("skipped", [(0, 1), (2, 3)])
@pytest.mark.parametrize("where", HOST_MEMORY)
def test_a_step_that_a_grad_scaler_skips_is_learned_like_others(
    where: str, skipped: tuple[int, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """What it leaves is not dropped, so the next step has its first chunks."""
    for found in counts(where, 2, request, tmp_path, *skipped):
        for number, step in enumerate(found.steps[1:], start=1):
            left = 2 if number - 1 in skipped else 0
            assert len(step.late) == (0 if left else 1), number
            assert len(step.ahead) + len(step.late) == 2 * found.chunks - 2 - left, number


def test_prefetch_does_not_wait_for_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A use waits for its own chunk's write, and leaves out what cannot be read yet."""
    model, optimizer = make(
        "layers",
        {
            "chunk_numel": 16384,
            "placement_policy": "nvme",
            "nvme_path": str(tmp_path),
            "host_memory": HOST_MEMORY["file"][2],
        },
    )
    engine = optimizer.engine
    assert engine.placement.gathered_slots == 2
    for step in range(2):  # the order of uses is known then
        model(inputs(0, step, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    used = [(layer, engine.find(layer.weight).chunk) for layer in model.layers]
    used = [(layer, chunk) for layer, chunk in used if not engine.params.is_resident(chunk)]
    (first, its), *others = used
    updates = engine.chunk_groups[0].updates
    is_readable, wait_written = updates.is_readable, updates.wait_written
    for _, chunk in used:
        wait_written(chunk.id)
    # As if the writes of all others went on until the test ends that.
    held = {chunk.id for _, chunk in others}

    def wait(chunk: int) -> None:
        assert chunk not in held, "compute waits for a write of what it does not use now"
        wait_written(chunk)

    monkeypatch.setattr(updates, "is_readable", lambda c: c.id not in held and is_readable(c))
    backing = engine.chunk_groups[0].params.copies.cache._backing
    monkeypatch.setattr(backing, "_before_read", wait)
    x = inputs(0, 2, 128)
    with counted(FileBacking) as found, torch.no_grad():
        first(x)
        assert (found[-1].late, found[-1].ahead) == ([its.id], [])
        held.clear()
        others[0][0](x)
        assert len(found[-1].ahead) == 1
    engine.close()
