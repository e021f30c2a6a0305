"""GRAD: gradients arrive from autograd, are added up, and wait for the update."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import torch

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.state.chunk_state import ChunkState, Speculative, Submitted
from hetero.state.chunk_updates import ChunkUpdates
from hetero.state.grad_sums import GradSums
from hetero.state.managed_param import ManagedParam
from hetero.state.memory.homes import Homes
from offload._native import Location
from offload.cache.slot_cache import SlotCache
from offload.device.grad_offload import GradOffload
from offload.device.updater import Updater


class Grads:
    """Keeps this rank's shard of the gradients of all chunks, in the grad dtype.

    A parameter's first gradient is copied, later ones (further micro-batches) are added in the grad
    dtype. With several ranks a reducer stands between autograd and this. DISK-homed gradients pass
    through slots. Sums of squares are taken as gradients are written, those of DISK-homed ones at
    the latest before they leave the slots, and are remembered until the gradient changes. Memory
    is given out for writing by _to_write() and open_home() alone, which forget the sums.

    From a DEVICE of its own gradients come through a GradOffload, but those that stay there. What
    needs the kept ones waits for those on their way.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        chunks: Sequence[ChunkState],
        homes: Homes,
        make_cache: Callable[[Callable[[int], object]], SlotCache],
        updates: ChunkUpdates,
        grad_offload: GradOffload | None = None,
        updater: Updater | None = None,
    ) -> None:
        """Keeps no gradient yet.

        Args:
            chunks: of the layout, by id.
            homes: of GRAD.
            make_cache: makes the slots of DISK-homed chunks; it gets what is called with a chunk
                before its gradient leaves them.
            grad_offload: brings one rank's gradients from a DEVICE that is not RAM.
            updater: sums the squares of what is at home on DEVICE, if the CPU cannot.
        """
        self._updater = updater
        self._layout = layout
        self._dtypes = dtypes
        self.homes = homes
        self._updates = updates
        self._chunks = chunks
        self._trained = [chunk for chunk in layout.chunks if chunk.trainable]
        self._grad_offload = grad_offload
        # Queues of DISK-homed chunks: those that have all gradients, or will when none is on its
        # way, to be written; and those whose slots are locked for an update that reads them there.
        self._complete: dict[Chunk, None] = {}
        self._in_update: dict[Chunk, None] = {}
        self._sums = GradSums(dtypes.grad)
        self._cache = make_cache(self._before_write)

    @property
    def wait_s(self) -> float:
        """Seconds for which room for gradients has been waited for."""
        offload_s = 0.0 if self._grad_offload is None else self._grad_offload.wait_s
        return self._cache.wait_s + offload_s

    def members(self, chunk: Chunk) -> Sequence[ManagedParam]:
        """The parameters of a chunk that is trained."""
        return self._chunks[chunk.id].members

    def wait_unused(self, chunk: Chunk) -> None:
        """Until no update reads the chunk's gradient, which may be changed then."""
        self._updates.revoke(chunk)
        self._updates.wait_updated(chunk)
        self._unpin(chunk)

    def release_used(self) -> None:
        """Slots whose gradients updates have used may get other chunks."""
        for chunk in list(self._in_update):
            if self._is_used(chunk):
                self._unpin(chunk)

    def _is_used(self, chunk: Chunk) -> bool:
        update = self._chunks[chunk.id].update
        if isinstance(update, Speculative):
            return self._updates.is_computed(chunk)
        return not isinstance(update, Submitted)

    def _unpin(self, chunk: Chunk) -> None:
        if chunk in self._in_update:
            self._cache.unlock(chunk.id)
            del self._in_update[chunk]

    def has_arrived(self, chunk: Chunk) -> bool:
        """Whether no gradient of it is on its way from DEVICE."""
        return self._grad_offload is None or not any(
            map(self._grad_offload.busy, self.members(chunk))
        )

    def has_lost(self, chunk: Chunk) -> bool:
        """Whether a gradient of it was lost on its way, which wait_arrived() tells."""
        return self._grad_offload is not None and any(
            map(self._grad_offload.lost, self.members(chunk))
        )

    @torch.no_grad()  # with create_graph, hooks run with gradients enabled
    def add(self, managed: ManagedParam, grad: torch.Tensor, accumulate: bool) -> None:
        """Keeps `grad`, added to what is there if `accumulate`. Sets `.grad` to the placeholder."""
        chunk = managed.chunk
        kept = managed.part_of(self._to_write(chunk, [managed], accumulate))
        grad_offload = None if self.homes.on_compute_tier(chunk) else self._grad_offload
        if grad_offload is not None or self._is_summed_on_device(chunk):
            put_grad(managed, grad, kept, accumulate, grad_offload)
        else:
            self._sums.put(managed, grad, kept, accumulate)
        managed.param.grad = managed.absent_grad
        if chunk not in self.homes:
            self._note_arrived(managed)

    def set_factor(self, managed: ManagedParam, factor: float, accumulate: bool) -> None:
        """A gradient comes that is to be multiplied by `factor` (ManagedParam.grad_factor).

        If it is going to be added to what is kept, that is made a multiple of the same factor.
        """
        if accumulate and managed.grad_factor != factor:
            ratio = managed.grad_factor / factor
            self.change(managed, lambda kept: kept.mul_(ratio))
        managed.grad_factor = factor

    def open_home(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's home in memory, whole, to be written to; no update reads it any more."""
        self.wait_unused(chunk)
        self._sums.drop(self.members(chunk))
        return self.homes.flat(chunk)

    def parts(self, chunk: Chunk) -> list[slice]:
        """Where the gradients of its members() are in this rank's shard, in their order."""
        return [m.in_shard(self._layout)[0] for m in self.members(chunk)]

    def note_means(self, chunk: Chunk, sums: Sequence[float] | None) -> None:
        """What open_home() gave holds the means now. `sums` are the sums of squares of its
        members() in this rank's shard; None: nobody took them.
        """
        members = self.members(chunk)
        self._sums.drop(members)
        if sums is not None:
            for m, total in zip(members, sums, strict=True):
                self._sums.note(m, total)

    def merge(self, chunk: Chunk, mean: torch.Tensor, kept: Container[ManagedParam]) -> None:
        """Keeps a shard's gradient, flat, added to what is there for the parameters in `kept`."""
        members = self.members(chunk)
        flat = self._to_write(chunk, members, any(m in kept for m in members))
        for m in members:
            part, _ = m.in_shard(self._layout)
            if self._is_summed_on_device(chunk):
                put_grad(m, mean[part].to(flat.device), flat[part], m in kept, None)
            else:
                self._sums.put(m, mean[part], flat[part], m in kept)
        if chunk not in self.homes:
            self._cache.write_back(chunk.id)

    def _to_write(
        self, chunk: Chunk, members: Iterable[ManagedParam], accumulate: bool
    ) -> torch.Tensor:
        """The shard's gradient, flat, in which those of `members` are going to be written.

        No update reads it any more. `accumulate`: what is kept of them is needed.
        """
        self.wait_unused(chunk)
        self._sums.drop(members)
        if chunk in self.homes:
            return self.homes.shard(chunk)
        self._complete.pop(chunk, None)
        self._make_room(chunk)
        if accumulate or any(m.has_grad for m in self.members(chunk)):
            self._cache.get(chunk.id)
        else:
            self._cache.create(chunk.id)
        self._cache.dirty(chunk.id)
        return self._cache.tensor(chunk.id, self._dtypes.torch_grad)

    def _make_room(self, chunk: Chunk) -> None:
        """Waits until the chunk has slots, or can have some that others have.

        First for gradients on their way from the device, then for the updates that use gradients,
        in the order in which they were submitted.
        """
        self.release_used()
        while (self._grad_offload or self._in_update) and not self._cache.has_room(chunk.id):
            if self._grad_offload is not None and self._grad_offload.wait_one():
                self.write_complete()
            elif self._in_update:
                first = next(iter(self._in_update))
                self._updates.wait_computed(first)
                self._unpin(first)
            else:
                break

    def _note_arrived(self, managed: ManagedParam) -> None:
        chunk = managed.chunk
        arrived = self._chunks[chunk.id].arrived
        arrived.add(managed)
        if len(arrived) == len(self.members(chunk)):
            arrived.clear()
            self._complete[chunk] = None

    def write_complete(self) -> None:
        """Starts writing the chunks to DISK that have all gradients, and nothing on its way.

        Not those that an update uses, which are not needed afterwards, unless it is speculative.
        """
        for chunk in list(self._complete):
            if self.has_arrived(chunk):
                del self._complete[chunk]
                in_use = self._cache.holds(chunk.id) and self._cache.is_locked(chunk.id)
                is_kept = isinstance(self._chunks[chunk.id].update, Speculative)
                if self._cache.holds(chunk.id) and (is_kept or not in_use):
                    self._cache.write_back(chunk.id)

    def wait_arrived(self, managed: ManagedParam) -> None:
        """Until its gradient is where it is kept. Raises HeteroError if it was lost."""
        if self._grad_offload is not None:
            self._grad_offload.wait(managed, managed.name)

    def _before_write(self, chunk_id: int) -> None:
        """A DISK-homed chunk is about to leave its slots: takes its sums of squares."""
        address = self._cache.address(chunk_id)
        for managed in self._chunks[chunk_id].members:
            if managed.has_grad and managed not in self._sums:
                self._sums.take(managed, *self._array(managed, address))

    def sum_of_squares(self, managed: ManagedParam) -> float:
        """Sum of squares of the shard's part of its gradient, in a fixed order, in double."""
        self.wait_arrived(managed)
        chunk = managed.chunk
        if managed not in self._sums and self._is_summed_on_device(chunk):
            self._sum_on_device()
        if managed not in self._sums:
            if chunk in self.homes:
                address = self.homes.address(chunk, 0)
            else:  # mostly it is there: it does not leave before the sum has been taken
                self._bring_in(chunk)
                address = self._cache.address(chunk.id)
            self._sums.take(managed, *self._array(managed, address))
        return self._sums[managed]

    def _is_summed_on_device(self, chunk: Chunk) -> bool:
        """Whether the CPU cannot read the chunk's home."""
        return self._updater is not None and self.homes.on_device(chunk)

    def _sum_on_device(self) -> None:
        """Of all that are there, because each wait for the device costs."""
        assert self._updater is not None
        members = [
            m
            for chunk in self._trained
            for m in self.members(chunk)
            if m.has_grad and m not in self._sums and self.homes.on_device(m.chunk)
        ]
        arrays = [self._array(m, self.homes.address(m.chunk, 0)) for m in members]
        for m, total in zip(members, self._updater.sums_of_squares(arrays), strict=True):
            self._sums.note(m, total)

    def _array(self, managed: ManagedParam, chunk_address: int) -> tuple[int, int]:
        """The address and the number of elements of the shard's part of its gradient."""
        part, _ = managed.in_shard(self._layout)
        return chunk_address + part.start * self._dtypes.grad_bytes, part.stop - part.start

    def read(self, managed: ManagedParam) -> torch.Tensor:
        """A copy of the shard's part of the parameter's kept gradient, flat."""
        return self._kept(managed).reshape(-1).clone()

    def largest(self, managed: ManagedParam) -> float:
        """The largest magnitude in the shard's part of its gradient; NaN if it has a NaN."""
        if not self._kept(managed).numel():
            return 0.0
        return float(torch.linalg.vector_norm(self._kept(managed), float("inf")))

    @torch.no_grad()
    def change(self, managed: ManagedParam, change: Callable[[torch.Tensor], object]) -> None:
        """Calls `change` with the parameter's kept gradient, to be changed in place."""
        self.wait_arrived(managed)
        part, _ = managed.in_shard(self._layout)
        change(self._to_write(managed.chunk, [managed], accumulate=True)[part])

    def in_range(self, bound: float) -> float:
        """`bound`, or the largest number of the grad dtype nearest to it."""
        largest = torch.finfo(self._dtypes.torch_grad).max
        return min(max(bound, -largest), largest)

    def _kept(self, managed: ManagedParam) -> torch.Tensor:
        """The shard's part of its gradient, flat, to be read."""
        self.wait_arrived(managed)
        chunk = managed.chunk
        part, _ = managed.in_shard(self._layout)
        if chunk in self.homes:
            return self.homes.shard(chunk)[part]
        self._bring_in(chunk)
        return self._cache.tensor(chunk.id, self._dtypes.torch_grad)[part]

    def _bring_in(self, chunk: Chunk) -> None:
        """Reads a DISK-homed chunk, unless its slots hold it."""
        self._make_room(chunk)
        self._cache.get(chunk.id)

    def flush(self) -> None:
        """What slots hold goes to the file, as far as there are gradients; slots are free then.

        Raises NativeIoError, and HeteroError for a gradient that was lost on its way.
        """
        self.release_used()
        for chunk in self._trained:
            members = self.members(chunk)
            if self._grad_offload is not None:
                for m in members:
                    self._grad_offload.wait_ended(m)
            if self._cache.holds(chunk.id):
                self._complete.pop(chunk, None)
                if any(m.has_grad for m in members):
                    self._cache.write_back(chunk.id)
                self._cache.drop(chunk.id)

    def note_slots(self) -> None:
        """The arena of slots was resized while they held nothing."""
        self._cache.refit()

    def leaves_memory(self, chunk: Chunk) -> bool:
        """Whether the home, which is about to go to DISK, has gradients; their sums are taken."""
        members = [m for m in self.members(chunk) if m.has_grad]
        for m in members:
            self.sum_of_squares(m)
        return bool(members)

    def comes_to_memory(self, chunk: Chunk) -> bool:
        """Whether the home, which is about to come to RAM or DEVICE, has gradients where it is."""
        self._chunks[chunk.id].arrived.clear()
        return any(m.has_grad for m in self.members(chunk))

    def location(self, chunk: Chunk, tile: int, speculative: bool = False) -> Location:
        """Where the tile's gradient is for an update; there it stays until that is made.

        It has arrived (wait_arrived()). After a `speculative` one it is still needed: it goes to
        the file if that is its home.
        """
        if chunk in self.homes:
            return self.homes.location(chunk, tile)
        if not speculative:
            self._chunks[chunk.id].arrived.clear()
            self._complete.pop(chunk, None)
        if self._cache.holds(chunk.id):
            self._cache.lock(chunk.id)
            self._in_update[chunk] = None
            tile_bytes = self._layout.tile_numel * self._dtypes.grad_bytes
            return Location(self._cache.address(chunk.id) + tile * tile_bytes)
        return self.homes.location(chunk, tile)


def put_grad(
    managed: ManagedParam,
    grad: torch.Tensor,
    into: torch.Tensor,
    accumulate: bool,
    grad_offload: GradOffload | None,
) -> None:
    """Copies `grad` to `into`, or adds it there; by `grad_offload`, if given, in the background."""
    if grad_offload is not None:
        grad_offload.take(managed, managed.name, grad, into, accumulate)
    elif accumulate:
        into.add_(grad)
    else:
        into.copy_(grad)
