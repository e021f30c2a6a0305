"""The updates of a chunk group's parameters as tasks of its step pipeline.

Where updates go on after step(), what forward waits for first is made first. Backward submits the
newest gradient last, and it belongs to what forward uses earliest; so it overtakes the others, and
what the disk did not manage during backward is spread over the next forward. Gradients without a
home in RAM hold slots that backward waits for, so their updates come before all. The buffers that
do not stream keep what forward needs first; mostly that is a tied embedding, whose gradient comes
last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from numbers import Real
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from hetero.chunk_groups.muon_directions import MuonDirections
from hetero.chunks.layout import Chunk
from hetero.overlap import STREAMING_BUFFERS
from hetero.state.chunk_updates import ChunkUpdates, TileOffsets
from hetero.state.grads import Grads
from hetero.state.managed_param import ManagedParam
from hetero.state.memory import Homes, StateMemory
from hetero.state.optimizer_state import parts_of
from offload._native import Hyper, Location, StepTask, UpdateKind
from offload.device.updater import DeviceTask, Updater
from offload.memory.tiers import StateKind

# From a param group's options, the update's number, the factor of gradients and that of the
# learning rate.
HyperOf = Callable[[dict[str, Any], int, float, float], Hyper]
# From a param group's options and a parameter's shape, the factor of its learning rate.
LrScaleOf = Callable[[dict[str, Any], torch.Size], float]
HyperKey = tuple[int, int, float, float]  # the same, but the param group's index
Groups = Sequence[tuple[dict[str, Any], list[ManagedParam]]]
Tile = tuple[int, int]  # id of the chunk, number of the tile in its shard
_NOT_USED_YET = 1 << 30  # comes after all chunks that forward has used


class TilePiece(NamedTuple):
    """The elements of a parameter in one tile of this rank's shard."""

    tile: int
    begin: int  # first element in the tile
    numel: int
    number: int  # of the first element, among all elements of the model


class Segment(NamedTuple):
    """Neighbouring elements of a tile that are updated with the same hyper-parameters."""

    begin: int  # first element in the tile
    numel: int
    hyper: int  # index of the hyper-parameters
    number: int  # of the first element, among all elements of the model


class ChunkUpdate(NamedTuple):
    """What of a chunk is updated."""

    chunk: Chunk
    members: list[ManagedParam]  # that are updated, in the order of their places
    tiles: dict[int, list[Segment]]  # what of each tile, in the order of their updates
    grads: Sequence[Location] | None  # by tile; None: at home on a DEVICE, whose updater updates it
    priority: int  # of the pipeline's tasks


@dataclass(frozen=True)
class Update:
    """Parameters that are updated together, and how; nothing has begun."""

    chunks: Sequence[ChunkUpdate]  # in the order of their updates
    options: Mapping[ManagedParam, dict[str, Any]]  # of its param group
    hypers: Sequence[Hyper]


class HyperTable:
    """All hyper-parameters that an update of `groups` takes.

    Attributes:
        hypers: all of them, each once.
        index_of: by parameter, which of them is its.
    """

    def __init__(
        self, groups: Groups, hyper_of: HyperOf, lr_scale_of: LrScaleOf, factor: float = 1.0
    ) -> None:
        """`factor`: by which gradients are going to be multiplied more.

        Raises ValueError for those that make no sense, with the number of the param group.
        """
        numbers: dict[HyperKey, int] = {}
        self.hypers: list[Hyper] = []
        self.index_of: dict[ManagedParam, int] = {}
        for index, (options, members) in enumerate(groups):
            shapes = {m.stand_in.shape for m in members}
            scales = {shape: lr_scale_of(options, shape) for shape in shapes}
            for m in members:
                scale = scales[m.stand_in.shape]
                key = (index, m.step + 1, m.grad_factor * factor, scale)
                if key not in numbers:
                    try:
                        self.hypers.append(hyper_of(options, *key[1:]))
                    except ValueError as error:
                        raise ValueError(f"in param group {index} {error}") from error
                    numbers[key] = len(numbers)
                self.index_of[m] = numbers[key]

    def hypers_of(self, members: Iterable[ManagedParam]) -> list[Hyper]:
        """The hyper-parameters of each of these."""
        return [self.hypers[self.index_of[m]] for m in members]


class UpdateOrder:
    """The order in which the tiles of a chunk group are updated, from step to step.

    By `overlap_updates`:
        none: the layout's, reversed from step to step (zig-zag). What the last step left in the
            buffers is what this one needs first.
        backward: the layout's reversed, in each step, also of what backward leaves to step().
        forward, both: that in which forward will wait for chunks (priority()); during
            backward chunks come first whose gradients hold slots that backward needs.

    Attributes:
        is_ascending: tiles go in the layout's order.
    """

    def __init__(self, updates: ChunkUpdates, grads: Homes) -> None:
        """No step was made. `grads` are the homes of GRAD."""
        self._updates, self._grads, self._overlap = updates, grads, updates.overlap
        self.is_ascending = not self._overlap.in_backward
        # Tiles that were updated in this step, and in the last step that updated any.
        self._updated: list[Tile] = []
        trained = [state.chunk for state in updates.chunks if state.chunk.trainable]
        self._last = [(chunk.id, tile) for chunk in trained for tile in range(chunk.slots)]
        self._last.sort(reverse=not self.is_ascending)
        self._speculated = self._overlap.in_backward  # as the next step is expected to do
        self._has_speculated = False  # in this step

    def sort(self, numbers: Iterable[int]) -> list[int]:
        """Chunks by their ids, or the tiles of one chunk, in the order of their updates."""
        return sorted(numbers, reverse=not self.is_ascending)

    def priority(self, chunk: Chunk, in_backward: bool) -> int:
        """When something will wait for the chunk's update: the smallest number is made first.

        That is at once where step() waits for it, and, if it is submitted `in_backward`, where its
        gradient holds slots, which backward needs before any forward.
        """
        backward_waits = in_backward and chunk not in self._grads
        if backward_waits or not self._updates.goes_on(chunk):
            return 0
        first_use = self._updates.chunks[chunk.id].first_use
        return 1 + (_NOT_USED_YET + chunk.id if first_use is None else first_use)

    def expected(self) -> Iterator[tuple[Chunk, list[int], int]]:
        """The chunks of the next step, each with its tiles and its priority."""
        order = self._last
        if not self._overlap.repeats:
            order = sorted(order, reverse=not self.is_ascending)
        for chunk_id, tiles in groupby(order, key=itemgetter(0)):
            chunk = self._updates.chunks[chunk_id].chunk
            yield chunk, [tile for _, tile in tiles], self.priority(chunk, self._speculated)

    def note(self, chunk: Chunk, tiles: Iterable[int]) -> None:
        """The pipeline was given updates of these tiles."""
        self._updated += [(chunk.id, tile) for tile in tiles]

    def note_speculation(self) -> None:
        """Updates were submitted before step()."""
        self._has_speculated = True

    def end_step(self) -> None:
        """All updates of the step are submitted."""
        if self._updated:
            # (What was taken back, or is made again, comes where it was submitted last.)
            self._last = list(dict.fromkeys(reversed(self._updated)))[::-1]
            self._updated = []
        self._speculated, self._has_speculated = self._has_speculated, False
        if not self._overlap.repeats:
            self.is_ascending = not self.is_ascending


class UpdatePass(NamedTuple):
    """One pass of an update over its tiles, in the pipeline.

    Attributes:
        kind: which update it is.
        updater: updates what is at home on DEVICE, if the pipeline cannot.
    """

    kind: UpdateKind
    updater: Updater | None = None


class UpdateTasks:
    """Makes the tasks of updates, in the order of UpdateOrder, and submits them."""

    def __init__(
        self,
        memory: StateMemory,
        grads: Grads,
        updates: ChunkUpdates,
        first_number: Mapping[int, int],
        passes: Sequence[UpdatePass],
        directions: MuonDirections | None = None,
    ) -> None:
        """Nothing is submitted yet.

        Args:
            memory: has the homes.
            grads: have the gradients.
            updates: the states of the chunks, and the pipeline.
            first_number: by a parameter's index, that of its first element in the model. So random
                bits are the same for every chunk size.
            passes: of an update.
            directions: what comes between the passes, if there are two.
        """
        self._layout = memory.layout
        self._params = memory.homes[StateKind.PARAM]
        self._optim_states = memory.homes[StateKind.OPTIM_STATE]
        self._grad_homes, self._grads = memory.homes[StateKind.GRAD], grads
        self._updates = updates
        self._order = UpdateOrder(updates, self._grad_homes)
        self._passes = passes
        self._directions = directions
        self._in_use: torch.Tensor | None = None  # Muon's directions
        self._pieces: dict[ManagedParam, list[TilePiece]] = {
            m: [
                TilePiece(part.tile, part.in_tile.start, part.numel, number + part.in_param.start)
                for part in parts_of(m, memory.layout)
            ]
            for state in updates.chunks
            if state.chunk.trainable
            for m in state.members
            for number in (first_number[m.slice.param.index],)
        }

    @property
    def can_speculate(self) -> bool:
        """Whether updates can be taken back: those of one pass."""
        return self._directions is None

    def read_ahead(self) -> None:
        """Has the pipeline read what the step's first updates need, as far as buffers are free.

        As many tiles as there are buffers, in the order of the last step; none that buffers keep
        from it, and none twice, however often this is called. If the step does not come, or is
        another one, what was read stays until its buffer is needed. Gradients are not read: more
        may be added to them.
        """
        if self._updates.arenas.is_reading_ahead:
            return
        expected: list[tuple[int, Location, Location, int]] = []
        for chunk, tiles, priority in self._order.expected():
            if chunk not in self._params or chunk not in self._optim_states:
                params = self._params.locations(chunk)
                optim_states = self._optim_states.locations(chunk)
                first_key = self._updates.chunks[chunk.id].first_key
                expected += [
                    (first_key + tile, params[tile], optim_states[tile], priority) for tile in tiles
                ]
        streaming = STREAMING_BUFFERS if self._updates.overlap.repeats else 0
        self._updates.arenas.expect(expected, streaming)

    def prepare(self, groups: Groups, table: HyperTable, speculative: bool = False) -> Update:
        """What updates the parameters in `groups`, with what is in `table`. Changes nothing.

        Slots that hold their gradients stay until the update is made (Grads.release_used()).
        """
        by_chunk: dict[int, list[ManagedParam]] = {}
        for _, some in groups:
            for m in some:
                by_chunk.setdefault(m.chunk.id, []).append(m)
        chunks = []
        for chunk_id in self._order.sort(by_chunk):
            chunk = self._layout.chunks[chunk_id]
            members = sorted(by_chunk[chunk_id], key=attrgetter("slice.offset"))
            grads = None
            if not self._on_device(chunk):
                grads = self._grads.locations(chunk, speculative)
            priority = self._order.priority(chunk, speculative)
            segments = _segments([(m, self._pieces[m]) for m in members], table)
            if self._updates.chunks[chunk_id].versions.leaves_commit:
                # What has no gradient goes with the rest of the chunk to where that is written.
                for m in self._grads.members(chunk):
                    for tile, *_ in self._pieces[m]:
                        segments.setdefault(tile, [])
            tiles = {tile: segments[tile] for tile in self._order.sort(segments)}
            chunks.append(ChunkUpdate(chunk, members, tiles, grads, priority))
        chunks.sort(key=attrgetter("priority"))
        options = {m: options for options, some in groups for m in some}
        return Update(chunks, options, table.hypers)

    def submit(self, update: Update, last: bool) -> None:
        """Begins an update, the `last` of the step or a speculative one before. Memory that it uses
        must stay.

        Raises the failure of an update before.
        """
        if self._directions is not None:
            self._submit_by_chunk(update, self._directions)
        if last:
            if self._updates.arenas.is_reading_ahead:
                self._updates.arenas.expect([], 0)  # all that comes is here
        else:
            self._order.note_speculation()
        if self._directions is None:
            self._submit_pass(0, update.chunks, update.hypers)
        if last:
            # Before what is read ahead, which is then read from where it is now.
            self._updates.versions.note_submitted()
        for each in update.chunks:
            if each.grads is not None:
                self._order.note(each.chunk, each.tiles)
            if last:
                for m in each.members:
                    m.step += 1
        if last:
            self._order.end_step()
            if self._updates.overlap.in_forward:
                # The next step's is read as soon as nothing waits, in forward's last part.
                with suppress(RuntimeError, OSError):  # a failed pipeline says so to who waits
                    self.read_ahead()

    def _on_device(self, chunk: Chunk) -> bool:
        """Whether an updater of the device updates it, and not the pipeline."""
        return self._passes[0].updater is not None and self._params.on_device(chunk)

    def _submit_pass(
        self,
        number: int,
        chunks: Sequence[ChunkUpdate],
        hypers: Sequence[Hyper],
        directions: torch.Tensor | None = None,
    ) -> None:
        """Submits one of an update's passes over the tiles of `chunks`.

        `directions`, of Muon and of one chunk, are in the parameter's place in the first pass, and
        in the gradient's in the second. They must stay until the pass is made.
        """
        tasks: list[StepTask] = []
        device_tasks: list[DeviceTask] = []
        tile_bytes = 0 if directions is None else self._layout.tile_numel * directions.itemsize
        for chunk, _, tiles, grads, priority in chunks:
            if grads is None:
                homes = self._params, self._grad_homes, self._optim_states
                for tile, segments in tiles.items():
                    addresses = [each.address(chunk, tile) for each in homes]
                    if directions is not None:
                        addresses[number] = directions.data_ptr() + tile * tile_bytes
                    device_tasks.append(
                        DeviceTask(addresses[0], addresses[1], addresses[2], segments)
                    )
                continue
            places = [self._params.locations(chunk), grads]
            if directions is not None:
                end = directions.data_ptr() + chunk.slots * tile_bytes
                places[number] = [*map(Location, range(directions.data_ptr(), end, tile_bytes))]
            optim_states = self._optim_states.locations(chunk)
            state = self._updates.chunks[chunk.id]
            offsets = self._updates.versions.offsets(state)
            for tile, segments in tiles.items():
                to, optim_state = offsets[tile], optim_states[tile]
                if directions is not None and number == 0:
                    to = TileOffsets(optim_state_to=to.optim_state_to)
                elif directions is not None and to.optim_state_to >= 0:
                    # The first pass has written it there, or left it in the buffer.
                    optim_state = Location(file_offset=to.optim_state_to)
                    to = TileOffsets(param_to=to.param_to)
                param, grad = places[0][tile], places[1][tile]
                key = state.first_key + tile
                tasks.append(StepTask(key, param, grad, optim_state, segments, priority, *to))
        kind, updater = self._passes[number]
        if device_tasks:
            assert updater is not None
            updater.update(device_tasks, hypers)
        self._updates.arenas.pipeline.submit(tasks, hypers, kind)

    def _submit_by_chunk(self, update: Update, muon: MuonDirections) -> None:
        """Makes Muon's update: the directions of one chunk are in memory at a time.

        A failure ends the pipeline, because some momentum is a step ahead of its parameters. The
        updater's thread may use the directions a moment longer, so they stay.
        """
        order = update.chunks
        if muon.needs_order:
            order = sorted(
                order, key=lambda each: each.chunk.id, reverse=not self._order.is_ascending
            )
        try:
            for each in order:
                matrices = [(m, update.options[m]) for m in each.members]
                self._in_use = muon.empty(each.chunk, on_device=self._on_device(each.chunk))
                self._submit_pass(0, [each], update.hypers, self._in_use)
                self._updates.wait_computed(each.chunk)
                muon.orthogonalize(self._in_use, matrices)
                # Backwards: the buffers still have the tiles that came last.
                again = each._replace(tiles=dict(reversed(each.tiles.items())))
                self._submit_pass(1, [again], update.hypers, self._in_use)
                self._updates.wait_computed(each.chunk)
        except BaseException as error:
            muon.tell_failure(error)
            self._updates.arenas.pipeline.give_up(
                f"an update was ended in the middle by {error!r}; close the engine, and load the "
                f"last checkpoint into another one"
            )
            raise
        self._in_use = None


def _segments(
    pieces: Iterable[tuple[ManagedParam, Sequence[TilePiece]]], table: HyperTable
) -> dict[int, list[Segment]]:
    """By tile what is updated, of a chunk's parameters in the order of their places.

    Neighbours with the same hyper-parameters are one segment: longer runs for the kernel.
    """
    found: dict[int, list[Segment]] = {}
    for m, some in pieces:
        hyper = table.index_of[m]
        for tile, begin, numel, number in some:
            segments = found.setdefault(tile, [])
            if segments:
                last = segments[-1]
                follows = (last.begin + last.numel, last.hyper, last.number + last.numel)
                if follows == (begin, hyper, number):
                    segments[-1] = last._replace(numel=last.numel + numel)
                    continue
            segments.append(Segment(begin, numel, hyper, number))
    return found


def number(value: object) -> float | None:
    """`value` as a float if it is a number, or a tensor of one element that is; else None.

    A bool is none, and what is beyond the range of float is infinite.
    """
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
        return float(value) if is_number else None
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def numbers_of(option: object) -> list[float]:
    """An option's numbers: one, as many as its tuple has, or NaN for what is none."""
    values: Sequence[object] = option if isinstance(option, (tuple, list)) else [option]
    found = (float(v) if isinstance(v, bool) else number(v) for v in values)
    return [math.nan if v is None else v for v in found]
