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
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from hetero.activations.activation import Activation, ActivationState
from hetero.activations.kept_tensors import KeptTensors
from hetero.activations.limits import ActivationLimits
from hetero.activations.movement.movement import Movement
from hetero.activations.saved_activation import SavedActivation
from hetero.activations.saving_order import SavingOrder
from offload.errors import BudgetError, ClosedError, HeteroError
from offload.interrupts import uninterrupted

_KEPT = (ActivationState.KEPT, ActivationState.LEAVING)


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, or a leaf whose gradient somebody wants."""
    return tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter))


class ActivationStore:
    """The activations of one engine, of graphs of any threads."""

    def __init__(
        self, limits: ActivationLimits, kept: KeptTensors, movement: Movement, notes: list[str]
    ) -> None:
        """
        Args:
            limits: the bytes that there are.
            kept: the tensors that stay as they are.
            movement: brings activations away from where compute happens, and back.
            notes: lines for the user, to append to.
        """
        self.limits = limits
        self._kept = kept
        self.movement = movement
        self._notes = notes
        self._order = SavingOrder()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # Saved tensors that no graph has any more. The garbage collector may find one at any time,
        # in the middle of what needs the lock, too.
        self._forgotten: deque[tuple[Activation, int]] = deque()
        self._keys: dict[Activation, int] = {}  # how many saved tensors each one has
        # By storage, what was brought back, and some of which the slots were given up.
        self._handed_out: dict[int, Activation] = {}
        self._is_open = True
        self.saved_bytes = 0  # so far, of all storages that were new
        # Of the storages that graphs have, wherever their bytes are; and the most there ever were.
        self.alive_bytes = self.peak_alive_bytes = 0
        # Of RAM, what would have been needed to count the largest that found no room.
        self.refused_host_bytes = 0
        self.recomputes = False  # blocks are computed again, so that less is saved
        # Seconds for which compute could not go on so far, in forward and in backward.
        self.pack_s = self.unpack_s = 0.0

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
        began_s = time.perf_counter()
        with self._locked():
            try:
                return self._pack(tensor)
            finally:
                self.pack_s += time.perf_counter() - began_s

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
        saved = SavedActivation(self, activation, next(self._numbers), tensor)
        activation.add(saved.key, tensor)
        self._keys[activation] = self._keys.get(activation, 0) + 1
        return saved

    def _brought_back(self, storage: int) -> Activation | None:
        """The activation that has handed the storage out, and has it still."""
        activation = self._handed_out.get(storage)
        if activation is not None:
            back = activation.back
            if back is not None and back.storage == storage:
                return activation
            del self._handed_out[storage]  # its slots were given up, and the address is another's
        return None

    def _save_again(self, activation: Activation, tensor: torch.Tensor) -> SavedActivation | None:
        """Another saved tensor, a view of what was brought back; None if that was changed since."""
        back = activation.back
        if activation not in self._keys or back is None or back.is_changed:
            return None
        self._keys[activation] += 1
        return SavedActivation(self, activation, next(self._numbers), tensor, activation.begin)

    def _keep(self, tensor: torch.Tensor) -> Activation | None:
        storage = tensor.untyped_storage()
        number, nbytes = next(self._numbers), storage.nbytes()
        activation = Activation(number, nbytes, tensor.shape, storage._cdata)
        refusal = self._make_room(activation)
        if refusal is not None:
            if self.limits.is_strict:
                raise BudgetError(refusal)
            beside = 2 * nbytes if self.movement.file is not None else self.alive_bytes
            self.refused_host_bytes = max(self.refused_host_bytes, beside + nbytes)
            note = "some saved tensors stay in memory that no budget counts: " + refusal
            if not any(line.startswith(note[:40]) for line in self._notes):
                self._notes.append(note)
            return None
        self._kept.add(activation)
        self._order.append(activation)
        self.saved_bytes += activation.nbytes
        self.alive_bytes += activation.nbytes
        self.peak_alive_bytes = max(self.peak_alive_bytes, self.alive_bytes)
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
                kept.hold(other)
        if activation.nbytes > limit:
            return movement.too_large(activation)
        while movement.staying_bytes + activation.nbytes > movement.staying_limit(limit):
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
        began_s = time.perf_counter()
        with self._locked():
            try:
                return self._unpack(saved)
            finally:
                self.unpack_s += time.perf_counter() - began_s

    def _unpack(self, saved: SavedActivation) -> torch.Tensor:
        activation = saved.activation
        if activation.state in _KEPT:
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
            self.movement.read_ahead(self._order.before(activation))

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
            if activation not in self._keys:
                continue  # it was never added, or the store is closed
            activation.tensors.pop(key, None)
            activation.versions.pop(key, None)
            activation.stale.discard(key)
            self._keys[activation] -= 1
            if not self._keys[activation]:
                del self._keys[activation]
                if activation.back is not None:
                    self._handed_out.pop(activation.back.storage, None)
                self._order.remove(activation)
                self.alive_bytes -= activation.nbytes
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
        wanted = self.peak_alive_bytes * 3 // 2 + self.least_host_bytes
        return max(wanted, self.limits.host_bytes) if self.recomputes else wanted

    @property
    def keepable_bytes(self) -> int:
        """What tensors may keep where compute happens."""
        return self.movement.kept_limit(self._kept.largest_bytes)

    @property
    def elsewhere_bytes(self) -> int | None:
        """What may have left; None: any number of bytes, to the file."""
        return None if self.movement.file is not None else self.movement.elsewhere_bytes

    @property
    def moved_bytes(self) -> tuple[int, int, int, int]:
        """Bytes so far: to a device and from it, and read from NVMe and written there."""
        file = self.movement.file
        of_file = (0, 0) if file is None else (file.read_bytes, file.written_bytes)
        return *self.movement.device_bytes, *of_file

    @property
    def own_io_bytes(self) -> tuple[int, int]:
        """Bytes read and written by an I/O engine that is the store's alone."""
        file = self.movement.file
        return (0, 0) if file is None else file.own_io_bytes

    @property
    def own_io_s(self) -> float:
        """Seconds for which that engine was busy."""
        return 0.0 if self.movement.file is None else self.movement.file.own_io_s

    def close(self) -> None:
        """Frees everything; idempotent. Graphs that are left can use what they keep alone."""
        with self._locked():
            if not self._is_open:
                return
            self._is_open = False
            for activation in list(self._order):
                self._order.remove(activation)
                if activation.state is ActivationState.LEAVING:
                    with suppress(HeteroError, OSError):  # where it is then does not matter
                        self.movement.finish_leaving(activation)
                if activation.state is ActivationState.KEPT:
                    self.movement.abandon(activation)
                else:
                    self.movement.drop(activation)
            self._keys.clear()
            self.alive_bytes = 0
            self.movement.close()
