"""One activation: the memory of tensors that autograd saved, wherever its bytes are.

Words. A *saved tensor* is what autograd gave to a saved-tensor hook, and asks for in backward. An
*activation* is a piece of memory that saved tensors view: views and aliases are one activation.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field

import torch

from hetero.activations.handed_out import HandedOut
from offload.errors import StaleGraphError
from offload.memory.c_heap import discard_pages
from offload.memory.operation import Transfer
from offload.memory.run_pool import Run
from offload.memory.sizes import format_bytes

_ALIGNMENT = 64  # bytes; no dtype has larger elements


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many references there are to the Python object of a tensor's storage, and to the storage
    itself, those that this function makes included."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


_OWN = _holders(torch.empty(1))  # of a storage that one tensor alone has


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


@dataclass
class DeviceCopy:
    """The bytes in slots of a device with memory of its own, and the copy that brings them."""

    run: Run
    op: Transfer
    handed_out: HandedOut | None = None


@dataclass(eq=False, repr=False)
class Activation:
    """The bytes of one storage that saved tensors view. ActivationStore makes and changes it.

    Attributes:
        number: activations are numbered in the order of saving; backward needs them in the reverse.
        nbytes: of the storage, which the tensors keep alive.
        shape: of the first saved tensor, for words.
        storage: the address of the storage's object, as long as the tensors are kept.
        tensors: while it is KEPT or LEAVING, by the saved tensor's key an alias of it that nobody
            else has.
        versions: by key, the saved tensor's version when it was saved.
        stale: keys of those that were changed since; known when the tensors have gone.
        is_counted: whether the tensors' memory is charged. It is not while others hold it, too.
        begin: where in the storage the bytes begin that saved tensors view.
        span: how many bytes those are; 0 as long as it never left.
        run: its slots in RAM.
        handed_out: what was given to backward of these slots, where compute happens in RAM.
        extent: its place in the file, in bytes.
        op: the transfer that `state` speaks of.
        on_device: the copy that came back to a device.
        earlier, later: its neighbours in the order of saving.
    """

    number: int
    nbytes: int
    shape: torch.Size
    storage: int
    state: ActivationState = ActivationState.KEPT
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)
    is_counted: bool = False
    begin: int = 0
    span: int = 0
    run: Run | None = None
    handed_out: HandedOut | None = None
    extent: int | None = None
    op: Transfer | None = None
    on_device: DeviceCopy | None = None
    earlier: Activation | None = None
    later: Activation | None = None

    @property
    def words(self) -> str:
        """Its name in errors."""
        return (
            f"a saved tensor of shape {tuple(self.shape)} ({format_bytes(self.nbytes)}) that "
            f"backward needs"
        )

    @property
    def back(self) -> HandedOut | None:
        """What was brought back of it to where compute happens, and can be viewed still."""
        return self.handed_out if self.on_device is None else self.on_device.handed_out

    def lost(self, error: OSError) -> OSError:
        """The error of a copy over the link, with what was copied."""
        return OSError(error.errno, f"{self.words}: {error}")

    def add(self, key: int, tensor: torch.Tensor) -> None:
        """Another saved tensor views it; what is kept is an alias with the same version."""
        assert self.state is ActivationState.KEPT
        self.tensors[key] = tensor.detach()
        self.versions[key] = tensor._version

    def is_held_by_others(self) -> bool:
        """Whether somebody else keeps its memory: it would not be freed if the tensors went."""
        references, holders = _holders(next(iter(self.tensors.values())))
        # Each alias that is kept here is a holder; one is counted in _OWN.
        return references > _OWN[0] or holders > _OWN[1] + len(self.tensors) - 1

    def kept(self, key: int) -> torch.Tensor:
        """The saved tensor, while it is KEPT or LEAVING. Raises StaleGraphError if it changed.

        It is an alias of the caller's own, so that is_held_by_others() as long as it is used:
        what is kept here would not tell, and its pages would be discarded under its user.
        """
        self.check(key)
        return self.tensors[key].detach()

    def check(self, key: int) -> None:
        """Raises StaleGraphError if the saved tensor was changed in place after it was saved."""
        tensor = self.tensors.get(key)
        changed = self.back is not None and self.back.is_changed
        if (
            changed
            or key in self.stale
            or (tensor is not None and tensor._version != self.versions[key])
        ):
            raise StaleGraphError(
                f"{self.words} was modified by an inplace operation after it was saved; do without "
                f"that operation, or call backward before it"
            )

    def measure(self) -> None:
        """Finds out which bytes of the storage the saved tensors view. No more tensors come."""
        begin, end = self.nbytes, 0
        for tensor in self.tensors.values():
            first = int(tensor.storage_offset()) * tensor.itemsize
            strides = zip(tensor.size(), tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in strides)
            begin, end = min(begin, first), max(end, first + (last + 1) * tensor.itemsize)
        self.begin = begin // _ALIGNMENT * _ALIGNMENT
        self.span = end - self.begin

    def bytes_kept(self) -> torch.Tensor:
        """The bytes that saved tensors view, flat."""
        tensor = next(iter(self.tensors.values()))
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return whole.set_(tensor.untyped_storage(), self.begin, (self.span,), (1,))

    def free_pages(self) -> None:
        """Their bytes are elsewhere, and nobody else has their memory, in RAM: its pages go.

        Not those that another library lent to torch, as numpy: it may have them still.
        """
        storage = next(iter(self.tensors.values())).untyped_storage()
        if storage.resizable():
            discard_pages(storage.data_ptr(), storage.nbytes())

    def let_tensors_go(self) -> None:
        """Their bytes are elsewhere: the tensors go, and with them their memory."""
        self.stale |= {k for k, t in self.tensors.items() if t._version != self.versions[k]}
        self.tensors.clear()
