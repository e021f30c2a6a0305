"""One optimizer step: which tiles are updated, in what order, with what hyper-parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hetero.chunks.layout import Chunk, Layout
from hetero.planning.placement import STREAMING_BUFFERS
from hetero.state.grads import Grads
from hetero.state.homes import Homes
from hetero.state.managed_param import ManagedParam
from hetero.state.optimizer_state import OptimStates, parts_of
from offload._native import Hyper, Location, StepPipeline, StepTask
from offload.device.backend import DeviceTask, Updater
from offload.disk.backing import Extent

# First element in the tile, numel, index of the hyper-parameters, number of the first element.
Segment = tuple[int, int, int, int]
# From a param group's options, the update's number and the factor of gradients.
HyperOf = Callable[[dict[str, Any], int, float], Hyper]


# By index of the group, number of the update, and factor.
HyperTable = Mapping[tuple[int, int, float], Hyper]
Groups = Sequence[tuple[dict[str, Any], list[ManagedParam]]]


def hyper_table(groups: Groups, hyper_of: HyperOf) -> HyperTable:
    """All hyper-parameters that an update of `groups` takes.

    Raises ValueError, as `hyper_of` does, for those that make no sense.
    """
    made: dict[tuple[int, int, float], Hyper] = {}
    for index, (options, members) in enumerate(groups):
        for step, factor in {(m.step + 1, m.grad_factor) for m in members}:
            made[index, step, factor] = hyper_of(options, step, factor)
    return made


class Stepper:
    """Turns the parameters that have gradients into the pipeline's tasks.

    The order of tiles alternates from step to step (zig-zag): what the last step left in the
    buffers is what this one needs first. With early updates backward gives the order, the same in
    every step; what it leaves to step() goes in the order in which backward would have come to it.
    With late updates, after step() and among those that wait before it, the order is that in which
    chunks are `due`: forward's.
    """

    def __init__(
        self,
        layout: Layout,
        param_bytes: int,
        param_homes: Homes,
        param_extents: dict[int, Extent],
        grads: Grads,
        optim_states: OptimStates,
        pipeline: StepPipeline,
        first_number: Mapping[int, int],
        updater: Updater | None = None,
    ) -> None:
        """`first_number` is, by a parameter's index, that of its first element in the model.

        So random bits are the same for every chunk size. `updater` is there if the pipeline cannot
        update what is at home on DEVICE.
        """
        self._layout = layout
        self._tile_bytes = layout.tile_numel * param_bytes
        self._param_homes = param_homes
        self._param_extents = param_extents
        self._grads = grads
        self._optim_states = optim_states
        self._pipeline = pipeline
        self._updater = updater
        self._first_key: dict[int, int] = {}
        key = 0
        for chunk in layout.chunks:
            self._first_key[chunk.id] = key
            key += chunk.slots
        self._repeats = False  # the same order in every step
        self._forward = True
        # When a chunk's new values, or its gradient's slot, are needed, if that gives the order.
        self.next_use: Callable[[Chunk], int] | None = None
        self.wait_s = 0.0  # for the update of a chunk that was needed
        self._first_number = first_number
        self._expecting = False  # since the last step
        optim_states.after_forget = self.note_forgotten
        # Tiles, by chunk's id and number: updated in this step, and in the last that updated any.
        self._updated: list[tuple[int, int]] = []
        self._last = [
            (chunk.id, tile)
            for chunk in layout.chunks
            if chunk.trainable
            for tile in range(chunk.slots)
        ]

    def follow(self, backward: bool) -> None:
        """From now on the order is that of backward, or of the next forward, in every step."""
        self._repeats, self._forward = True, not backward
        self._last.sort(reverse=backward)

    def read_ahead(self) -> None:
        """What step() needs first comes into the pipeline's buffers, as far as they are free.

        For while backward runs. As many tiles as there are buffers, those of the last step;
        nothing that buffers keep from it, and nothing twice, however often this is called. If the
        step does not come, or is another, what was read stays until its buffer is needed.
        """
        if self._expecting:
            return
        self._expecting = True
        order = self._last if self._repeats else sorted(self._last, reverse=not self._forward)
        chunks = self._layout.chunks
        self._pipeline.expect(
            [
                (
                    self._first_key[c] + tile,
                    self._param_location(chunks[c], tile),
                    self._optim_states.location(chunks[c], tile),
                    self._due(chunks[c]),
                )
                for c, tile in order
                if chunks[c] not in self._param_homes or self._optim_states.in_file(chunks[c])
            ],
            STREAMING_BUFFERS if self._repeats else 0,
        )

    def run(self, groups: Groups, table: HyperTable) -> None:
        """Updates all given parameters with their groups' hyper-parameters.

        Returns when parameters in RAM are final, those of earlier submit() calls too; optimizer
        states and DISK-homed parameters may still be on their way to the file.
        """
        self.complete(groups, table)
        self._pipeline.wait_updated()

    def complete(self, groups: Groups, table: HyperTable) -> None:
        """submit() of the last updates of a step."""
        self._expect_nothing()  # all that comes is here
        self.submit(groups, table)
        if self._updated:
            self._last, self._updated = self._updated, []
        if not self._repeats:
            self._forward = not self._forward
        if self.next_use is not None:
            # The next step's is read as soon as nothing waits, in forward's last part.
            with suppress(RuntimeError, OSError):  # a failed pipeline says so to who waits for it
                self.read_ahead()

    def stop(self) -> None:
        """Until the updates that were submitted are made, which are not going to be a step."""
        self._expect_nothing()
        self._pipeline.wait_updated()
        self._updated.clear()

    def note_forgotten(self) -> None:
        """The pipeline was made to forget what it has read ahead."""
        self._expecting = False

    def _expect_nothing(self) -> None:
        if self._expecting:
            self._pipeline.expect([], STREAMING_BUFFERS if self._repeats else 0)
            self._expecting = False

    def submit(self, groups: Groups, table: HyperTable) -> None:
        """Begins to update the given parameters. Until they are, RAM that they use must stay."""
        hypers: dict[tuple[int, int, float], int] = {}
        made: list[Hyper] = []
        segments: dict[tuple[int, int], list[Segment]] = {}
        for index, (_, members) in enumerate(groups):
            for managed in members:
                key = (index, managed.step + 1, managed.grad_factor)
                if key not in hypers:
                    hypers[key] = len(made)
                    made.append(table[key])
                first_number = self._first_number[managed.slice.param.index]
                for part in parts_of(managed, self._layout):
                    number = first_number + part.in_param.start
                    segment = (part.in_tile.start, part.numel, hypers[key], number)
                    segments.setdefault((managed.chunk.id, part.tile), []).append(segment)
        chunks, next_use = self._layout.chunks, self.next_use
        order = sorted(segments, reverse=not self._forward)
        if next_use is not None:
            order.sort(key=lambda each: next_use(chunks[each[0]]))
        order = self._update_on_device(order, segments, made)
        tasks = [self._task(chunks[c], tile, segments[c, tile]) for c, tile in order]
        self._pipeline.submit(tasks, made)
        self._updated += order
        for _, members in groups:
            for managed in members:
                managed.step += 1

    def _update_on_device(
        self,
        order: list[tuple[int, int]],
        segments: Mapping[tuple[int, int], list[Segment]],
        hypers: Sequence[Hyper],
    ) -> list[tuple[int, int]]:
        """Starts the updates that a device makes; returns the others, for the pipeline."""
        if self._updater is None:
            return order
        others: list[tuple[int, int]] = []
        tasks: list[DeviceTask] = []
        for c, tile in order:
            chunk = self._layout.chunks[c]
            if not self._param_homes.on_device(chunk):
                others.append((c, tile))
                continue
            homes = (self._param_homes, self._grads, self._optim_states)
            param, grad, optim_state = (home.address(chunk, tile) for home in homes)
            tasks.append(DeviceTask(param, grad, optim_state, _merged(sorted(segments[c, tile]))))
        self._updater.update(tasks, hypers)
        return others

    def _task(self, chunk: Chunk, tile: int, segments: list[Segment]) -> StepTask:
        return StepTask(
            self._first_key[chunk.id] + tile,
            self._param_location(chunk, tile),
            self._grads.location(chunk, tile),
            self._optim_states.location(chunk, tile),
            _merged(sorted(segments)),
            self._due(chunk),
        )

    def _due(self, chunk: Chunk) -> int:
        return 0 if self.next_use is None else self.next_use(chunk)

    def _param_location(self, chunk: Chunk, tile: int) -> Location:
        if chunk in self._param_homes:
            return Location(self._param_homes.address(chunk, tile))
        offset = self._param_extents[chunk.id].offset
        return Location(file_offset=offset + tile * self._tile_bytes)

    def wait_updated(self, chunk: Chunk) -> None:
        """Until its updates that were submitted are made: its gradient is not needed any more."""
        began_s = time.perf_counter()
        for tile in range(chunk.slots):
            self._pipeline.wait_updated(self._first_key[chunk.id] + tile)
        self.wait_s += time.perf_counter() - began_s

    def is_readable(self, chunk: Chunk) -> bool:
        """Whether its parameters can be read now from their home without waiting."""
        pipeline, first = self._pipeline, self._first_key[chunk.id]
        done = pipeline.is_updated if chunk in self._param_homes else pipeline.is_written
        return all(done(first + tile) for tile in range(chunk.slots))

    def wait_written(self, chunk: Chunk) -> None:
        """Until the file has what the last step computed for `chunk`."""
        for tile in range(chunk.slots):
            self._pipeline.wait_written(self._first_key[chunk.id] + tile)

    def use(self, pipeline: StepPipeline) -> None:
        """The chunk group has got another pipeline; all is written that the old one had."""
        self._pipeline = pipeline
        self._expecting = False  # what the old one has read ahead is forgotten


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """Neighbours with the same hyper-parameters as one: fewer, longer runs for the kernel."""
    merged: list[Segment] = []
    for segment in segments:
        begin, numel, hyper, number = segment
        if merged:
            first, count, same_hyper, first_number = merged[-1]
            if (first + count, same_hyper, first_number + count) == (begin, hyper, number):
                merged[-1] = (first, count + numel, hyper, first_number)
                continue
        merged.append(segment)
    return merged
