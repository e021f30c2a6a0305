"""One activation: the memory of tensors that autograd saved, wherever its bytes are.

Words. A *saved tensor* is what autograd gave to a saved-tensor hook, and asks for in backward. An
*activation* is a piece of memory that saved tensors view: views and aliases are one activation. It
is *handed out* while backward views the slots to which it was brought back.
"""

from __future__ import annotations

import enum
import itertools
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from offload._native import IoOp
from offload.errors import StaleGraphError
from offload.memory.operation import Transfer
from offload.memory.process_memory import discard_pages
from offload.memory.run_pool import Run
from offload.memory.sizes import format_bytes

_ALIGNMENT = 64  # bytes; no dtype has larger elements
_numbers = itertools.count()


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Counts the references to the Python object of a tensor's storage, and to the storage itself,
    those that this function makes included."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


_OWN = _holders(torch.empty(1, device="cpu"))  # of a storage that one tensor alone has


class ActivationState(enum.Enum):
    """Where an activation's bytes are, and what holds that memory."""

    KEPT = "the tensors themselves, where compute happens"
    LEAVING = "the tensors, and slots in RAM to which a device copies their bytes"
    IN_RAM = "slots in RAM alone"
    WRITING = "slots in RAM, whose bytes are on their way to the file"
    CLEAN = "slots in RAM, and the file, which has the same bytes"
    ON_DISK = "the file alone"
    READING = "the file, and slots in RAM to which the bytes are on their way"
    GONE = "nothing: no graph needs it"


class HandedOut:
    """A flat tensor over slots. All that backward was given of an activation are views of it.

    So they have one version, and one storage, which tells who else has them.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        """`flat`, a pin, is nobody else's yet."""
        self.flat = flat
        self._holders = self._count()

    @property
    def storage(self) -> int:
        """The address of the storage's object."""
        return int(self.flat.untyped_storage()._cdata)

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self.storage))

    @property
    def is_in_use(self) -> bool:
        """Whether a tensor views the bytes, or somebody has changed them, which is to be refused
        as long as the activation lives."""
        return self._count() > self._holders or self.is_changed

    @property
    def is_changed(self) -> bool:
        """Whether somebody has written to a view: the bytes are not the activation's any more."""
        return self.flat._version > 0


_Op = TypeVar("_Op", bound=Transfer)


@dataclass
class SlotCopy(Generic[_Op]):
    """An activation's bytes in slots of RAM, or of a device with memory of its own.

    Attributes:
        run: the slots.
        op: the transfer that brings the bytes, or takes them to the file; None if there is none.
        handed_out: what backward was given of these slots.
    """

    run: Run
    op: _Op | None = None
    handed_out: HandedOut | None = None


@dataclass(eq=False, repr=False)
class Activation:
    """The bytes of one storage that saved tensors view. ActivationStore makes and changes it.

    Attributes:
        nbytes: of the storage, which the tensors keep alive.
        shape: of the first saved tensor, for words.
        storage: the address of the storage's object, as long as the tensors are kept.
        number: activations are numbered in the order of saving; backward needs them in the reverse.
        saved: how many saved tensors graphs have of it.
        tensors: while it is KEPT or LEAVING, by the saved tensor's key an alias of it that nobody
            else has, and its version when it was saved.
        streams: in which the tensors are computed and used, as far as is known.
        stale: keys of those that were changed since; known when the tensors have gone.
        is_counted: whether the tensors' memory is charged. It is not while others hold it, too.
        begin: where in the storage the bytes begin that saved tensors view.
        span: how many bytes those are; 0 as long as it never left.
        in_ram: its copy in slots of RAM.
        extent: its place in the file, in bytes.
        on_device: the copy that came back to a device.
    """

    nbytes: int
    shape: torch.Size
    storage: int
    number: int = field(default_factory=_numbers.__next__)
    state: ActivationState = ActivationState.KEPT
    saved: int = 0
    tensors: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    streams: set[object] = field(default_factory=set)
    stale: set[int] = field(default_factory=set)
    is_counted: bool = False
    begin: int = 0
    span: int = 0
    in_ram: SlotCopy[IoOp] | None = None
    extent: int | None = None
    on_device: SlotCopy[Transfer] | None = None

    @property
    def words(self) -> str:
        """Its name in errors."""
        return (
            f"a saved tensor of shape {tuple(self.shape)} ({format_bytes(self.nbytes)}) that "
            f"backward needs"
        )

    @property
    def is_kept(self) -> bool:
        """Whether saved tensors can be used as they are."""
        return self.state in (ActivationState.KEPT, ActivationState.LEAVING)

    @property
    def back(self) -> HandedOut | None:
        """What was brought back of it to where compute happens, and can be viewed still."""
        copy: SlotCopy[Any] | None = self.in_ram if self.on_device is None else self.on_device
        return None if copy is None else copy.handed_out

    def lost(self, error: OSError) -> OSError:
        """The error of a copy over the link, with what was copied."""
        return OSError(error.errno, f"{self.words}: {error}")

    def add(self, key: int, tensor: torch.Tensor, stream: object) -> None:
        """Another saved tensor views it, saved while `stream` was current (Backend's).

        What is kept is an alias with the same version.
        """
        assert self.state is ActivationState.KEPT
        self.streams.add(stream)
        self.tensors[key] = tensor.detach(), tensor._version

    def forget(self, key: int) -> None:
        """No graph has that saved tensor any more."""
        self.tensors.pop(key, None)
        self.stale.discard(key)
        self.saved -= 1

    def _any_tensor(self) -> torch.Tensor:
        return next(tensor for tensor, _ in self.tensors.values())

    def is_held_by_others(self) -> bool:
        """Whether somebody else keeps its memory: it would not be freed if the tensors went."""
        references, holders = _holders(self._any_tensor())
        # Each alias that is kept here is a holder; one is counted in _OWN.
        return references > _OWN[0] or holders > _OWN[1] + len(self.tensors) - 1

    def kept(self, key: int) -> torch.Tensor:
        """The saved tensor, while it is KEPT or LEAVING. Raises StaleGraphError if it changed.

        It is an alias of the caller's own, so that is_held_by_others() as long as it is used:
        what is kept here would not tell, and its pages would be discarded under its user.
        """
        self.check(key)
        return self.tensors[key][0].detach()

    def check(self, key: int) -> None:
        """Raises StaleGraphError if the saved tensor was changed in place after it was saved."""
        is_back_changed = self.back is not None and self.back.is_changed
        if is_back_changed or key in self.stale or key in self._changed():
            raise StaleGraphError(
                f"{self.words} was modified by an inplace operation after it was saved; do without "
                f"that operation, or call backward before it"
            )

    def _changed(self) -> set[int]:
        """The keys of tensors that are kept and have another version than when they were saved."""
        return {key for key, (kept, version) in self.tensors.items() if kept._version != version}

    def measure(self) -> None:
        """Finds out which bytes of the storage the saved tensors view. No more tensors come."""
        begin, end = self.nbytes, 0
        for tensor, _ in self.tensors.values():
            first = int(tensor.storage_offset()) * tensor.itemsize
            strides = zip(tensor.size(), tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in strides)
            begin, end = min(begin, first), max(end, first + (last + 1) * tensor.itemsize)
        self.begin = begin // _ALIGNMENT * _ALIGNMENT
        self.span = end - self.begin

    def bytes_kept(self) -> torch.Tensor:
        """The bytes that saved tensors view, flat."""
        tensor = self._any_tensor()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return whole.set_(tensor.untyped_storage(), self.begin, (self.span,), (1,))

    def free_pages(self) -> None:
        """Their bytes are elsewhere, and nobody else has their memory, in RAM: its pages go.

        Not those that another library lent to torch, as numpy: it may have them still.
        """
        storage = self._any_tensor().untyped_storage()
        if storage.resizable():
            discard_pages(storage.data_ptr(), storage.nbytes())

    def let_tensors_go(self) -> None:
        """Their bytes are elsewhere: the tensors go, and with them their memory."""
        self.stale |= self._changed()
        self.tensors.clear()


class SavingOrder:
    """A set of activations, in the order in which they were saved: backward goes from its end.

    So the earliest is needed last, and is the first one to be moved, or given up, for others.
    """

    def __init__(self) -> None:
        self._members: list[Activation] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Activation]:
        """The earliest first."""
        return iter(self._members)

    def _index(self, activation: Activation) -> int:
        return bisect_left(self._members, activation.number, key=lambda each: each.number)

    def add(self, activation: Activation) -> None:
        """It is in the set from now on."""
        index = self._index(activation)
        if self._members[index : index + 1] != [activation]:
            self._members.insert(index, activation)

    def discard(self, activation: Activation) -> None:
        """It is not any more."""
        index = self._index(activation)
        if self._members[index : index + 1] == [activation]:
            del self._members[index]

    def before(self, activation: Activation, count: int) -> list[Activation]:
        """The `count` that were saved before it, the last one first: the order of backward."""
        index = self._index(activation)
        return self._members[max(0, index - count) : index][::-1]

    def take(
        self,
        may_be_taken: Callable[[Activation], bool] = lambda _: True,
        before: Activation | None = None,
    ) -> Activation | None:
        """Removes the earliest one that may be taken; None if none was saved before that one."""
        for index, activation in enumerate(self._members):
            if before is not None and activation.number >= before.number:
                return None
            if may_be_taken(activation):
                return self._members.pop(index)
        return None
