"""What autograd saves for backward: views of gathered copies are made again, not kept.

A view of a gathered copy is saved as chunk, version, size, stride and offset. torch does not check
versions of tensors that pass through saved-tensor hooks, so these hooks do: a backward after an
optimizer step raises StaleGraphError in place of giving a wrong number. Tensors that a reentrant
checkpoint computes again are saved the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint_module

from hetero.activations.store import ActivationStore, SavedActivation, has_plain_memory
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.stand_ins.offloaded_tensor import OffloadedTensor
from hetero.stand_ins.parameter_classes import AbsentParameter, memory_in
from hetero.state.chunk_access import SavedView
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

    def __init__(self, params: ParamRegistry, activations: ActivationStore | None = None) -> None:
        """`activations` have what is no view of a gathered copy; None: autograd keeps it."""
        self._params = params
        self._activations = activations

    @property
    def needed(self) -> bool:
        """Whether pack() and unpack() must see what autograd saves."""
        return self._must_see or any(
            chunk_group.params.may_change_in_backward(chunk)
            for chunk_group in self._params.chunk_groups
            for chunk in chunk_group.layout.chunks
        )

    @property
    def _must_see(self) -> bool:
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
        kept = self.pinning(tensor)
        if kept.grad_fn is not None:
            # An alias: a node that saves its own result would keep itself alive if no backward
            # frees it. (autograd gives what is unpacked its node again.)
            kept = kept.detach()
        return SavedTensor(kept, tensor._version)

    def pinning(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor; of a parameter that may change in place in backward an alias, which pins its
        home: no such update begins."""
        managed = self._params.known(tensor) if isinstance(tensor, torch.nn.Parameter) else None
        if managed is None:
            return tensor
        access = self._params.group(managed.chunk).params
        return memory_in(tensor) if access.may_change_in_backward(managed.chunk) else tensor

    def pack_view(self, tensor: torch.Tensor) -> SavedView | None:
        """How to make `tensor` again if it is a view of a gathered copy, or a parameter that is
        absent, which a user's torch.autograd.Function saves; else None."""
        if not self._is_plain(tensor):
            return None
        if isinstance(tensor, AbsentParameter):  # autograd would alias what it has for its values
            managed = self._params.known(tensor)
            if managed is None:
                return None
            stride = torch.empty(tensor.shape, device="meta").stride()
            offset = managed.slice.offset
            return SavedView(managed.chunk, managed.version, tensor.shape, stride, offset)
        for chunk_group in self._params.chunk_groups:
            view = chunk_group.params.pack(tensor)
            if view is not None:
                return view
        return None

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
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and getattr(hooks[0], "__self__", None) is self

    def hooks(self) -> Hooks | None:
        """The hooks that autograd is to ask from here on; None if it asks these already, or must
        not ask them.

        Raises HeteroError where torch allows no such hooks: under torch.func.grad(), say.
        """
        refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if refusal is not None and not self._must_see:
            return None
        if refusal is not None:
            raise HeteroError(
                f"the forward of a managed model keeps what backward needs by saved-tensor hooks, "
                f"and here torch says: {refusal} Use a plain copy of the model: "
                f"copy.deepcopy(model)"
            )
        others = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if others is None:
            return self.pack, self.unpack
        owner = getattr(others[0], "__self__", None)
        if self is (owner.saved_tensors if isinstance(owner, _OverOthers) else owner):
            return None
        over = _OverOthers(self, others)
        return over.pack, over.unpack


@dataclass(frozen=True)
class _Packed:
    """What other hooks packed, and the view of a gathered copy in whose place they were given
    _MARK, if it is one."""

    by_others: Any
    view: SavedView | None


# No other tensor has this shape and dtype, which a checkpoint compares, and no operator takes it
# for another one's.
_MARK = torch.empty(0, 65521, dtype=torch.uint8, device="cpu")


class _OverOthers:
    """Hooks that keep views of gathered copies as SavedView and leave the rest to those that were
    in force: a non-reentrant checkpoint's, torch.autograd.graph.save_on_cpu().

    autograd asks the innermost hooks only. A checkpoint is given a mark for each view, because the
    view, too, has to be asked of it first: a backward node that has a weight in hands when it asks
    for its input, which the checkpoint then recomputes, would pin one more chunk than forward.
    """

    def __init__(self, saved_tensors: SavedTensors, others: Hooks) -> None:
        self.saved_tensors = saved_tensors
        self._pack_other, self._unpack_other = others
        plain: Any = inspect.unwrap(self._pack_other)
        code: CodeType | None = getattr(plain, "__code__", None)
        self._is_checkpoint = code is not None and code.co_filename == checkpoint_module.__file__
        self._variables: dict[str, Any] = {}
        if code is not None and self._is_checkpoint:
            cells = [cell.cell_contents for cell in plain.__closure__ or ()]
            self._variables.update(zip(code.co_freevars, cells, strict=True))

    def pack(self, tensor: torch.Tensor) -> SavedView | _Packed:
        """What is kept for `tensor`."""
        view = self.saved_tensors.pack_view(tensor)
        if view is None:
            return _Packed(self._pack_other(self.saved_tensors.pinning(tensor)), None)
        if not self._is_checkpoint:
            return view
        if self._had_values():
            return _Packed(self._pack_other(tensor.detach().clone()), None)  # a copy pins nothing
        return _Packed(self._pack_other(_MARK), view)

    def unpack(self, saved: SavedView | _Packed) -> torch.Tensor:
        """The tensor that was packed."""
        if isinstance(saved, SavedView):
            return self.saved_tensors.unpack(saved)
        by_others = self._unpack_other(saved.by_others)
        return by_others if saved.view is None else self.saved_tensors.unpack(saved.view)

    def _had_values(self) -> bool:
        """Whether the checkpoint that recomputes was given in forward what it is given now, and no
        mark: a module's own parameter, in a function of that module's which is checkpointed, is in
        memory then, so that no hook of ours is asked, and is absent now.

        torch does not tell. Where it keeps this elsewhere a mark is packed, which the checkpoint
        finds to be another tensor than in forward: an error, and no wrong value.
        """
        try:
            frame = self._variables["target_frame_ref"]()
            number: int = frame.recomp_counter[self._variables["gid"]]
            in_forward, of_mark = frame.x_metadatas, frame.metadata_fn(_MARK)
        except (AttributeError, KeyError, TypeError):  # TypeError: no metadata_fn, or no frame
            return False
        return number < len(in_forward) and bool(in_forward[number] != of_mark)
