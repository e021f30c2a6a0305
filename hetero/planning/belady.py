"""Which uses of a step find their chunk in a gathered slot.

The chunk with the farthest next use is evicted.

Belady's rule: with chunks of one size no other gives fewer fetches.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from offload.cache.use_order import NEVER

PREFETCH_CHUNKS = 4  # parameters are fetched so many chunks ahead of compute


@dataclass(frozen=True)
class PlannedFetch:
    """What use number `use` of the step does not find; its room was last used by number `after`,
    -1 if it was free when the step began."""

    use: int
    after: int


def fetches(
    uses: Sequence[int], slots_of: Mapping[int, int], capacity: int, kept: Collection[int] = ()
) -> list[PlannedFetch]:
    """The fetches of a step that uses chunks as in `uses`, among many steps that are alike.

    Copies of chunks in `kept` last from step to step; those of others are stale when a step is
    over. A chunk takes slots_of[chunk] of `capacity` slots, wherever some are free.
    """
    next_use = _next_uses(uses, frozenset(kept))
    found: list[PlannedFetch] = []
    resident: dict[int, int] = {}  # chunk -> its next use
    for _ in range(2 if kept else 1):  # the second step finds what the first left
        found, left = _one_step(uses, next_use, slots_of, capacity, resident)
        resident = {c: use - len(uses) for c, use in left.items() if use != NEVER}
    return found


def rounds(
    uses: Sequence[int], slots_of: Mapping[int, int], capacity: int, kept: Collection[int] = ()
) -> Iterator[list[PlannedFetch]]:
    """The fetches of a step, as of fetches(), and then of each time that it uses chunks once more.

    Copies last from one time to the next, because nothing has changed them.
    """
    next_use = _next_uses(uses, frozenset(kept))
    resident: dict[int, int] = {}
    for _ in range(2 if kept else 1):
        found, left = _one_step(uses, next_use, slots_of, capacity, resident)
        resident = {c: use - len(uses) for c, use in left.items() if use != NEVER}
    yield found
    again = _next_uses(uses, frozenset(uses))
    first_use = {chunk: use for use, chunk in reversed(list(enumerate(uses)))}
    while True:
        found, left = _one_step(uses, again, slots_of, capacity, {c: first_use[c] for c in left})
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
    resident: Mapping[int, int],
) -> tuple[list[PlannedFetch], dict[int, int]]:
    found: list[PlannedFetch] = []
    due = dict(resident)
    last_use = dict.fromkeys(due, -1)
    # The farthest next use first, then what was used longest ago, whose room is free the soonest;
    # entries that `due` does not confirm are out of date.
    queue = [(-use, -1, chunk) for chunk, use in due.items()]
    heapq.heapify(queue)
    free = capacity - sum(slots_of[chunk] for chunk in due)
    free_after = -1
    for use, chunk in enumerate(uses):
        if chunk not in due:
            needed = slots_of[chunk]
            assert needed <= capacity, (needed, capacity)
            while free < needed:
                farthest, _, victim = heapq.heappop(queue)
                if due.get(victim) == -farthest:
                    del due[victim]
                    free += slots_of[victim]
                    free_after = max(free_after, last_use[victim])
            found.append(PlannedFetch(use, free_after))
            free -= needed
            if not free:
                free_after = -1
        due[chunk] = next_use[use]
        last_use[chunk] = use
        heapq.heappush(queue, (-next_use[use], use, chunk))
    return found, due
