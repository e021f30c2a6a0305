"""Gives each module's parameters their values for the time of its forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hetero.runtime.modules.all_params import AllParams
from hetero.runtime.modules.call_stack import EnteredCalls, module_frame
from hetero.runtime.modules.saved_tensors import SavedTensors
from hetero.runtime.modules.uses_outside_owner import UsesOutsideOwner
from hetero.runtime.to_device import to_device
from hetero.state.managed_param import ManagedParam
from offload.errors import HeteroError


class ModuleHooks:
    """Acquires a module's own parameters before its forward and releases them after it.

    While a module runs, autograd saves views of gathered copies as SavedView, so that a forward
    pins no copies for the backward. Several threads may run forwards of the model at once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        find: Callable[[torch.Tensor], ManagedParam | None],
        params: AllParams,
        saved_tensors: SavedTensors,
        before_forward: Callable[[], None],
        dtype: torch.dtype,
        device: torch.device,
        all_modules: bool,
    ) -> None:
        """Installs hooks on the model and on those of its modules that need them.

        Args:
            find: the ManagedParam of a tensor, or None.
            before_forward: called before each forward of the whole model, while no other one runs.
            dtype: what floating inputs of the model are cast to.
            device: where compute happens, to which inputs are moved.
            all_modules: acquire resident parameters too, because they have no values until an
                update that goes on meanwhile is made.
        """
        self._device = device
        self._find = find
        self._params = params
        self._saved_tensors = saved_tensors
        self._dtype = dtype
        self._before_forward = before_forward
        self._all_modules = all_modules
        # What each hooked module needs; its hooks have the same list objects.
        self._needed: weakref.WeakKeyDictionary[torch.nn.Module, list[ManagedParam]]
        self._needed = weakref.WeakKeyDictionary()
        self._calls = EnteredCalls()
        self._handles: list[RemovableHandle] = []
        self.cover(model)
        self._handles.append(
            model.register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)
        )

    def cover(self, model: torch.nn.Module) -> None:
        """Takes account of parameters whose homes have moved, and of modules that are new."""
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
        self._calls.leave(module)

    def _enter(self, module: torch.nn.Module, needed: list[ManagedParam]) -> None:
        outermost = not self._calls.own
        call = self._calls.enter(module, module_frame())
        call.present.enter_context(self._params.present(needed))
        if outermost and (self._params.gathers or self._all_modules):
            call.modes.enter_context(UsesOutsideOwner(self._find, self._params, self._calls))
        if not self._saved_tensors.needed:
            return
        packing = any(entered.packing for entered in self._calls.own)
        hooks = self._saved_tensors.hooks(packing)
        if hooks is not None:
            call.modes.enter_context(saved_tensors_hooks(*hooks))
            call.packing = True

    @property
    def running(self) -> bool:
        """Whether a forward runs in any thread."""
        self.unwind()
        return self._calls.any_thread

    def unwind(self) -> None:
        """Ends forwards that Ctrl-C has interrupted."""
        self._calls.unwind()

    @_disable_dynamo
    def _begin(self) -> None:
        self.unwind()
        if not self._calls.any_thread:
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
