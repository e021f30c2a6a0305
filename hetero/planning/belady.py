"""Which uses of a step find their chunk in a gathered slot.

The chunk with the farthest next use is evicted.

Belady's rule: with chunks of one size no other gives fewer fetches. But a copy that it keeps until
the last moment leaves its room only then, so the next fetch would begin right before its use. In
*ahead slots* nothing is kept: they are for what is fetched ahead of its use.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetero.chunks.layout import Layout
from offload.cache.slot_cache import NEVER

PREFETCH_CHUNKS = 4  # parameters are fetched so many chunks ahead of compute


@dataclass(frozen=True)
class PlannedFetch:
    """What use number `use` of the step does not find; its room was last used by number `after`,
    -1 if it was free when the step began."""

    use: int
    after: int


def ahead_slots(slots_of: Mapping[int, int], capacity: int) -> int:
    """So many of `capacity` slots are for what is fetched ahead: chunks of the usual size.

    There are none if all chunks have room, and what the longest chunk needs is none of them.
    """
    if not slots_of or sum(slots_of.values()) <= capacity:
        return 0
    usual = statistics.median_low(slots_of.values())
    return max(0, min(PREFETCH_CHUNKS * usual, capacity - max(slots_of.values())))


def step_fetches(uses: Sequence[int], layout: Layout, gathered_slots: int) -> list[PlannedFetch]:
    """The fetches of a step of a chunk group that uses gathered chunks as in `uses`.

    There are ahead slots for what all ranks gather together.
    """
    slots_of = {chunk.id: chunk.slots for chunk in layout.chunks}
    frozen = {chunk.id for chunk in layout.chunks if not chunk.trainable}
    ahead = 0
    if layout.shard.ranks > 1 and layout.shard.params:
        ahead = ahead_slots({chunk: slots_of[chunk] for chunk in uses}, gathered_slots)
    return next(rounds(uses, slots_of, gathered_slots, frozen, ahead)) if uses else []


def rounds(
    uses: Sequence[int],
    slots_of: Mapping[int, int],
    capacity: int,
    kept: Collection[int] = (),
    ahead: int = 0,
) -> Iterator[list[PlannedFetch]]:
    """The fetches of a step that uses chunks as in `uses`, among many steps that are alike; then of
    each time that it uses them once more.

    Copies of chunks in `kept` last from step to step; those of others are stale when a step is
    over. All last from one time in a step to the next, because nothing has changed them. A chunk
    takes slots_of[chunk] of `capacity` slots, wherever some are free; `ahead` of them are ahead
    slots.
    """
    next_use = _next_uses(uses, frozenset(kept))
    found: list[PlannedFetch] = []
    resident: dict[int, int] = {}  # chunk -> its next use
    for _ in range(2 if kept else 1):  # the second step finds what the first left
        found, left = _one_step(uses, next_use, slots_of, capacity, ahead, resident)
        resident = {c: use - len(uses) for c, use in left.items() if use != NEVER}
    yield found
    again = _next_uses(uses, frozenset(uses))
    first_use = {chunk: use for use, chunk in reversed(list(enumerate(uses)))}
    while True:
        resident = {c: first_use[c] for c in left}
        found, left = _one_step(uses, again, slots_of, capacity, ahead, resident)
        yield found


def _next_uses(uses: Sequence[int], kept: frozenset[int]) -> list[int]:
    """For each use that of the same chunk after it; in the next step for chunks in `kept`."""
    coming = {chunk: use + len(uses) for use, chunk in reversed(list(enumerate(uses)))}
    coming = {chunk: use if chunk in kept else NEVER for chunk, use in coming.items()}
    found = [0] * len(uses)
    for use in range(len(uses) - 1, -1, -1):
        found[use] = coming[uses[use]]
        coming[uses[use]] = use
    return found


def _one_step(
    uses: Sequence[int],
    next_use: Sequence[int],
    slots_of: Mapping[int, int],
    capacity: int,
    ahead: int,
    resident: Mapping[int, int],
) -> tuple[list[PlannedFetch], dict[int, int]]:
    found: list[PlannedFetch] = []
    due = dict(resident)
    last_use = dict.fromkeys(due, -1)
    # The farthest next use first, then what was used longest ago, whose room is free the soonest;
    # entries that `due` does not confirm are out of date.
    queue = [(-use, -1, chunk) for chunk, use in due.items()]
    heapq.heapify(queue)
    most = capacity - ahead  # slots that are not free once a fetch has taken its own
    taken = sum(slots_of[chunk] for chunk in due)
    # Free slots, those that were free first at the left: how many, and after which use.
    free = deque([(capacity - taken, -1)])
    for use, chunk in enumerate(uses):
        if chunk not in due:
            needed = slots_of[chunk]
            assert needed <= most, (needed, most)
            while taken + needed > most:
                farthest, _, victim = heapq.heappop(queue)
                if due.get(victim) == -farthest:
                    del due[victim]
                    taken -= slots_of[victim]
                    free.append((slots_of[victim], last_use[victim]))
            # A chunk has one copy: the one before must have been used.
            after = max(_take(free, needed), last_use.get(chunk, -1))
            found.append(PlannedFetch(use, after))
            taken += needed
        due[chunk] = next_use[use]
        last_use[chunk] = use
        heapq.heappush(queue, (-next_use[use], use, chunk))
    return found, due


def _take(free: deque[tuple[int, int]], needed: int) -> int:
    """Takes slots that were free first; returns the use after which all of them were free."""
    after = -1
    while needed:
        count, since = free.popleft()
        after = max(after, since)
        if count > needed:
            free.appendleft((count - needed, since))
        needed -= min(count, needed)
    return after
