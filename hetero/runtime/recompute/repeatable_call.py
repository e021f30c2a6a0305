"""One call of a block that is made again, in backward or to find out whether it can be.

Backward uses the graph of the first call, so all that the second one has to give are the tensors
that the first one saved. A fingerprint is kept of each of them, and the second call's are compared
with these: whatever a forward depends on, other gradients cannot come of it. (torch's checkpoint
compares shapes and dtypes alone, and gives each saved tensor once.) A fingerprint reads each byte
once and keeps next to nothing. In RAM it is a CRC, which costs a core about a nanosecond for 15
bytes. On a device it is sums along rows and columns of the tensor's words, which stay there, so
nothing waits.

Random numbers, attributes of its modules and autocast are those that the first call found
(call_record.py), and afterwards all is as before. Parameters that an optimizer step or a write has
changed since are an error, where torch's checkpoint would use the new values in silence. Lists and
dicts among the arguments are copies as they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hetero.activations.store import SavedActivation, has_plain_memory
from hetero.runtime.modules.call_stack import in_own_checkpoint
from hetero.runtime.modules.saved_tensors import SavedTensor, SavedTensors
from hetero.runtime.recompute.call_record import Arguments, nest
from hetero.stand_ins.offloaded_tensor import OffloadedTensor
from hetero.state.chunk_access import SavedView
from offload._native import crc32c
from offload.errors import HeteroError

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


_PACKED = (SavedActivation, SavedTensor, SavedView)


class _EnoughError(Exception):
    """The rest of the call need not be computed: all tensors are there, or one is another one."""


class _Saved:
    """One tensor that the first call saved: its number, and its value while a backward has it."""

    __slots__ = ("__weakref__", "backward", "number", "value")

    def __init__(self, number: int) -> None:
        self.number = number
        self.value: torch.Tensor | None = None
        self.backward = -1  # the number of the backward that `value` was computed in


class RepeatableCall:
    """A call, and what it takes to make it again. It lives as long as the graph that needs it."""

    def __init__(
        self,
        arguments: Arguments,
        saved_tensors: SavedTensors,
        again: Callable[[Args, Kwargs], object],
        differed: Callable[[], HeteroError],
    ) -> None:
        """
        Args:
            arguments: of the call.
            saved_tensors: the hooks in force around the call.
            again: makes the call with such arguments, all else as the first call has found it.
            differed: is told that the second call was another one; gives the error to raise.
        """
        self._saved_tensors = saved_tensors
        self._again = again
        self._differed = differed
        self._spec = arguments.spec
        self._leaves = list(arguments.leaves)
        self._need_grad = [isinstance(x, torch.Tensor) and x.requires_grad for x in self._leaves]
        self._saved: list[weakref.ref[_Saved]] = []
        self._fingerprints: list[Fingerprint] = []

    @property
    def is_known(self) -> bool:
        """Whether the bits of all saved tensors can be compared."""
        return all(each.is_known for each in self._fingerprints)

    @property
    def is_in_ram(self) -> bool:
        """Whether all saved tensors are there, where no operation is without an order."""
        return all(each.sums is None for each in self._fingerprints)

    def kept(self, plain: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """What plain(*args, **kwargs) returns, which saves what it saves."""
        # The graph refers to its hooks. If they referred to this call, and so to its arguments, the
        # graph would refer to itself by an argument that the call fills, a cache say.
        saved_tensors, fingerprints = self._saved_tensors, self._fingerprints

        def pack(tensor: torch.Tensor) -> Any:
            if not isinstance(view := saved_tensors.pack(tensor), SavedView):
                fingerprints.append(Fingerprint.of(tensor))
            return view

        with saved_tensors_hooks(pack, self._saved_tensors.unpack):
            return plain(*args, **kwargs)

    def unkept(self, plain: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """What plain(*args, **kwargs) returns, which saves its arguments alone."""
        self._leaves = [self._saved_tensors.pack(x) if _can_pack(x) else x for x in self._leaves]
        with in_own_checkpoint(again=False), saved_tensors_hooks(self._pack, self._unpack):
            return plain(*args, **kwargs)

    def gives_the_same(self) -> bool:
        """Whether a second call, right after kept(), saves the same bits."""
        return self._values(self._leaves) is not None

    def _pack(self, tensor: torch.Tensor) -> _Saved | SavedView:
        view = self._saved_tensors.pack_view(tensor)
        if view is not None:
            return view
        saved = _Saved(len(self._saved))
        self._saved.append(weakref.ref(saved))
        self._fingerprints.append(Fingerprint.of(tensor))
        return saved

    def _unpack(self, saved: _Saved | SavedView) -> torch.Tensor:
        if isinstance(saved, SavedView):
            return self._saved_tensors.unpack(saved)
        backward = torch._C._current_graph_task_id()
        value = saved.value
        if value is None or saved.backward != backward:
            values = self._values([self._unpacked(each) for each in self._leaves])
            if values is None:
                raise self._differed()
            value = values[saved.number]
            if backward != -1:  # (else somebody looks into the graph)
                self._give(values, backward)
        return value

    def _unpacked(self, leaf: Any) -> Any:
        return self._saved_tensors.unpack(leaf) if type(leaf) in _PACKED else leaf

    def _give(self, values: list[torch.Tensor], backward: int) -> None:
        """Nodes of the graph have the values, each until it was used, and none after backward."""
        for reference, value in zip(self._saved, values, strict=True):
            saved = reference()
            if saved is not None:
                saved.value, saved.backward = value, backward
        torch.autograd.Variable._execution_engine.queue_callback(self._take_back)

    def _take_back(self) -> None:
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                saved.value = None

    def _values(self, leaves: list[Any]) -> list[torch.Tensor] | None:
        """What a second call saves; None if it is not what the first one has saved."""
        expected = list(self._fingerprints)  # so far, if the first call asks in its middle
        found: list[Fingerprint] = []
        values: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> Any:
            view = self._saved_tensors.pack_view(tensor)
            if view is not None:
                return view
            is_other = False
            if len(found) < len(expected):  # (if not, somebody has caught what is raised below)
                found.append(Fingerprint.of(tensor))
                values.append(tensor.detach() if tensor.requires_grad else tensor)
                is_other = not found[-1].may_be(expected[len(found) - 1])
            if is_other or len(found) == len(expected):
                raise _EnoughError
            return values[-1]

        args, kwargs = nest(list(map(_as_argument, leaves, self._need_grad)), self._spec)
        try:
            with (
                in_own_checkpoint(again=True),
                torch.enable_grad(),
                saved_tensors_hooks(pack, self._unpack_again),
            ):
                self._again(args, kwargs)
        except _EnoughError:
            pass
        return values if are_same(found, expected) else None

    def _unpack_again(self, packed: Any) -> Any:
        """For a call that differentiates something in its middle."""
        return self._saved_tensors.unpack(packed) if isinstance(packed, SavedView) else packed


def _can_pack(leaf: Any) -> bool:
    is_own = isinstance(leaf, OffloadedTensor)
    return isinstance(leaf, torch.Tensor) and not is_own and not leaf.is_inference()


def _as_argument(leaf: Any, needs_grad: bool) -> Any:
    """A leaf of the second call's own graph."""
    if not isinstance(leaf, torch.Tensor) or (leaf.is_leaf and leaf.requires_grad == needs_grad):
        return leaf
    return leaf.detach().requires_grad_(needs_grad)


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
