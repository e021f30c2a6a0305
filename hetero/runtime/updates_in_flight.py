"""Chunks whose update has begun, until their new values can be used.

An update begins during backward (`early_updates`, early.py) or in step(); with `late_updates`
step() does not wait for it. Meanwhile the chunk's parameters have no values, and its gradient stays
where it is: who needs the values, or the gradient's place, waits here for that chunk alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hetero.chunk_groups.chunk_group import ChunkGroup
from hetero.chunk_groups.update_tasks import Groups, HyperTable
from hetero.chunks.layout import Chunk
from hetero.config import Config
from hetero.state.managed_param import ManagedParam
from offload import timeline
from offload.errors import HeteroError

Key = tuple[int, int]  # of chunk group and chunk

_NOT_USED_YET = 1 << 30  # due after all that forward has used


def key_of(chunk: Chunk) -> Key:
    """The chunk group's and the chunk's number."""
    return chunk.group_index, chunk.id


def check_late_updates(config: Config, ranks: int) -> None:
    """Raises ValueError where updates cannot go on after step()."""
    if config.late_updates and ranks > 1:
        raise ValueError(
            f"late_updates is for one rank, and there are {ranks}: others need new values "
            f"that this one does not wait for; leave it out"
        )


class Unfinished:
    """Begins updates and waits for them, chunk by chunk.

    What is `held` is not to be used before step(), and release_held() lets it go.
    """

    def __init__(self, chunk_groups: Sequence[ChunkGroup], config: Config) -> None:
        """`chunk groups` may grow. With late updates, the one that forward needs first is made
        first, but after those that begin early and hold a slot which backward waits for.
        """
        self._chunk_groups = chunk_groups
        self._enabled = config.early_updates or config.late_updates
        self._early, self._in_turn = config.early_updates, config.late_updates
        self._chunks: dict[Key, list[ManagedParam]] = {}
        self._held: set[Key] = set()
        # Of those whose gradients are in slots, first begun first.
        self._holding: list[Chunk] = []
        # When forward used chunks first, since the last step.
        self._first_use: dict[Key, int] = {}

    def connect(self, chunk_group: ChunkGroup) -> None:
        """From now on chunks of the chunk group come, too."""
        if not self._enabled:
            return
        number = self._chunk_groups.index(chunk_group)
        chunk_group.params.before_use = self._before_use
        chunk_group.params.is_changing = partial(self._is_changing, number)
        chunk_group.grads.before_change = self.finish
        chunk_group.grads.free_one = self._free_one
        if self._in_turn:
            chunk_group.stepper.next_use = self._due
            chunk_group.stepper.follow(backward=False)

    def __contains__(self, chunk: Chunk) -> bool:
        return key_of(chunk) in self._chunks

    def begin(self, chunk_group: ChunkGroup, groups: Groups, table: HyperTable, last: bool) -> None:
        """Begins to update the parameters of `groups`, all in `chunk group`, with what is in
        `table`.

        They are the `last` of the step, or step() is still to come: then they are held.
        """
        by_chunk: dict[int, list[ManagedParam]] = {}
        for _, members in groups:
            for m in members:
                by_chunk.setdefault(m.chunk.id, []).append(m)
        for members in by_chunk.values():
            self._hide(chunk_group, members[0].chunk, members)
            if not last:
                self._held.add(key_of(members[0].chunk))
        with chunk_group.optim_states.lock:
            if last:
                chunk_group.stepper.complete(groups, table)
            else:
                chunk_group.stepper.submit(groups, table)

    def _hide(self, chunk_group: ChunkGroup, chunk: Chunk, members: list[ManagedParam]) -> None:
        # Before the update, so that nobody takes new values for old.
        chunk_group.params.invalidate(chunk)
        self._chunks[key_of(chunk)] = members
        if chunk_group.grads.in_file(chunk):
            self._holding.append(chunk)
        for m in members:
            m.begin_update()

    def _before_use(self, chunk: Chunk) -> None:
        if self._in_turn:
            self._first_use.setdefault(key_of(chunk), len(self._first_use))
        self.finish(chunk)

    def finish(self, chunk: Chunk) -> None:
        """Until the chunk has its new values, unless it is held. Raises what the update met."""
        key = key_of(chunk)
        if key not in self._chunks or key in self._held:
            return
        chunk_group = self._chunk_groups[chunk.group_index]
        with timeline.span("gather"):
            chunk_group.stepper.wait_updated(chunk)
        self._free_gradient(chunk)
        params = chunk_group.params
        home = params.home(chunk) if params.is_resident(chunk) else None
        changed = [m.name for m in self._chunks[key] if m.end_update(home)]
        chunk_group.params.changed([chunk])
        del self._chunks[key]  # last, so that all of it is done again after Ctrl-C
        if changed:
            raise HeteroError(
                f"{changed[0]} was changed, moved or converted while its update was under way; "
                f"that change is lost, and the parameter has its updated value; change it inside "
                f"hetero.gathered(..., modifier_rank=0)"
            )

    def finish_all(self) -> None:
        """Until all that is not held has its new values."""
        for members in list(self._chunks.values()):
            self.finish(members[0].chunk)

    def release_held(self) -> None:
        """The step is made: what was updated before it may be used, too."""
        self._held.clear()

    def end_step(self) -> None:
        """All updates of the step have begun."""
        self.release_held()
        self._first_use.clear()

    def _is_changing(self, chunk_group: int, chunk_id: int) -> bool:
        """Whether the chunk's values would have to be waited for."""
        key = chunk_group, chunk_id
        if key not in self._chunks:
            return False
        chunk = self._chunks[key][0].chunk
        if key in self._held or not self._chunk_groups[chunk_group].stepper.is_readable(chunk):
            return True
        self.finish(chunk)
        return False

    def _due(self, chunk: Chunk) -> int:
        if self._early and self._chunk_groups[chunk.group_index].grads.in_file(chunk):
            return 0  # backward waits for the slot, forward has not begun
        return 1 + self._first_use.get(key_of(chunk), _NOT_USED_YET + chunk.id)

    def _free_one(self) -> bool:
        """Until the update that was begun first has used its gradient; False if none is left."""
        if not self._holding:
            return False
        chunk = self._holding[0]
        self._chunk_groups[chunk.group_index].stepper.wait_updated(chunk)
        self._free_gradient(chunk)
        return True

    def _free_gradient(self, chunk: Chunk) -> None:
        if chunk in self._holding:
            self._holding.remove(chunk)
            self._chunk_groups[chunk.group_index].grads.used(chunk)
