"""The updates of a chunk group's parameters as tasks of its step pipeline.

Where updates go on after step(), what forward waits for first is made first. Backward submits the
newest gradient last, and it belongs to what forward uses earliest; so it overtakes the others, and
what the disk did not manage during backward is spread over the next forward. Gradients without a
home in RAM hold slots that backward waits for, so their updates come before all. The buffers that
do not stream keep what forward needs first; mostly that is a tied embedding, whose gradient comes
last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hetero.chunk_groups.muon_directions import MuonDirections
from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.overlap import STREAMING_BUFFERS
from hetero.state.chunk_updates import ChunkUpdates
from hetero.state.chunk_versions import TileOffsets
from hetero.state.grads import Grads
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.homes import Homes
from hetero.state.optimizer_state import parts_of
from offload._native import Hyper, Location, StepTask
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


class Segment(NamedTuple):
    """Neighbouring elements of a tile that are updated with the same hyper-parameters."""

    begin: int  # first element in the tile
    numel: int
    hyper: int  # index of the hyper-parameters
    number: int  # of the first element, among all elements of the model


class TileUpdate(NamedTuple):
    """What of a tile is updated."""

    chunk: Chunk
    tile: int
    grad: Location | None  # None: at home on a DEVICE, whose updater updates the tile
    segments: list[Segment]
    priority: int  # of the pipeline's task


@dataclass(frozen=True)
class Update:
    """Parameters that are updated together, and how; nothing has begun."""

    members: Sequence[list[ManagedParam]]  # by chunk
    options: Mapping[ManagedParam, dict[str, Any]]  # of its param group
    hypers: Sequence[Hyper]
    tiles: Sequence[TileUpdate]  # in the order of their updates


class HyperTable:
    """All hyper-parameters that an update of `groups` takes."""

    def __init__(
        self, groups: Groups, hyper_of: HyperOf, lr_scale_of: LrScaleOf, factor: float = 1.0
    ) -> None:
        """`factor`: by which gradients are going to be multiplied more.

        Raises ValueError for those that make no sense, with the number of the param group.
        """
        made: dict[HyperKey, Hyper] = {}
        self._key_of: dict[ManagedParam, HyperKey] = {}
        for index, (options, members) in enumerate(groups):
            for m in members:
                scale = lr_scale_of(options, m.param.shape)
                key = (index, m.step + 1, m.grad_factor * factor, scale)
                self._key_of[m] = key
                if key not in made:
                    try:
                        made[key] = hyper_of(options, *key[1:])
                    except ValueError as error:
                        raise ValueError(f"in param group {index} {error}") from error
        self._index_of = {key: index for index, key in enumerate(made)}
        self.hypers = list(made.values())

    def index(self, managed: ManagedParam) -> int:
        """The number of the parameter's hyper-parameters among all `hypers`."""
        return self._index_of[self._key_of[managed]]

    def hyper(self, managed: ManagedParam) -> Hyper:
        """The parameter's hyper-parameters."""
        return self.hypers[self.index(managed)]


class UpdateTasks:
    """Makes the tasks of updates, in the order in which tiles are to be updated, and submits them.

    The order, by `overlap_updates`:
        none: the layout's, reversed from step to step (zig-zag). What the last step left in the
            buffers is what this one needs first.
        backward: the layout's reversed, in each step, also of what backward leaves to step().
        forward, both: that in which forward will wait for chunks (priority()); during
            backward chunks come first whose gradients hold slots that backward needs.
    """

    def __init__(
        self,
        layout: Layout,
        homes: Mapping[StateKind, Homes],
        grads: Grads,
        updates: ChunkUpdates,
        first_number: Mapping[int, int],
        dtypes: Dtypes,
        updaters: Sequence[Updater] = (),
        directions: MuonDirections | None = None,
    ) -> None:
        """Nothing is submitted yet.

        Args:
            layout: of the chunk group.
            homes: of each kind of state.
            grads: have the gradients.
            updates: the states of the chunks, and the pipeline.
            first_number: by a parameter's index, that of its first element in the model. So random
                bits are the same for every chunk size.
            dtypes: of the chunk group, with the passes of an update.
            updaters: one for each pass, if the pipeline cannot update what is at home on DEVICE.
            directions: what comes between the passes, if there are two.
        """
        self._layout = layout
        self._params, self._optim_states = homes[StateKind.PARAM], homes[StateKind.OPTIM_STATE]
        self._grad_homes, self._grads = homes[StateKind.GRAD], grads
        self._updates = updates
        self._passes = dtypes.passes
        self._updaters = updaters
        self._directions = directions
        self._in_use: torch.Tensor | None = None  # Muon's directions
        self._first_number = first_number
        self._ascending = not updates.overlap.in_backward  # whether tiles go in the layout's order
        # Tiles that were updated in this step, and in the last step that updated any.
        self._updated: list[Tile] = []
        trained = [chunk for chunk in layout.chunks if chunk.trainable]
        self._last = [(chunk.id, tile) for chunk in trained for tile in range(chunk.slots)]
        self._last.sort(reverse=not self._ascending)
        self._speculated = updates.overlap.in_backward  # as the next step is expected to do
        self._has_speculated = False  # in this step

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
        order = self._last
        if not self._updates.overlap.repeats:
            order = sorted(order, reverse=not self._ascending)
        chunks = self._layout.chunks
        self._updates.arenas.expect(
            [
                (
                    self._updates.chunks[c].first_key + tile,
                    self._params.location(chunks[c], tile),
                    self._optim_states.location(chunks[c], tile),
                    self.priority(chunks[c], self._speculated),
                )
                for c, tile in order
                if chunks[c] not in self._params or chunks[c] not in self._optim_states
            ],
            STREAMING_BUFFERS if self._updates.overlap.repeats else 0,
        )

    def prepare(self, groups: Groups, table: HyperTable, speculative: bool = False) -> Update:
        """What updates the parameters in `groups`, with what is in `table`. Changes nothing.

        Slots that hold their gradients stay until the update is made (Grads.release_used()).
        """
        segments: dict[Tile, list[Segment]] = {}
        by_chunk: dict[int, list[ManagedParam]] = {}
        for _, members in groups:
            for managed in members:
                by_chunk.setdefault(managed.chunk.id, []).append(managed)
                hyper = table.index(managed)
                first_number = self._first_number[managed.slice.param.index]
                for part in parts_of(managed, self._layout):
                    number = first_number + part.in_param.start
                    segment = Segment(part.in_tile.start, part.numel, hyper, number)
                    segments.setdefault((managed.chunk.id, part.tile), []).append(segment)
        chunks = self._layout.chunks
        for c in by_chunk:
            if self._updates.chunks[c].versions.holder is not None:
                # What has no gradient goes with the rest of the chunk to where that is written.
                for managed in self._grads.members(chunks[c]):
                    for part in parts_of(managed, self._layout):
                        segments.setdefault((c, part.tile), [])
        order = sorted(segments, reverse=not self._ascending)
        priorities = {c: self.priority(chunks[c], speculative) for c in by_chunk}
        order.sort(key=lambda tile: priorities[tile[0]])
        tiles = []
        for c, tile in order:
            chunk, merged = chunks[c], _merged(sorted(segments[c, tile]))
            grad = None
            if not self._on_device(chunk):
                grad = self._grads.location(chunk, tile, speculative)
            tiles.append(TileUpdate(chunk, tile, grad, merged, priorities[c]))
        options = {m: options for options, members in groups for m in members}
        return Update(list(by_chunk.values()), options, table.hypers, tiles)

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
            self._has_speculated = True
        if self._directions is None:
            self._submit_pass(0, update.tiles, update.hypers)
        if last:
            # Before what is read ahead, which is then read from where it is now.
            self._updates.versions.note_submitted()
        self._updated += [(t.chunk.id, t.tile) for t in update.tiles if t.grad is not None]
        if last:
            for members in update.members:
                for managed in members:
                    managed.step += 1
            self._end_step()

    def _end_step(self) -> None:
        if self._updated:
            # (What was taken back, or is made again, comes where it was submitted last.)
            self._last = list(dict.fromkeys(reversed(self._updated)))[::-1]
            self._updated = []
        self._speculated, self._has_speculated = self._has_speculated, False
        if not self._updates.overlap.repeats:
            self._ascending = not self._ascending
        if self._updates.overlap.in_forward:
            # The next step's is read as soon as nothing waits, in forward's last part.
            with suppress(RuntimeError, OSError):  # a failed pipeline says so to who waits for it
                self.read_ahead()

    def priority(self, chunk: Chunk, in_backward: bool) -> int:
        """When something will wait for the chunk's update: the smallest number is made first.

        That is at once where step() waits for it, and, if it is submitted `in_backward`, where its
        gradient holds slots, which backward needs before any forward.
        """
        backward_waits = in_backward and chunk not in self._grad_homes
        if backward_waits or not self._updates.goes_on(chunk):
            return 0
        first_use = self._updates.chunks[chunk.id].first_use
        return 1 + (_NOT_USED_YET + chunk.id if first_use is None else first_use)

    def _on_device(self, chunk: Chunk) -> bool:
        """Whether an updater of the device updates it, and not the pipeline."""
        return bool(self._updaters) and self._params.on_device(chunk)

    def _submit_pass(
        self,
        number: int,
        tiles: Sequence[TileUpdate],
        hypers: Sequence[Hyper],
        directions: torch.Tensor | None = None,
    ) -> None:
        """Submits one of an update's passes over `tiles`.

        `directions`, of Muon, are in the parameter's place in the first pass, and in the gradient's
        in the second. They must stay until the pass is made.
        """
        tasks: list[StepTask] = []
        device_tasks: list[DeviceTask] = []
        for chunk, tile, grad, segments, priority in tiles:
            address = None
            if directions is not None:
                tile_bytes = self._layout.tile_numel * directions.itemsize
                address = directions.data_ptr() + tile * tile_bytes
            if grad is None:
                addresses = [h.address(chunk, tile) for h in (self._params, self._grad_homes)]
                if address is not None:
                    addresses[number] = address
                optim_address = self._optim_states.address(chunk, tile)
                device_tasks.append(DeviceTask(addresses[0], addresses[1], optim_address, segments))
            else:
                places = [self._params.location(chunk, tile), grad]
                if address is not None:
                    places[number] = Location(address)
                optim_state = self._optim_states.location(chunk, tile)
                state = self._updates.chunks[chunk.id]
                offsets = self._updates.versions.offsets(state, tile)
                if directions is not None and number == 0:
                    offsets = TileOffsets(optim_state_to=offsets.optim_state_to)
                elif directions is not None and offsets.optim_state_to >= 0:
                    # The first pass has written it there, or left it in the buffer.
                    optim_state = Location(file_offset=offsets.optim_state_to)
                    offsets = TileOffsets(param_to=offsets.param_to)
                param, grad = places
                key = state.first_key + tile
                tasks.append(StepTask(key, param, grad, optim_state, segments, priority, *offsets))
        if device_tasks:
            self._updaters[number].update(device_tasks, hypers)
        self._updates.pipeline.submit(tasks, hypers, self._passes[number])

    def _submit_by_chunk(self, update: Update, muon: MuonDirections) -> None:
        """Makes Muon's update: the directions of one chunk are in memory at a time.

        A failure ends the pipeline, because some momentum is a step ahead of its parameters. The
        updater's thread may use the directions a moment longer, so they stay.
        """
        members = {some[0].chunk.id: some for some in update.members}
        tiles_of: dict[int, list[TileUpdate]] = {}
        for tile in update.tiles:
            tiles_of.setdefault(tile.chunk.id, []).append(tile)
        order = list(tiles_of)
        if muon.needs_order:  # (And a rank may have no tiles of a chunk that others have.)
            order = sorted(members, reverse=not self._ascending)
        try:
            for chunk_id in order:
                chunk, tiles = self._layout.chunks[chunk_id], tiles_of.get(chunk_id, [])
                matrices = [(m, update.options[m]) for m in members[chunk_id]]
                self._in_use = muon.empty(chunk, on_device=self._on_device(chunk))
                self._submit_pass(0, tiles, update.hypers, self._in_use)
                self._updates.wait_computed(chunk)
                muon.orthogonalize(self._in_use, matrices)
                # Backwards: the buffers still have the tiles that came last.
                self._submit_pass(1, tiles[::-1], update.hypers, self._in_use)
                self._updates.wait_computed(chunk)
        except BaseException as error:
            muon.tell_failure(error)
            self._updates.pipeline.give_up(
                f"an update was ended in the middle by {error!r}; close the engine, and load the "
                f"last checkpoint into another one"
            )
            raise
        self._in_use = None


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
