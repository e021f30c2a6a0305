"""Fingerprints of tensors: they tell whether a call that is made again has the same bits.

A fingerprint is made at each saved tensor of a call, twice, so it reads each byte once and keeps
next to nothing. In RAM it is a CRC, which costs a core about a nanosecond for 15 bytes. On a device
it is sums along rows and columns of the tensor's words, which stay there, so nothing waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from hetero.activations.saved_activation import has_plain_memory
from offload._native import crc32c

_COLUMNS = 1021  # of words on a device; a prime, so that a tensor's own rows are not these rows
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class Fingerprint:
    """What tells a tensor from others.

    Attributes:
        form: its shape, strides and dtype, or which parameter it views.
        bits: the checksum of its bytes in RAM; 0 if it has none there.
        sums: of its words, on its device; None if it is in RAM.
        is_known: whether the bits count. Those of sparse tensors and of tensors' subclasses do not.
    """

    form: Hashable
    bits: int = 0
    sums: torch.Tensor | None = None
    is_known: bool = True

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Fingerprint:
        """That of a tensor as it is now."""
        leaf = _parameter(tensor)
        if leaf is not None:  # its versions are compared, which is cheaper
            place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            return cls((id(leaf), place))
        form: tuple[Hashable, ...] = (tuple(tensor.shape), tensor.dtype, tensor.device)
        if tensor.layout is not torch.strided or not has_plain_memory(tensor):
            is_known = tensor.layout is torch.strided and not tensor.numel()
            return cls((type(tensor), *form), is_known=is_known)
        form = (*form, tensor.stride())
        tensor = _without_gaps(tensor.detach())
        if tensor.device.type == "cpu":
            return cls(form, crc32c(tensor.data_ptr(), tensor.nbytes))
        return cls(form, sums=sums_of(tensor))

    def may_be(self, other: Fingerprint) -> bool:
        """Whether both may be of tensors with the same bits, as far as is known in RAM."""
        return (self.form, self.bits) == (other.form, other.bits)


def are_same(first: Sequence[Fingerprint], second: Sequence[Fingerprint]) -> bool:
    """Whether as many tensors have the same bits; waits for a device if they are on one."""
    if len(first) != len(second):
        return False
    pairs = list(zip(first, second, strict=True))
    if not all(a.may_be(b) for a, b in pairs):
        return False
    sums = [(a.sums, b.sums) for a, b in pairs if a.sums is not None and b.sums is not None]
    devices = {a.device for a, _ in sums}
    return all(
        torch.equal(
            torch.cat([a for a, _ in sums if a.device == device]),
            torch.cat([b for _, b in sums if b.device == device]),
        )
        for device in devices
    )


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of a tensor's words along rows and columns, flat; its memory has no gaps."""
    size = next(s for s in _WORDS if tensor.nbytes % s == 0 and _begins_at(tensor) % s == 0)
    flat = torch.empty(0, dtype=_WORDS[size], device=tensor.device)
    flat.set_(tensor.untyped_storage(), _begins_at(tensor) // size, (tensor.nbytes // size,), (1,))
    whole = len(flat) // _COLUMNS * _COLUMNS
    rows = flat[:whole].view(-1, _COLUMNS)
    parts = (rows.sum(0), rows.sum(1)) if whole else ()
    return torch.cat([*parts, flat[whole:].to(torch.int64)])


def _begins_at(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _parameter(tensor: torch.Tensor) -> torch.Tensor | None:
    """The parameter that a tensor is, or views."""
    for each in (tensor, tensor._base):
        if isinstance(each, torch.nn.Parameter):
            return each
    return None


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same elements whose memory is one piece: a view if there is one."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # of an expanded one each element once
            tensor = tensor.narrow(dim, 0, 1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor
