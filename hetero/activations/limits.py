"""How much memory activations may have, and which of them are worth a transfer."""

from __future__ import annotations

from dataclasses import dataclass

from offload.memory.sizes import PAGE_BYTES

_SLOTS = 1024  # about so many in all: what a run wastes at its end is then little
_MAX_SLOT_BYTES = 2 << 20  # a huge page
# A transfer of n bytes costs Python about 0.1 ms and the disk as much until the first byte comes.
# At 2 GB/s that is 400 KB: below, most of the time moves nothing. With little memory less is worth
# it, or what stays would fill it.
_LEAST_BYTES = 256 << 10
_LEAST_SHARE = 64
# Of RAM that compute uses in place, for slots: bytes on their way to the file, and back.
_WINDOW_SHARE = 4
# The saved tensors of its size that a device's slots must hold together for one to leave.
_HANDFUL = 8
_KEPT_SHARE = 2
_LEAST_KEPT = 8  # one part in so many is never lent


@dataclass
class ActivationLimits:
    """Bytes that activations may have, and what follows from them.

    Attributes:
        host_bytes: of RAM, saved tensors and slots together. It changes between steps if nobody
            has chosen it.
        device_bytes: of a device with memory of its own, likewise; 0 without one.
        is_strict: whether a saved tensor without room is an error. If not, it is left to autograd,
            in memory that no budget counts.
        lent_bytes: of RAM where compute happens, what others in the process need for now.
    """

    host_bytes: int
    device_bytes: int = 0
    is_strict: bool = True
    lent_bytes: int = 0

    @property
    def kept_device_bytes(self) -> int:
        """Of `device_bytes`, what tensors may keep; the rest is for slots to which activations come
        back."""
        return self.device_bytes // _KEPT_SHARE

    @property
    def usable_bytes(self) -> int:
        """Of RAM where compute happens, what is not lent."""
        return self.host_bytes - self.lent_bytes

    def lend(self, nbytes: int, largest_bytes: int, in_use_bytes: int) -> None:
        """So many bytes more are others', as far as there is room left for the largest saved
        tensor, on its way and in use. What is in use now leaves through slots, so there is room
        for those; it is less than window_bytes(), so some does leave and more can be lent."""
        least = max(self.host_bytes // _LEAST_KEPT, 3 * largest_bytes)
        most = self.host_bytes - max(least, in_use_bytes + largest_bytes + largest_bytes // 2)
        self.lent_bytes = max(self.lent_bytes, min(self.lent_bytes + nbytes, most))

    def slot_bytes(self, nbytes: int) -> int:
        """The size of the slots of so many bytes: a power of two, and whole pages."""
        wanted = max(1, nbytes // _SLOTS)
        return min(_MAX_SLOT_BYTES, max(PAGE_BYTES, 1 << (wanted.bit_length() - 1)))

    def window_bytes(self, largest_bytes: int) -> int:
        """What of RAM where compute happens saved tensors leave to slots, if some may leave.

        Two of the largest fit: one on its way, and one that backward waits for.
        """
        return max(self.usable_bytes // _WINDOW_SHARE, 2 * largest_bytes)

    def may_leave(self, nbytes: int) -> bool:
        """Whether an activation of that size is worth a transfer, and can come back.

        A device's slots are half of its part, and one operator's backward may need a handful. Where
        the user has given a number, that they do not fit is an error.
        """
        if self.device_bytes and not self.is_strict and nbytes * _HANDFUL > self.kept_device_bytes:
            return False
        compute_bytes = self.device_bytes or self.host_bytes
        return nbytes >= min(_LEAST_BYTES, compute_bytes // _LEAST_SHARE)
