"""Training that counts which chunks are gathered before they are needed, and which only then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch.amp import GradScaler

from hetero.state.gathering.all_gather import Gathering
from offload.cache.slot_cache import SlotCache
from offload.disk.backing import FileBacking, Operation
from tests.support.ranks.rank_training import inputs, make

STEPS = 6


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

    def reading(self: Any, chunk: int, slot: int) -> Operation:
        late = getattr(needed, "chunk", None) == chunk
        (found[-1].late if late else found[-1].ahead).append(chunk)
        return read(self, chunk, slot)

    def getting(self: SlotCache, chunk: int) -> None:
        # To gather a chunk calls get() for this rank's shard of it.
        before, needed.chunk = getattr(needed, "chunk", None), chunk
        try:
            get(self, chunk)
        finally:
            needed.chunk = before

    def beginning(self: SlotCache, chunk: int, must: bool) -> bool:
        needed.chunk = chunk if must else None
        try:
            return begin(self, chunk, must)
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
