"""What autograd saves for backward: views of gathered copies are made again, not kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hetero.activations.saved_activation import SavedActivation, has_plain_memory
from hetero.activations.store import ActivationStore
from hetero.runtime.modules.all_params import AllParams
from hetero.runtime.modules.call_stack import is_in_checkpoint, is_recomputing
from hetero.stand_ins.offloaded_tensor import OffloadedTensor
from hetero.state.params import SavedView
from offload.errors import HeteroError, StaleGraphError
from offload.interrupts import uninterrupted

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saved and that is no view of a gathered copy.

    torch does not check the version of what passes through saved-tensor hooks, so this has it.
    """

    tensor: torch.Tensor
    version: int


class SavedTensors:
    """Saved-tensor hooks for the time while modules run, so that forward pins no copies."""

    def __init__(self, params: AllParams, activations: ActivationStore | None = None) -> None:
        """`activations` have what is no view of a gathered copy; None: autograd keeps it."""
        self._params = params
        self._activations = activations

    @property
    def needed(self) -> bool:
        """Whether pack() and unpack() must see what autograd saves."""
        return self._activations is not None or self._params.gathers

    def pack(self, tensor: torch.Tensor) -> SavedTensor | SavedView | SavedActivation:
        """What autograd keeps for `tensor`: for a view of a gathered copy, how to make it again.

        Raises BudgetError, StoreError or an OSError if activations have no room for it.
        """
        view = self.pack_view(tensor)
        if view is not None:
            return view
        if self._activations is not None and self._is_plain(tensor) and has_plain_memory(tensor):
            saved = self._activations.pack(tensor)
            if saved is not None:
                return saved
        return SavedTensor(_without_graph(tensor), tensor._version)

    def pack_view(self, tensor: torch.Tensor) -> SavedView | None:
        """How to make `tensor` again if it is a view of a gathered copy; else None."""
        if not self._is_plain(tensor):
            return None
        packed = (chunk_group.params.pack(tensor) for chunk_group in self._params.chunk_groups)
        return next((view for view in packed if view is not None), None)

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        plain = tensor.layout is torch.strided and not isinstance(tensor, OffloadedTensor)
        return plain and self._params.is_open  # (another thread's hooks stay after an interruption)

    def unpack(self, saved: SavedTensor | SavedView | SavedActivation) -> torch.Tensor:
        """The tensor that was packed.

        Raises StaleGraphError if it was changed since, and what bringing it back meets.
        """
        if isinstance(saved, SavedView):
            return self._gather(saved)
        if isinstance(saved, SavedActivation):
            return saved.unpack()
        if saved.tensor._version != saved.version:
            raise StaleGraphError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was modified "
                f"by an inplace operation (it is at version {saved.tensor._version}, expected "
                f"{saved.version})"
            )
        return saved.tensor

    @uninterrupted
    def _gather(self, view: SavedView) -> torch.Tensor:
        self._params.check_open()
        return self._params.group(view.chunk).params.unpack(view)

    @property
    def are_alone(self) -> bool:
        """Whether autograd asks these hooks, and none around them, of a checkpoint say."""
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        if top is None:
            return not is_in_checkpoint()
        hooks = top(False)
        return hooks is not None and getattr(hooks[0], "__self__", None) is self

    def hooks(self, packing: bool) -> Hooks | None:
        """The hooks that autograd is to ask from here on; None if it asks these already (`packing`:
        a call around this one has entered them), or must not ask them.

        Raises HeteroError where torch allows no such hooks: under torch.func.grad(), say.
        """
        refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if refusal is not None:
            raise HeteroError(
                f"the forward of a managed model keeps what backward needs by saved-tensor hooks, "
                f"and here torch says: {refusal} Use a plain copy of the model: "
                f"copy.deepcopy(model)"
            )
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        if top is None:
            # torch before 2.8 does not tell which hooks are in force. A non-reentrant checkpoint
            # must see all tensors or none, so inside its recomputation no hooks are added: the
            # views that it saves stay pinned.
            return None if packing or is_recomputing() else (self.pack, self.unpack)
        others = top(False)
        if others is None:
            return self.pack, self.unpack
        owner = getattr(others[0], "__self__", None)
        if self is (owner.saved_tensors if isinstance(owner, _OverOthers) else owner):
            return None
        over = _OverOthers(self, others)
        return over.pack, over.unpack


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """An alias, with the same version, that does not keep the node alive that made the tensor.

    The node that saves its own result would keep itself alive, if no backward frees it. (autograd
    gives what is unpacked its node again.)
    """
    return tensor if tensor.grad_fn is None else tensor.detach()


@dataclass(frozen=True)
class _PackedByOthers:
    """What another hook packed."""

    packed: Any


class _OverOthers:
    """Hooks that keep views of gathered copies as SavedView and leave the rest to those that were
    in force: a non-reentrant checkpoint's, torch.autograd.graph.save_on_cpu().

    autograd asks the innermost hooks only. A checkpoint counts the tensors it is given, in forward
    and in recomputation; the views are missing in both, so its count is right.
    """

    def __init__(self, saved_tensors: SavedTensors, others: Hooks) -> None:
        self.saved_tensors = saved_tensors
        self._pack_other, self._unpack_other = others

    def pack(self, tensor: torch.Tensor) -> SavedView | _PackedByOthers:
        """What is kept for `tensor`."""
        view = self.saved_tensors.pack_view(tensor)
        return _PackedByOthers(self._pack_other(tensor)) if view is None else view

    def unpack(self, saved: SavedView | _PackedByOthers) -> torch.Tensor:
        """The tensor that was packed."""
        if isinstance(saved, SavedView):
            return self.saved_tensors.unpack(saved)
        return self._unpack_other(saved.packed)
