"""Finding the moments at which a parameter is needed."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.modules.module as modules
import torch.utils.checkpoint as checkpoint_module
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hetero.runtime.all_params import AllParams
from hetero.runtime.to_device import to_device
from hetero.runtime.uses_outside_owner import BareUses
from hetero.state.managed_param import ManagedParam
from hetero.state.params import SavedView
from offload.errors import HeteroError


@dataclass
class _Entered:
    module: torch.nn.Module
    frame: FrameType  # of the call; a call that is not on the stack any more was interrupted
    acquired: list[ManagedParam]
    contexts: ExitStack
    packing: bool = False


def _callers() -> Iterator[FrameType]:
    """The frames of the calls that are running, innermost first.

    A frame must not be kept in a variable of its own: that cycle would keep all locals of all
    callers, activations among them, until the garbage collector comes.
    """
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _module_call() -> FrameType:
    """The frame of the innermost module's call, from within one of its hooks."""
    return next(frame for frame in _callers() if frame.f_code.co_filename == modules.__file__)


def _recomputing() -> bool:
    """Whether a non-reentrant checkpoint is being recomputed, as the stack of calls tells."""
    for frame in _callers():
        if frame.f_code.co_filename == checkpoint_module.__file__:
            if frame.f_code.co_name == "unpack_hook":
                return True
            if frame.f_code.co_name == "backward":  # a reentrant one's
                return False
    return False


_CPU = torch.device("cpu")


def inside_another_backward() -> bool:
    """Whether the backward that runs was called by a node of another one, as the stack tells.

    Such a node may have taken values out of what it saved, which no version protects any more. A
    reentrant checkpoint does not count: it has none of parameters. In a thread that autograd has
    started, as for a device, the outermost call has no frame.
    """
    depth = int(isinstance(threading.current_thread(), threading._DummyThread))
    for frame in _callers():
        code = frame.f_code
        if code.co_filename == torch.autograd.__file__:
            depth += code.co_name in ("backward", "grad")
        elif code.co_filename == checkpoint_module.__file__:
            depth -= code.co_name == "backward"
    return depth > 1


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True)
class _Others:
    """What somebody else's hook packed."""

    packed: Any


class _OverOthers:
    """Saved-tensor hooks that keep views of gathered copies as SavedView and leave the rest to
    those that were in force: a non-reentrant checkpoint's, torch.autograd.graph.save_on_cpu().

    autograd asks the innermost hooks only. A checkpoint counts the tensors it is given, in forward
    and in recomputation; the views are missing in both, so its count is right.
    """

    def __init__(self, params: AllParams, others: Hooks) -> None:
        self.params = params
        self._pack_other, self._unpack_other = others

    def pack(self, tensor: torch.Tensor) -> SavedView | _Others:
        """What is kept for `tensor`."""
        saved = self.params.pack(tensor)
        return saved if isinstance(saved, SavedView) else _Others(self._pack_other(tensor))

    def unpack(self, saved: SavedView | _Others) -> torch.Tensor:
        """The tensor that was packed."""
        if isinstance(saved, SavedView):
            return self.params.unpack(saved)
        return self._unpack_other(saved.packed)


class ModuleHooks:
    """Brings a module's own parameters in before its forward and lets them go afterwards.

    While they run, autograd saves views of gathered copies as SavedView (Params.pack), so that a
    forward holds no copies for the backward.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        find: Callable[[torch.Tensor], ManagedParam | None],
        params: AllParams,
        dtype: torch.dtype,
        before_forward: Callable[[], None],
        device: torch.device = _CPU,
        all_modules: bool = False,
    ) -> None:
        """`before_forward` is called before each forward of the whole model, outside of others.

        Compute happens on `device`. `all_modules`: also resident parameters are acquired, because
        they may be absent until their update is made.
        """
        self._device = device
        self._find = find
        self._params = params
        self._dtype = dtype
        self._before_forward = before_forward
        self._all_modules = all_modules
        # What each hooked module needs; the lists are what its hooks have.
        self._needed: weakref.WeakKeyDictionary[torch.nn.Module, list[ManagedParam]]
        self._needed = weakref.WeakKeyDictionary()
        self._entered: list[_Entered] = []
        self._handles: list[RemovableHandle] = []
        self.cover(model)
        self._handles.append(
            model.register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)
        )

    def cover(self, model: torch.nn.Module) -> None:
        """Follows parameters that have got another home, and modules that the model has got."""
        for module in model.modules():
            params = (p for p in module._parameters.values() if p is not None)
            own = [m for p in params if (m := self._find(p)) is not None]
            needed = [m for m in own if self._all_modules or not self._params.is_resident(m.chunk)]
            if module in self._needed:
                self._needed[module][:] = needed
            elif needed or module is model:
                self._needed[module] = needed
                self._hook(module, needed)

    def _hook(self, module: torch.nn.Module, needed: list[ManagedParam]) -> None:
        self._handles.append(module.register_forward_pre_hook(partial(self._before, needed)))
        # always_call: after an exception too, so that nothing stays acquired.
        self._handles.append(module.register_forward_hook(self._after, always_call=True))

    # torch.compile must not trace into what moves parameters: here its graphs end. (This is the
    # lazy form of torch.compiler.disable; importing the compiler takes a second.)

    @_disable_dynamo
    def _before(self, needed: list[ManagedParam], module: torch.nn.Module, args: Any) -> None:
        self._enter(module, needed)

    @_disable_dynamo
    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._exit(module)

    def _enter(self, module: torch.nn.Module, needed: list[ManagedParam]) -> None:
        entered = _Entered(module, _module_call(), [], ExitStack())
        self._entered.append(entered)
        for managed in needed:
            self._params.acquire(managed)
            entered.acquired.append(managed)
        if len(self._entered) == 1 and (self._params.gathers or self._all_modules):
            entered.contexts.enter_context(BareUses(self._find, self._params))
        if not self._params.packs:
            return
        hooks = self._saved_tensor_hooks()
        if hooks is not None:
            entered.contexts.enter_context(saved_tensors_hooks(*hooks))
            entered.packing = True

    def _saved_tensor_hooks(self) -> Hooks | None:
        """What autograd is to ask from here on; None if it asks ours already, or must ask none."""
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        if top is None:
            # torch before 2.8 cannot tell. Ours we know; of others those of a non-reentrant
            # checkpoint matter, which must see all tensors if it sees any; they stay pinned.
            asked = any(entered.packing for entered in self._entered) or _recomputing()
            return None if asked else (self._params.pack, self._params.unpack)
        others = top(False)
        if others is None:
            return self._params.pack, self._params.unpack
        owner = getattr(others[0], "__self__", None)
        if self._params is (owner.params if isinstance(owner, _OverOthers) else owner):
            return None
        over = _OverOthers(self._params, others)
        return over.pack, over.unpack

    def _exit(self, module: torch.nn.Module) -> None:
        # After an exception torch runs these hooks from the inside out, so the last entered is
        # ours, unless our own enter was never reached.
        if not self._entered or self._entered[-1].module is not module:
            return
        self._leave(self._entered.pop())

    def _leave(self, entered: _Entered) -> None:
        entered.contexts.close()
        for managed in entered.acquired:
            self._params.release(managed)

    @property
    def running(self) -> bool:
        """Whether a forward is going on."""
        self.unwind()
        return bool(self._entered)

    def unwind(self) -> None:
        """Leaves forwards that Ctrl-C ended: torch calls no hook for what is not an Exception."""
        running = {id(frame) for frame in _callers()} if self._entered else set()
        while self._entered and id(self._entered[-1].frame) not in running:
            self._leave(self._entered.pop())

    @_disable_dynamo
    def _begin(self) -> None:
        self.unwind()
        if not self._entered:
            self._before_forward()

    def __deepcopy__(self, memo: Any) -> ModuleHooks:
        raise HeteroError(
            "a managed model cannot be deep-copied: its state lives in the engine; build a second "
            "model and load model.state_dict() into it, or use hetero.masters()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HeteroError(
            "a managed model cannot be pickled: its state lives in the engine; save "
            "model.state_dict() and optimizer.state_dict() instead"
        )

    def _cast_inputs(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Inputs of the model where it computes, floating ones in the compute dtype, as FSDP2."""
        self._begin()

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            tensor = to_device(tensor, self._device)
            return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(torch.Tensor, cast, args), tree_map_only(torch.Tensor, cast, kwargs)

    def remove(self) -> None:
        """Takes all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def refuse_use(model: torch.nn.Module, error: Callable[[], Exception]) -> None:
    """Makes every forward of the model and of its modules raise `error()`."""

    def refuse(module: torch.nn.Module, args: Any) -> None:
        raise error()

    for module in model.modules():
        if module is model or module._parameters:
            module.register_forward_pre_hook(refuse, prepend=True)
