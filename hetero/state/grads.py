"""GRAD: gradients arrive from autograd, are added up, and wait for the update.

Sums of squares are taken where a gradient is written if that can be, so the norm for clipping costs
no pass over the gradients, and no read of those in the file. A sum is of the values as they are
kept, after rounding. It takes a pass of its own, when it is asked for or before the gradient leaves
its slots, after writes of user code, for gradients that are not contiguous or come from a device's
memory. Sums are in double, in fixed lanes and blocks, so they depend on no layout. All
micro-batches are summed: which one is the last is not known when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.state.chunk_updates import ChunkUpdates, Open, Speculative, Submitted
from hetero.state.managed_param import ManagedParam
from hetero.state.memory import Homes
from offload._native import Location, add_and_sum, copy_and_sum, sum_of_squares
from offload.cache.slot_cache import WriteBackCache
from offload.device.grad_offload import GradOffload
from offload.device.updater import Updater

if TYPE_CHECKING:
    from offload._native import DtypeName


@dataclass
class LossScale:
    """The factor the loss is multiplied by so that small fp16 gradients do not vanish.

    Halved at a step whose gradients overflow, which is skipped; doubled after `window` good steps.
    With scale 1 and window 0 it stays 1: for every dtype but fp16, and if the user scales the loss.
    """

    value: float = 1.0
    window: int = 0
    good_steps: int = 0
    skipped_steps: int = 0

    @property
    def dynamic(self) -> bool:
        """Whether losses must be scaled."""
        return self.window > 0

    @property
    def grad_factor(self) -> float:
        """What the gradients that backward gives are to be multiplied by."""
        return 1.0 / self.value

    def update(self, overflow: bool) -> None:
        """Follows one step."""
        if not self.dynamic:
            return
        if overflow:
            self.value = max(self.value / 2, 1.0)
            self.good_steps = 0
            self.skipped_steps += 1
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.value *= 2
            self.good_steps = 0


class GradSlots:
    """The slots through which gradients with their homes on DISK pass.

    They are written when all gradients of a chunk have come. An update reads a gradient in its
    slots if they hold it, and keeps them until it is made.
    """

    def __init__(
        self,
        cache: WriteBackCache,
        dtype: torch.dtype,
        updates: ChunkUpdates,
        grad_offload: GradOffload | None,
    ) -> None:
        """No slot holds anything; arguments as Grads."""
        self.cache = cache
        self._dtype = dtype
        self._updates, self._chunks = updates, updates.chunks
        self._grad_offload = grad_offload
        # Queues of chunks by id: those that have all gradients, or will when none is on its way, to
        # be written; and those whose slots are locked for an update that reads them there.
        self._complete: dict[int, None] = {}
        self._in_update: dict[int, None] = {}

    def open(self, chunk: Chunk, is_needed: bool) -> torch.Tensor:
        """The chunk's slots, flat, to be written to; `is_needed`: so is what the file has."""
        self._complete.pop(chunk.id, None)
        self._make_room(chunk)
        if is_needed:
            self.cache.get(chunk.id)
        else:
            self.cache.create(chunk.id)
        self.cache.dirty(chunk.id)
        return self.cache.tensor(chunk.id, self._dtype)

    def read(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's gradient, flat, read from the file unless slots hold it."""
        self._make_room(chunk)
        self.cache.get(chunk.id)
        return self.cache.tensor(chunk.id, self._dtype)

    def _make_room(self, chunk: Chunk) -> None:
        """Waits until the chunk has slots, or can have some that others have.

        First for gradients on their way from the device, then for the updates that use gradients,
        in the order in which they were submitted.
        """
        self.release_used()
        while (self._grad_offload or self._in_update) and not self.cache.has_room(chunk.id):
            if self._grad_offload is not None and self._grad_offload.wait_one():
                self.write_complete()
            elif self._in_update:
                first = self._chunks[next(iter(self._in_update))].chunk
                self._updates.wait_computed(first)
                self.release(first)
            else:
                break

    def release_used(self) -> None:
        """Slots whose gradients updates have used may get other chunks."""
        for chunk_id in list(self._in_update):
            state = self._chunks[chunk_id]
            if isinstance(state.update, Speculative):
                is_used = self._updates.is_computed(state.chunk)
            else:
                is_used = not isinstance(state.update, Submitted)
            if is_used:
                self.release(state.chunk)

    def release(self, chunk: Chunk) -> None:
        """No update reads the chunk's slots any more."""
        if chunk.id in self._in_update:
            self.cache.unlock(chunk.id)
            del self._in_update[chunk.id]

    def note_arrived(self, managed: ManagedParam) -> None:
        """The parameter's gradient is in its slots, or on its way there."""
        state = self._chunks[managed.chunk.id]
        state.arrived.add(managed)
        if len(state.arrived) == len(state.members):
            state.arrived.clear()
            self._complete[managed.chunk.id] = None

    def write_complete(self) -> None:
        """Starts writing the chunks to DISK that have all gradients, and nothing on its way.

        Not those that an update uses, which are not needed afterwards, unless it is speculative.
        """
        for chunk_id in list(self._complete):
            state = self._chunks[chunk_id]
            if _have_arrived(state.members, self._grad_offload):
                del self._complete[chunk_id]
                is_held = self.cache.holds(chunk_id)
                is_kept = isinstance(state.update, Speculative)
                if is_held and (is_kept or not self.cache.is_locked(chunk_id)):
                    self.cache.write_back(chunk_id)

    def lock(self, chunk: Chunk, speculative: bool) -> int | None:
        """The address of the chunk's slots, which stay until an update of it is made.

        None: none hold it. After a `speculative` one they are still needed: they go to the file.
        """
        if not speculative:
            self._chunks[chunk.id].arrived.clear()
            self._complete.pop(chunk.id, None)
        if not self.cache.holds(chunk.id):
            return None
        self.cache.lock(chunk.id)
        self._in_update[chunk.id] = None
        return self.cache.address(chunk.id)

    def flush(self) -> None:
        """What slots hold goes to the file, as far as there are gradients; slots are free then.

        Raises NativeIoError, and HeteroError for a gradient that was lost on its way.
        """
        self.release_used()
        for state in self._chunks:
            chunk_id, members = state.chunk.id, state.members
            if self._grad_offload is not None and state.chunk.trainable:
                for m in members:
                    self._grad_offload.wait_ended(m)
            if self.cache.holds(chunk_id):
                self._complete.pop(chunk_id, None)
                if any(m.has_grad for m in members):
                    self.cache.write_back(chunk_id)
                self.cache.drop(chunk_id)


class Grads:
    """Keeps this rank's shard of the gradients of all chunks, in the grad dtype.

    A parameter's first gradient is copied, later ones (further micro-batches) are added in the grad
    dtype. With several ranks a reducer stands between autograd and this. DISK-homed gradients pass
    through slots. Sums of squares are taken as gradients are written, those of DISK-homed ones at
    the latest before they leave the slots, and are remembered until the gradient changes. Memory
    is given out for writing by _to_write() alone, which forgets the sums.

    From a DEVICE of its own gradients come through a GradOffload, but those that stay there. What
    needs the kept ones waits for those on their way.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Dtypes,
        homes: Homes,
        make_cache: Callable[[Callable[[int], object]], WriteBackCache],
        updates: ChunkUpdates,
        grad_offload: GradOffload | None = None,
        updater: Updater | None = None,
    ) -> None:
        """Keeps no gradient yet.

        Args:
            homes: of GRAD.
            make_cache: makes the slots of DISK-homed chunks; it gets what is called with a chunk
                before its gradient leaves them.
            updates: of the layout's chunks.
            grad_offload: brings one rank's gradients from a DEVICE that is not RAM.
            updater: sums the squares of what is at home on DEVICE, if the CPU cannot.
        """
        self._updater = updater
        self._tile_numel, self._itemsize = layout.tile_numel, dtypes.grad_bytes
        self.homes = homes
        self._updates = updates
        self._chunks = updates.chunks
        # Where each gradient is in this rank's shard of its chunk.
        self._parts = {
            m: m.in_shard(layout)[0]
            for state in updates.chunks
            if state.chunk.trainable
            for m in state.members
        }
        self._grad_offload = grad_offload
        self._sums = GradSums(dtypes.grad)
        cache = make_cache(self._before_write)
        self.slots = GradSlots(cache, dtypes.torch_grad, updates, grad_offload)

    @property
    def wait_s(self) -> float:
        """Seconds for which room for gradients has been waited for."""
        offload_s = 0.0 if self._grad_offload is None else self._grad_offload.wait_s
        return self.slots.cache.wait_s + offload_s

    def members(self, chunk: Chunk) -> Sequence[ManagedParam]:
        """The parameters of a chunk that is trained."""
        return self._chunks[chunk.id].members

    def wait_unused(self, chunk: Chunk) -> None:
        """Until no update reads the chunk's gradient, which may be changed then."""
        if not isinstance(self._chunks[chunk.id].update, Open):
            self._updates.revoke(chunk)
            self._updates.wait_updated(chunk)
        self.slots.release(chunk)

    def has_arrived(self, chunk: Chunk) -> bool:
        """Whether no gradient of it is on its way from DEVICE."""
        return _have_arrived(self.members(chunk), self._grad_offload)

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
        grad_offload = self._grad_offload
        if grad_offload is not None and self.homes.on_compute_tier(chunk):
            grad_offload = None
        if grad_offload is not None or self._is_summed_on_device(chunk):
            put_grad(managed, grad, kept, accumulate, grad_offload)
        else:
            self._sums.put(managed, grad, kept, accumulate)
        managed.hold_grad()
        if chunk not in self.homes:
            self.slots.note_arrived(managed)

    def set_factor(self, managed: ManagedParam, factor: float, accumulate: bool) -> None:
        """A gradient comes that is to be multiplied by `factor` (ManagedParam.grad_factor).

        If it is going to be added to what is kept, that is made a multiple of the same factor.
        """
        if accumulate and managed.grad_factor != factor:
            ratio = managed.grad_factor / factor
            self.change(managed, lambda kept: kept.mul_(ratio))
        managed.grad_factor = factor

    def merge(self, chunk: Chunk, mean: torch.Tensor, kept: Container[ManagedParam]) -> None:
        """Keeps a shard's gradient, flat, added to what is there for the parameters in `kept`."""
        members = self.members(chunk)
        flat = self._to_write(chunk, members, any(m in kept for m in members))
        for m in members:
            part = self._parts[m]
            if self._is_summed_on_device(chunk):
                put_grad(m, mean[part].to(flat.device), flat[part], m in kept, None)
            else:
                self._sums.put(m, mean[part], flat[part], m in kept)
        if chunk not in self.homes:
            self.slots.cache.write_back(chunk.id)

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
        is_needed = accumulate or any(m.has_grad for m in self.members(chunk))
        return self.slots.open(chunk, is_needed)

    def wait_arrived(self, managed: ManagedParam) -> None:
        """Until its gradient is where it is kept. Raises HeteroError if it was lost."""
        if self._grad_offload is not None:
            self._grad_offload.wait(managed, managed.name)

    def _before_write(self, chunk_id: int) -> None:
        """A DISK-homed chunk is about to leave its slots: takes its sums of squares."""
        address = self.slots.cache.address(chunk_id)
        for managed in self._chunks[chunk_id].members:
            if managed.has_grad and managed not in self._sums:
                self._sums.take(managed, *self._array(managed, address))

    def sum_of_squares(self, managed: ManagedParam) -> float:
        """Sum of squares of the shard's part of its gradient, in a fixed order, in double."""
        self.wait_arrived(managed)
        known = self._sums.get(managed)
        if known is not None:
            return known
        chunk = managed.chunk
        if self._updater is not None and self.homes.on_device(chunk):
            # Of all that are there, because each wait for the device costs.
            members = [
                m
                for state in self._chunks
                if state.chunk.trainable and self.homes.on_device(state.chunk)
                for m in state.members
                if m.has_grad and m not in self._sums
            ]
            arrays = [self._array(m, self.homes.address(m.chunk, 0)) for m in members]
            totals = self._updater.sums_of_squares(arrays)
            self._sums.update(zip(members, totals, strict=True))
        elif chunk in self.homes:
            self._sums.take(managed, *self._array(managed, self.homes.address(chunk, 0)))
        else:  # mostly it is there: it does not leave before the sum has been taken
            address = self.slots.read(chunk).data_ptr()
            self._sums.take(managed, *self._array(managed, address))
        return self._sums[managed]

    def _is_summed_on_device(self, chunk: Chunk) -> bool:
        """Whether the CPU cannot read the chunk's home."""
        return self._updater is not None and self.homes.on_device(chunk)

    def _array(self, managed: ManagedParam, chunk_address: int) -> tuple[int, int]:
        """The address and the number of elements of the shard's part of its gradient."""
        part = self._parts[managed]
        return chunk_address + part.start * self._itemsize, part.stop - part.start

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
        kept = self._to_write(managed.chunk, [managed], accumulate=True)
        change(kept[self._parts[managed]])

    def _kept(self, managed: ManagedParam) -> torch.Tensor:
        """The shard's part of its gradient, flat, to be read."""
        self.wait_arrived(managed)
        chunk = managed.chunk
        shard = self.homes.shard(chunk) if chunk in self.homes else self.slots.read(chunk)
        return shard[self._parts[managed]]

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

    def locations(self, chunk: Chunk, speculative: bool = False) -> list[Location]:
        """Where the tiles' gradients are for an update; there they stay until that is made.

        They have arrived (wait_arrived()). After a `speculative` one they are still needed.
        """
        first = None if chunk in self.homes else self.slots.lock(chunk, speculative)
        if first is None:
            return self.homes.locations(chunk)
        tile_bytes = self._tile_numel * self._itemsize
        return [Location(first + tile * tile_bytes) for tile in range(chunk.slots)]


def _have_arrived(members: Iterable[ManagedParam], grad_offload: GradOffload | None) -> bool:
    return grad_offload is None or not any(map(grad_offload.busy, members))


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


_NAMES: dict[torch.dtype, DtypeName] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class GradSums(dict[ManagedParam, float]):
    """The sums of squares of kept gradients, as their memory is now, as far as they are known.

    A sum belongs to one state of the memory. So memory is given out for writing only together with
    drop(), and is written with put() where possible, which knows the new sum.
    """

    def __init__(self, dtype: DtypeName) -> None:
        """Knows no sum. `dtype` is of what is kept."""
        super().__init__()
        self._dtype = dtype

    def drop(self, members: Iterable[ManagedParam]) -> None:
        """Their memory is going to be written."""
        for m in members:
            self.pop(m, None)

    def put(
        self, managed: ManagedParam, grad: torch.Tensor, kept: torch.Tensor, accumulate: bool
    ) -> None:
        """Copies `grad` to `kept`, or adds it there, with the bits of torch's copy_() and add_().

        If both are contiguous and in RAM, the sum is taken in the same pass over memory; else it
        is unknown afterwards.

        Args:
            grad: of any dtype, whole or this rank's shard, of the same shape as `kept`.
            kept: the memory of `managed`, of the dtype in which gradients are kept.
        """
        self.pop(managed, None)
        if _is_plain(grad) and _is_plain(kept) and grad.shape == kept.shape:
            write = add_and_sum if accumulate else copy_and_sum
            source_dtype = _NAMES[grad.dtype]
            self[managed] = write(
                source_dtype, grad.data_ptr(), self._dtype, kept.data_ptr(), kept.numel()
            )
        elif accumulate:
            kept.add_(grad)
        else:
            kept.copy_(grad)

    def take(self, managed: ManagedParam, address: int, numel: int) -> None:
        """Sums what is at `address` in RAM, by a pass over memory of its own."""
        self[managed] = sum_of_squares(self._dtype, address, numel) if numel else 0.0


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are in RAM, one after another, and have the values that they stand for.

    (A subclass may have no memory; a lazily negated tensor, or one of zeros, has other values.)
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in _NAMES
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )
