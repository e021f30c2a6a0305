"""Compute happens in RAM: tensors and slots share it, and what leaves RAM is in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from hetero.activations.activation import Activation, ActivationState
from hetero.activations.handed_out import HandedOut
from hetero.activations.kept_tensors import KeptTensors
from hetero.activations.limits import ActivationLimits
from hetero.activations.movement.activation_file import ActivationFile
from hetero.activations.movement.movement import MOST_LOOKED_AT, Movement
from hetero.activations.movement.ram_copies import RamCopies
from offload import timeline

# Results and gradients on their way, which no budget counts, are of the size of saved tensors.
_SOON = 2


class InRam(Movement):
    """A saved tensor stays as it is until the budget is needed for others, and is copied then.

    The copy is in slots, from which it is written: so the tensor's memory, which is aligned as the
    disk does not take it, is free at once, and compute goes on while the disk writes. What comes
    back is used in its slots.
    """

    def __init__(
        self,
        limits: ActivationLimits,
        kept: KeptTensors,
        ram: RamCopies,
        file: ActivationFile | None,
        reads_ahead: bool,
        excess: Callable[[int], int],
    ) -> None:
        """As Movement; `excess` says by how many bytes the process is too large, if so many more
        come."""
        super().__init__(limits, kept, ram, file, reads_ahead)
        self._excess = excess

    def kept_limit(self, largest_bytes: int) -> int:
        usable_bytes = self._limits.usable_bytes
        if self.file is None:
            return usable_bytes
        return usable_bytes - self._limits.window_bytes(largest_bytes)

    @property
    def elsewhere_bytes(self) -> int:
        return 0

    def staying_limit(self, limit: int) -> int:
        return limit

    @property
    def staying_bytes(self) -> int:
        return self._kept.nbytes

    def leave(self, activation: Activation) -> bool:
        if self.file is None:
            return False
        activation.measure()
        if not self._ram.take_room(activation):
            return False
        self._ram.view(activation).copy_(activation.bytes_kept())
        activation.free_pages()
        activation.let_tensors_go()
        self._kept.remove(activation)
        self._ram.filled(activation)
        return True

    def finish_leaving(self, activation: Activation) -> None:
        raise AssertionError("what leaves has left at once")

    def wait_for_room(self, nbytes: int) -> bool:
        left = self._limits.usable_bytes - self._kept.nbytes - nbytes
        return left >= 0 and self._ram.shrink_to(left)

    def begin_return(self, activation: Activation, must: bool) -> bool:
        if activation.state is ActivationState.ON_DISK:
            return self._ram.begin_reading(activation, must)
        if must and activation.state is ActivationState.READING:
            self._ram.await_read(activation)
        return True

    def finish_return(self, activation: Activation) -> HandedOut:
        if activation.state is ActivationState.READING:
            with timeline.span("activation"):
                self._ram.finish_reading(activation)
        return self._ram.hand_out(activation)

    def read_ahead(self, upcoming: Iterable[Activation]) -> None:
        self._give_way()
        for activation in islice(upcoming, MOST_LOOKED_AT):
            if not self.begin_return(activation, must=False):
                return

    def settle(self) -> None:
        self._ram.settle()
        self._give_way()

    def _give_way(self) -> None:
        """Lends what the rest of the process needs for now."""
        if self.file is not None:
            largest = self._kept.largest_bytes
            if excess := self._excess(_SOON * largest):
                in_use_bytes = self._kept.nbytes + self._ram.pool.pinned_bytes
                self._limits.lend(excess, largest, in_use_bytes)

    def _drop_copies(self, activation: Activation) -> None:
        self._ram.drop(activation)

    def rest(self) -> None:
        self._limits.lent_bytes = 0
        self._ram.settle()
        self._ram.pool.shrink()

    def close(self) -> None:
        self._ram.finish()
        self._ram.pool.close()
        if self.file is not None:
            self.file.close()
