"""What autograd saves: kept where compute happens as far as there is room, else brought back.

The bytes of an activation move down as room is needed, the earliest first, because backward needs
them in the reverse order of saving: from the tensors to slots in RAM, from there to the file. They
come back in that reverse order, ahead of backward. What does not fit the prediction (graphs whose
backwards cross, a graph that is kept for another backward) is right, and waited for.

An activation dies with the last object that autograd has in its place. That may happen in any
thread, in the middle of what has the lock; so it is noted, and the next one that has the lock drops
it. Transfers under way are cancelled, and keep slots and extents until they have ended. A failed
write leaves the bytes in slots, a failed read in the file, a failed copy over the link where they
were; the one that waits is told, and can try again. (After an exception in backward torch itself
keeps the nodes that were ready, with what they saved, until the thread's next backward.)
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from hetero.activations.activation import Activation, ActivationState, SavingOrder
from hetero.activations.limits import ActivationLimits
from hetero.activations.movement import (
    ActivationFile,
    DeviceCopies,
    KeptTensors,
    Movement,
    RamCopies,
)
from hetero.config import Config
from offload._native import IoEngine
from offload.device.backend import Backend
from offload.errors import BudgetError, ClosedError, HeteroError
from offload.interrupts import uninterrupted
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.run_pool import RunPool
from offload.memory.tiers import Account, Tier

_MOST_LOOKED_AT = 256  # activations, to find the next ones that backward needs
# Where compute happens in RAM slots come and go among the tensors, so that runs of free ones may be
# short: there are addresses for so many times the bytes.
_ADDRESSES = 4
# Of RAM behind a link: what may be in slots alone before the earliest is written.
_UNWRITTEN_SHARE = 3 / 4
_keys = itertools.count()  # of saved tensors


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the bytes that a strided tensor views in its storage are all that there is to it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.numel() > 0
        and tensor.device.type != "meta"
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


class SavedActivation:
    """One saved tensor: how to view its activation. It lives as long as the graph that has it."""

    __slots__ = ("_store", "activation", "dtype", "key", "offset", "size", "stride")

    def __init__(
        self, store: ActivationStore, activation: Activation, tensor: torch.Tensor, begin: int = 0
    ) -> None:
        """Byte `begin` of the activation is the first one of the storage that `tensor` views."""
        self._store = store
        self.activation = activation
        activation.saved += 1
        self.key = next(_keys)
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset()) + begin // self.dtype.itemsize  # elements

    def view(self, found: torch.Tensor) -> torch.Tensor:
        """The saved tensor over `found`, the bytes that the activation has kept, flat."""
        begin = self.offset - self.activation.begin // self.dtype.itemsize
        usable = len(found) // self.dtype.itemsize * self.dtype.itemsize
        return found[:usable].view(self.dtype).as_strided(self.size, self.stride, begin)

    def unpack(self) -> torch.Tensor:
        """The tensor that was saved.

        Raises:
            StaleGraphError: it was changed in place since.
            BudgetError: what backward has in use leaves no room to bring it back.
            NativeIoError, OSError: it could not be read, or copied. It can be tried again.
            ClosedError: the engine was closed.
        """
        return self._store.unpack(self)

    def __del__(self) -> None:
        self._store.forget(self)


@dataclass
class ActivationCounts:
    """Counts of a store so far.

    Attributes:
        saved_bytes: of all storages that were new.
        alive_bytes: of the storages that graphs have now, wherever their bytes are.
        peak_alive_bytes: the most there ever were.
        refused_host_bytes: of RAM, what would have been needed to count the largest that found no
            room.
    """

    saved_bytes: int = 0
    alive_bytes: int = 0
    peak_alive_bytes: int = 0
    refused_host_bytes: int = 0


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, or a leaf whose gradient somebody wants."""
    return tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter))


class ActivationStore:
    """The activations of one engine, of graphs of any threads."""

    def __init__(
        self,
        limits: ActivationLimits,
        kept: KeptTensors,
        movement: Movement,
        notes: list[str],
        current_stream: Callable[[], object],
    ) -> None:
        """
        Args:
            limits: the bytes that there are.
            kept: the tensors that stay as they are.
            movement: brings activations away from where compute happens, and back.
            notes: lines for the user, to append to.
            current_stream: Backend's.
        """
        self.limits = limits
        self._current_stream = current_stream
        self._kept = kept
        self.movement = movement
        self._notes = notes
        self._order = SavingOrder()
        self._lock = threading.Lock()
        # Saved tensors that no graph has any more. The garbage collector may find one at any time,
        # in the middle of what needs the lock, too.
        self._forgotten: deque[tuple[Activation, int]] = deque()
        # By storage, what was brought back, and some of which the slots were given up.
        self._handed_out: dict[int, Activation] = {}
        self._is_open = True
        self.counts = ActivationCounts()
        self.recomputes = False  # blocks are computed again, so that less is saved

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._drop_forgotten()
            try:
                yield
            finally:
                self._drop_forgotten()
        self._drop_if_unlocked()

    # Forward

    @uninterrupted
    def pack(self, tensor: torch.Tensor) -> SavedActivation | None:
        """What autograd keeps for `tensor`; None if it is to keep the tensor itself.

        That is so for what is kept anyway: a parameter, a leaf with a gradient. A view of what was
        brought back (backwards that are differentiated save some) is one of its activation.

        Raises:
            BudgetError: there is no room, and nothing that can leave.
            NativeIoError, StoreError, OSError: what was to make room failed. No bytes are lost.
        """
        if _is_leaf(tensor) or (tensor._base is not None and _is_leaf(tensor._base)):
            return None
        with self._locked():
            return self._pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> SavedActivation | None:
        if not self._is_open:
            return None
        back = self._brought_back(tensor.untyped_storage()._cdata)
        if back is not None:
            return self._save_again(back, tensor)
        activation = self._kept.find(tensor)
        if activation is not None and activation.state is ActivationState.LEAVING:
            self.movement.finish_leaving(activation)
            activation = None
        if activation is None:
            activation = self._keep(tensor)
        if activation is None:
            return None
        saved = SavedActivation(self, activation, tensor)
        activation.add(saved.key, tensor, self._current_stream())
        return saved

    def _brought_back(self, storage: int) -> Activation | None:
        """The activation that has handed the storage out, and has it still."""
        activation = self._handed_out.get(storage)
        back = None if activation is None else activation.back
        # (If its slots were given up, the address may be another's.)
        return activation if back is not None and back.storage == storage else None

    def _save_again(self, activation: Activation, tensor: torch.Tensor) -> SavedActivation | None:
        """Another saved tensor, a view of what was brought back; None if that was changed since."""
        back = activation.back
        if not activation.saved or back is None or back.is_changed:
            return None
        return SavedActivation(self, activation, tensor, activation.begin)

    def _keep(self, tensor: torch.Tensor) -> Activation | None:
        storage = tensor.untyped_storage()
        nbytes, counts = storage.nbytes(), self.counts
        activation = Activation(nbytes, tensor.shape, storage._cdata)
        refusal = self._make_room(activation)
        if refusal is not None:
            if self.limits.is_strict:
                raise BudgetError(refusal)
            beside = 2 * nbytes if self.movement.file is not None else counts.alive_bytes
            counts.refused_host_bytes = max(counts.refused_host_bytes, beside + nbytes)
            note = "some saved tensors stay in memory that no budget counts: " + refusal
            if not any(line.startswith(note[:40]) for line in self._notes):
                self._notes.append(note)
            return None
        self._kept.add(activation)
        self._order.add(activation)
        counts.saved_bytes += nbytes
        counts.alive_bytes += nbytes
        counts.peak_alive_bytes = max(counts.peak_alive_bytes, counts.alive_bytes)
        return activation

    def _make_room(self, activation: Activation) -> str | None:
        """Room for tensors of so many bytes more; or else why there is none."""
        kept, movement = self._kept, self.movement
        movement.settle()
        limit = movement.kept_limit(max(kept.largest_bytes, activation.nbytes))
        for other in kept.let_go_by_others():
            if kept.nbytes + other.nbytes <= limit and movement.wait_for_room(other.nbytes):
                kept.count_again(other)
            elif not self._leave(other):
                kept.put_back(other)
        if activation.nbytes > limit:
            return movement.too_large(activation)
        while movement.is_one_to_leave(activation.nbytes, limit):
            leaving = kept.next_to_leave()
            if leaving is None:
                break
            if not self._leave(leaving):
                kept.put_back(leaving)
                break
        if not movement.wait_for_room(activation.nbytes):
            return movement.no_room(activation, len(self._order))
        return None

    def _leave(self, activation: Activation) -> bool:
        try:
            return self.movement.leave(activation)
        except BaseException:
            if activation.state is ActivationState.KEPT:
                self._kept.put_back(activation)
            raise

    # Backward

    @uninterrupted
    def unpack(self, saved: SavedActivation) -> torch.Tensor:
        """SavedActivation.unpack()."""
        with self._locked():
            return self._unpack(saved)

    def _unpack(self, saved: SavedActivation) -> torch.Tensor:
        activation = saved.activation
        if activation.is_kept:
            found = activation.kept(saved.key)
            self._read_ahead(activation)
            return found
        if not self._is_open:
            raise ClosedError(f"{activation.words} is gone: the engine was closed")
        activation.check(saved.key)
        if not self.movement.begin_return(activation, must=True):
            gc.collect()  # pins may hang in reference cycles, of an exception's frames say
            self._drop_forgotten()
            if not self.movement.begin_return(activation, must=True):
                raise BudgetError(self.movement.no_way_back(activation))
        self._read_ahead(activation)
        back = self.movement.finish_return(activation)
        self._handed_out[back.storage] = activation
        return saved.view(back.flat)

    def _read_ahead(self, activation: Activation) -> None:
        """What backward needs next begins to come back, as far as there is room."""
        if self._is_open and self.movement.reads_ahead:
            self.movement.read_ahead(self._order.before(activation, _MOST_LOOKED_AT))

    # The end of a graph

    def forget(self, saved: SavedActivation) -> None:
        """No graph has `saved` any more: what it alone needed is free."""
        self._forgotten.append((saved.activation, saved.key))
        self._drop_if_unlocked()

    def _drop_if_unlocked(self) -> None:
        """Whoever has the lock drops what is forgotten when he lets it go."""
        while self._forgotten and self._lock.acquire(blocking=False):
            try:
                self._drop_forgotten()
            finally:
                self._lock.release()

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            activation, key = self._forgotten.popleft()
            if not self._is_open:
                continue
            activation.forget(key)
            if not activation.saved:
                if activation.back is not None:
                    self._handed_out.pop(activation.back.storage, None)
                self._order.discard(activation)
                self.counts.alive_bytes -= activation.nbytes
                self.movement.drop(activation)
        if not len(self._order):
            self._handed_out.clear()
            self.movement.rest()

    def __len__(self) -> int:
        """How many activations graphs have now."""
        with self._locked():
            return len(self._order)

    @property
    def kept_bytes(self) -> int:
        """Of saved tensors that stay where compute happens, and that nobody else holds."""
        return self._kept.nbytes

    @property
    def least_host_bytes(self) -> int:
        """Of RAM, what the largest saved tensor so far needs to leave and to come back; what
        cannot be given back at least."""
        return max(3 * self._kept.largest_bytes, self.movement.fixed_bytes)

    @property
    def wanted_host_bytes(self) -> int:
        """Of RAM, what steps like those so far need so that nothing has to leave; all that there
        is at least, if blocks are computed again for want of more."""
        wanted = self.counts.peak_alive_bytes * 3 // 2 + self.least_host_bytes
        return max(wanted, self.limits.host_bytes) if self.recomputes else wanted

    @property
    def keepable_bytes(self) -> int:
        """What tensors may keep where compute happens."""
        return self.movement.kept_limit(self._kept.largest_bytes)

    @property
    def moved_bytes(self) -> tuple[int, int, int, int]:
        """Bytes so far: to a device and from it, and read from NVMe and written there."""
        file = self.movement.file
        of_file = (0, 0) if file is None else (file.read_bytes, file.written_bytes)
        return *self.movement.device_bytes, *of_file

    @property
    def own_io_stats(self) -> Mapping[str, Any]:
        """What an I/O engine that is the store's alone has counted (IoEngine.stats)."""
        file = self.movement.file
        return {} if file is None else file.own_io_stats

    def close(self) -> None:
        """Frees everything; idempotent. Graphs that are left can use what they keep alone."""
        with self._locked():
            if not self._is_open:
                return
            self._is_open = False
            while (activation := self._order.take()) is not None:
                if activation.state is ActivationState.LEAVING:
                    with suppress(HeteroError, OSError):  # where it is then does not matter
                        self.movement.finish_leaving(activation)
                if activation.state is ActivationState.KEPT:
                    self._kept.remove(activation)  # the graph has the tensors alone
                else:
                    self.movement.drop(activation)
            self.counts.alive_bytes = 0
            self.movement.close()


def build_activation_store(
    config: Config,
    limits: ActivationLimits,
    backend: Backend,
    ledger: Ledger,
    notes: list[str],
    model_state_io: Callable[[], IoEngine | None],
    excess: Callable[[int], int] = lambda _: 0,
) -> ActivationStore:
    """A store without activations. It takes memory when it needs it, within `limits`.

    Args:
        config: says where NVMe is.
        limits: the bytes that placement leaves out for it.
        backend: where compute happens.
        ledger: charged.
        notes: lines for the user, to append to.
        model_state_io: the I/O engine of model state, if it has one; it lives longer.
        excess: by how many bytes the process is larger than it may be, if so many more come.
    """
    tier = Tier.DEVICE if backend.separate else Tier.HOST
    kept = KeptTensors(ledger, tier, limits.may_leave)
    file = ActivationFile(config, ledger, notes, model_state_io) if config.nvme_paths else None
    slot_bytes = limits.slot_bytes(limits.host_bytes)
    slots = limits.host_bytes // slot_bytes
    devices: DeviceCopies | None = None
    if not backend.separate:

        def room() -> int:
            return limits.usable_bytes - kept.nbytes

        arena = HostArena(_ADDRESSES * slots, slot_bytes, ledger, Account.ACTIVATION)
        ram = RamCopies(RunPool(arena, room), room, file, unwritten_bytes=0)
    else:
        arena = backend.host_arena(slots, slot_bytes, ledger, Account.ACTIVATION)

        def behind_link() -> int:
            return limits.host_bytes

        pool = RunPool(arena, behind_link, in_one=True)
        device_slot_bytes = limits.slot_bytes(limits.device_bytes)
        devices = DeviceCopies(backend, ledger, limits.kept_device_bytes, device_slot_bytes)
        unwritten_bytes = int(slots * slot_bytes * _UNWRITTEN_SHARE)
        ram = RamCopies(pool, behind_link, file, unwritten_bytes, devices.wait_for_one)
    movement = Movement(limits, kept, ram, devices, config.debugging.prefetch, excess)
    return ActivationStore(limits, kept, movement, notes, backend.current_stream)
