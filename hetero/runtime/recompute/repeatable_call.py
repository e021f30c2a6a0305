"""One call of a block that is made again, in backward or to find out whether it can be.

Backward uses the graph of the first call, so all that the second one has to give are the tensors
that the first one saved. A fingerprint is kept of each of them, and the second call's are compared
with these: whatever a forward depends on, other gradients cannot come of it.

(torch's checkpoint compares shapes and dtypes alone, and gives each saved tensor once.)

Random numbers, attributes of its modules and autocast are those that the first call found
(surroundings.py), and afterwards all is as before. Parameters that an optimizer step or a write has
changed since are an error, where torch's checkpoint would use the new values in silence. Lists and
dicts among the arguments are copies as they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hetero.activations.saved_activation import SavedActivation
from hetero.runtime.modules.call_stack import in_own_checkpoint
from hetero.runtime.modules.saved_tensors import SavedTensor, SavedTensors
from hetero.runtime.recompute.arguments import Arguments, nest
from hetero.runtime.recompute.fingerprint import Fingerprint, are_same
from hetero.stand_ins.offloaded_tensor import OffloadedTensor
from hetero.state.chunk_access import SavedView
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
