"""What every way has that activations go away from where compute happens, and come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from hetero.activations.activation import Activation, ActivationState
from hetero.activations.handed_out import HandedOut
from hetero.activations.kept_tensors import KeptTensors
from hetero.activations.limits import ActivationLimits
from hetero.activations.movement.activation_file import ActivationFile
from hetero.activations.movement.ram_copies import RamCopies
from offload.memory.sizes import format_bytes

MOST_LOOKED_AT = 256  # activations, to find the next ones that backward needs


class Movement(ABC):
    """Moves activations between the tensors that autograd saved, slots in RAM, and the file.

    The calling thread keeps others away.
    """

    def __init__(
        self,
        limits: ActivationLimits,
        kept: KeptTensors,
        ram: RamCopies,
        file: ActivationFile | None,
        reads_ahead: bool,
    ) -> None:
        """
        Args:
            limits: the bytes that there are.
            kept: the tensors that have not left.
            ram: those in slots of RAM, or beyond.
            file: where these go from there; None without NVMe.
            reads_ahead: what backward needs next comes back before it is asked for.
        """
        self._limits = limits
        self._kept = kept
        self._ram = ram
        self.file = file
        self.reads_ahead = reads_ahead

    # Away

    @abstractmethod
    def kept_limit(self, largest_bytes: int) -> int:
        """The bytes that tensors may keep where compute happens, if the largest has so many."""

    @abstractmethod
    def staying_limit(self, limit: int) -> int:
        """Of so many, those that may be kept before the earliest begin to leave."""

    @property
    @abstractmethod
    def staying_bytes(self) -> int:
        """Of tensors that do not leave yet."""

    @abstractmethod
    def leave(self, activation: Activation) -> bool:
        """Has a KEPT one, which nobody else holds, begin to leave; False if there is no room.

        Raises NativeIoError, StoreError, BudgetError or another OSError; then it is as before, or
        its bytes are in RAM.
        """

    @abstractmethod
    def finish_leaving(self, activation: Activation) -> None:
        """Waits until one that is LEAVING has left. Raises an OSError; then it is KEPT."""

    @abstractmethod
    def wait_for_room(self, nbytes: int) -> bool:
        """Until tensors of so many bytes more can be kept; False if they cannot. Raises likewise"""

    # Back

    @abstractmethod
    def begin_return(self, activation: Activation, must: bool) -> bool:
        """Starts bringing one that has left back; False if there is no room.

        `must`: backward waits for it, which takes the room of what it needs later.
        """

    @abstractmethod
    def finish_return(self, activation: Activation) -> HandedOut:
        """Waits until it is back; its bytes, where compute happens. Raises an OSError."""

    @abstractmethod
    def read_ahead(self, upcoming: Iterable[Activation]) -> None:
        """Starts bringing back what is `upcoming`, in that order, as far as there is room."""

    # Ends

    @abstractmethod
    def settle(self) -> None:
        """Takes account of transfers that are done."""

    def drop(self, activation: Activation) -> None:
        """No graph needs it: all that it has is free, once no transfer and no tensor uses it."""
        if activation.state is ActivationState.KEPT:
            self.abandon(activation)
            activation.state = ActivationState.GONE
        elif activation.state is not ActivationState.GONE:
            self._drop_copies(activation)

    @abstractmethod
    def _drop_copies(self, activation: Activation) -> None:
        """drop() of what has left, or is LEAVING."""

    def abandon(self, activation: Activation) -> None:
        """Tensors that are kept belong to their graph alone from now on."""
        self._kept.remove(activation)

    @abstractmethod
    def rest(self) -> None:
        """No graph has activations: memory that can be had again at no cost is given back."""

    @abstractmethod
    def close(self) -> None:
        """Waits until nothing is under way, and gives all memory and the file back."""

    # Numbers

    @property
    @abstractmethod
    def elsewhere_bytes(self) -> int:
        """What may be in slots of RAM that is not where compute happens."""

    @property
    def fixed_bytes(self) -> int:
        """Of slots of RAM, what was taken in one piece and is not given back."""
        return 0

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes copied so far to a device with memory of its own, and from it."""
        return 0, 0

    # Words

    def too_large(self, activation: Activation) -> str:
        """Why tensors of its size can never be kept."""
        least = 3 * activation.nbytes if self.file is not None else activation.nbytes
        return (
            f"{activation.words} is too large for activation_memory, "
            f"{_exact(self._limits.host_bytes)}; raise it to {_exact(least)} at least"
        )

    def no_room(self, activation: Activation, saved: int) -> str:
        """Why there is no room for its tensors, beside so many activations."""
        fix = "raise it, or save less (activation checkpointing, smaller micro-batches)"
        if self.file is None:
            fix = "give nvme_path, a directory on NVMe for the rest, or raise it"
        return (
            f"activation_memory, {_exact(self._limits.host_bytes)}, has no room for "
            f"{activation.words}: {self._in_use()} of {saved} activations are in use; {fix}"
        )

    def no_way_back(self, activation: Activation) -> str:
        """Why there is no room to bring it back."""
        return (
            f"activation_memory, {_exact(self._limits.host_bytes)}, has no room to bring back "
            f"{activation.words}: {self._in_use()} are in use, of tensors that one step of "
            f"backward has together; raise it"
        )

    def _in_use(self) -> str:
        kept = format_bytes(self._kept.nbytes)
        slots = format_bytes(self._ram.pool.used_bytes + self._ram.pool.pinned_bytes)
        return f"{kept} in tensors and {slots} in slots"


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"
