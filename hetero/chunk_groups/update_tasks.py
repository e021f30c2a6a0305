"""The updates of a chunk group's parameters as tasks of its step pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetero.chunks.layout import Chunk, Layout
from hetero.state.chunk_updates import ChunkUpdates
from hetero.state.grads import Grads
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.homes import Homes
from hetero.state.optimizer_state import parts_of
from offload._native import Hyper, StepTask
from offload.device.updater import DeviceTask, Updater
from offload.memory.tiers import StateKind

# From a param group's options, the update's number and the factor of gradients.
HyperOf = Callable[[dict[str, Any], int, float], Hyper]
# By index of the param group, number of the update, and factor of gradients.
HyperTable = Mapping[tuple[int, int, float], Hyper]
Groups = Sequence[tuple[dict[str, Any], list[ManagedParam]]]
Tile = tuple[int, int]  # id of the chunk, number of the tile in its shard


class Segment(NamedTuple):
    """Neighbouring elements of a tile that are updated with the same hyper-parameters."""

    begin: int  # first element in the tile
    numel: int
    hyper: int  # index of the hyper-parameters
    number: int  # of the first element, among all elements of the model


@dataclass(frozen=True)
class Update:
    """Parameters that are updated together, and the tasks that do so; nothing has begun."""

    members: Sequence[list[ManagedParam]]  # by chunk
    hypers: Sequence[Hyper]
    tiles: Sequence[Tile]  # that the pipeline updates, in this order,
    tasks: Sequence[StepTask]  # with these tasks
    device_tasks: Sequence[DeviceTask]


def hyper_table(groups: Groups, hyper_of: HyperOf) -> HyperTable:
    """All hyper-parameters that an update of `groups` takes.

    Raises ValueError for those that make no sense, with the number of the param group.
    """
    made: dict[tuple[int, int, float], Hyper] = {}
    for index, (options, members) in enumerate(groups):
        for step, factor in {(m.step + 1, m.grad_factor) for m in members}:
            try:
                made[index, step, factor] = hyper_of(options, step, factor)
            except ValueError as error:
                raise ValueError(f"in param group {index} {error}") from error
    return made


class UpdateTasks:
    """Makes the tasks of updates, in the order in which tiles are to be updated, and submits them.

    The order, by `overlap_updates`:
        none: the layout's, reversed from step to step (zig-zag). What the last step left in the
            buffers is what this one needs first.
        backward: the layout's reversed, in each step, also of what backward leaves to step().
        forward, both: that in which forward will wait for chunks (ChunkUpdates.priority).
    """

    def __init__(
        self,
        layout: Layout,
        homes: Mapping[StateKind, Homes],
        grads: Grads,
        updates: ChunkUpdates,
        first_number: Mapping[int, int],
        updater: Updater | None = None,
    ) -> None:
        """`first_number` is, by a parameter's index, that of its first element in the model.

        So random bits are the same for every chunk size. `updater` is there if the pipeline cannot
        update what is at home on DEVICE.
        """
        self._layout = layout
        self._params, self._optim_states = homes[StateKind.PARAM], homes[StateKind.OPTIM_STATE]
        self._grad_homes, self._grads = homes[StateKind.GRAD], grads
        self._updates = updates
        self._updater = updater
        self._first_number = first_number
        self._ascending = not updates.overlap.in_backward  # whether tiles go in the layout's order
        # Tiles that were updated in this step, and in the last step that updated any.
        self._updated: list[Tile] = []
        trained = [chunk for chunk in layout.chunks if chunk.trainable]
        self._last = [(chunk.id, tile) for chunk in trained for tile in range(chunk.slots)]
        self._last.sort(reverse=not self._ascending)

    def read_ahead(self) -> None:
        """Has the pipeline read what the step's first updates need, as far as buffers are free.

        As many tiles as there are buffers, in the order of the last step; none that buffers keep
        from it, and none twice, however often this is called. If the step does not come, or is
        another one, what was read stays until its buffer is needed. Gradients are not read: more
        may be added to them.
        """
        if self._updates.is_expecting:
            return
        order = self._last
        if not self._updates.overlap.repeats:
            order = sorted(order, reverse=not self._ascending)
        chunks = self._layout.chunks
        self._updates.expect(
            [
                (
                    self._updates.key(chunks[c], tile),
                    self._params.location(chunks[c], tile),
                    self._optim_states.location(chunks[c], tile),
                    self.priority(chunks[c]),
                )
                for c, tile in order
                if chunks[c] not in self._params or chunks[c] not in self._optim_states
            ]
        )

    def prepare(self, groups: Groups, table: HyperTable) -> Update:
        """What updates the parameters in `groups`, with what is in `table`. Changes nothing.

        Slots that hold their gradients stay until the update is made (Grads.release_used()). Raises
        HeteroError for a gradient that was lost on its way from the device.
        """
        index_of = {key: index for index, key in enumerate(table)}
        segments: dict[Tile, list[Segment]] = {}
        by_chunk: dict[int, list[ManagedParam]] = {}
        for index, (_, members) in enumerate(groups):
            for managed in members:
                by_chunk.setdefault(managed.chunk.id, []).append(managed)
                hyper = index_of[index, managed.step + 1, managed.grad_factor]
                first_number = self._first_number[managed.slice.param.index]
                for part in parts_of(managed, self._layout):
                    number = first_number + part.in_param.start
                    segment = Segment(part.in_tile.start, part.numel, hyper, number)
                    segments.setdefault((managed.chunk.id, part.tile), []).append(segment)
        chunks = self._layout.chunks
        order = sorted(segments, reverse=not self._ascending)
        order.sort(key=lambda tile: self.priority(chunks[tile[0]]))
        tiles: list[Tile] = []
        tasks: list[StepTask] = []
        device_tasks: list[DeviceTask] = []
        for c, tile in order:
            chunk, merged = chunks[c], _merged(sorted(segments[c, tile]))
            if self._updater is not None and self._params.on_device(chunk):
                homes = (self._params, self._grad_homes, self._optim_states)
                param, grad, optim_state = (home.address(chunk, tile) for home in homes)
                device_tasks.append(DeviceTask(param, grad, optim_state, merged))
            else:
                tiles.append((c, tile))
                tasks.append(self._task(chunk, tile, merged))
        return Update(list(by_chunk.values()), list(table.values()), tiles, tasks, device_tasks)

    def submit(self, update: Update, last: bool) -> None:
        """Begins an update, the `last` of the step or one before. Memory that it uses must stay.

        Raises the failure of an update before.
        """
        if last:
            self._updates.expect_nothing()  # all that comes is here
        if self._updater is not None:
            self._updater.update(update.device_tasks, update.hypers)
        self._updates.pipeline.submit(update.tasks, update.hypers)
        self._updated += update.tiles
        for members in update.members:
            for managed in members:
                managed.step += 1
        if last:
            self._end_step()

    def _end_step(self) -> None:
        if self._updated:
            self._last, self._updated = self._updated, []
        if not self._updates.overlap.repeats:
            self._ascending = not self._ascending
        if self._updates.overlap.in_forward:
            # The next step's is read as soon as nothing waits, in forward's last part.
            with suppress(RuntimeError, OSError):  # a failed pipeline says so to who waits for it
                self.read_ahead()

    def stop(self) -> None:
        """Waits for the updates that were submitted; there will be no last one of their step."""
        self._updates.expect_nothing()
        self._updates.pipeline.wait_updated()
        self._updated.clear()

    def priority(self, chunk: Chunk) -> int:
        """When something will wait for the chunk's update (ChunkUpdates.priority)."""
        return self._updates.priority(chunk, chunk not in self._grad_homes)

    def _task(self, chunk: Chunk, tile: int, segments: list[Segment]) -> StepTask:
        return StepTask(
            self._updates.key(chunk, tile),
            self._params.location(chunk, tile),
            self._grads.location(chunk, tile),
            self._optim_states.location(chunk, tile),
            segments,
            self.priority(chunk),
        )


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """Neighbours with the same hyper-parameters as one: fewer, longer runs for the kernel."""
    merged: list[Segment] = []
    for segment in segments:
        if merged:
            last = merged[-1]
            follows = (last.begin + last.numel, last.hyper, last.number + last.numel)
            if follows == (segment.begin, segment.hyper, segment.number):
                merged[-1] = last._replace(numel=last.numel + segment.numel)
                continue
        merged.append(segment)
    return merged
