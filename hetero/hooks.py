"""Finding the moments a parameter is needed, and the moment its gradient is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hetero.bare_uses import BareUses
from hetero.managed import ManagedParam
from hetero.params import Params


@dataclass
class _Entered:
    module: torch.nn.Module
    acquired: list[ManagedParam]
    contexts: ExitStack


class ModuleHooks:
    """Brings a module's own parameters in before its forward and lets them go afterwards.

    While they run, autograd saves views of gathered copies as SavedView (Params.pack), so that a
    forward holds no copies for the backward. Not so where somebody else's saved-tensor hooks are in
    force (a non-reentrant checkpoint's): what those keep stays leased until they let it go.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        find: Callable[[torch.Tensor], ManagedParam | None],
        params: Params,
        dtype: torch.dtype,
    ) -> None:
        self._find = find
        self._params = params
        self._dtype = dtype
        self._entered: list[_Entered] = []
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            own = [m for p in module._parameters.values() if p is not None and (m := find(p))]
            absent = [m for m in own if not params.is_resident(m.chunk)]
            if absent or module is model:
                self._hook(module, absent)
        self._handles.append(
            model.register_forward_pre_hook(self._cast_inputs, prepend=True, with_kwargs=True)
        )

    def _hook(self, module: torch.nn.Module, needed: list[ManagedParam]) -> None:
        def before(module: torch.nn.Module, args: Any) -> None:
            self._enter(module, needed)

        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._exit(module)

        self._handles.append(module.register_forward_pre_hook(before))
        # always_call: after an exception too, so that nothing stays acquired.
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _enter(self, module: torch.nn.Module, needed: list[ManagedParam]) -> None:
        entered = _Entered(module, [], ExitStack())
        self._entered.append(entered)
        for managed in needed:
            self._params.acquire(managed)
            entered.acquired.append(managed)
        if not self._params.gathers:
            return
        if len(self._entered) == 1:
            entered.contexts.enter_context(BareUses(self._find, self._params))
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            entered.contexts.enter_context(
                saved_tensors_hooks(self._params.pack, self._params.unpack)
            )

    def _exit(self, module: torch.nn.Module) -> None:
        # After an exception torch runs these hooks from the inside out, so the last entered is
        # ours, unless our own enter was never reached.
        if not self._entered or self._entered[-1].module is not module:
            return
        entered = self._entered.pop()
        entered.contexts.close()
        for managed in entered.acquired:
            self._params.release(managed)

    def _cast_inputs(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Floating inputs of the model in the compute dtype, as FSDP2's mixed precision does."""

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(torch.Tensor, cast, args), tree_map_only(torch.Tensor, cast, kwargs)

    def remove(self) -> None:
        """Takes all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def hook_gradients(
    managed_params: Iterable[ManagedParam],
    check: Callable[[ManagedParam, torch.Tensor], None],
    keep: Callable[[ManagedParam, torch.Tensor, bool], None],
) -> list[RemovableHandle]:
    """Calls `keep(managed, grad, accumulate)` whenever a parameter's gradient is ready.

    `.grad` holds the placeholder if there is a gradient already; it is taken away before autograd
    would add to it. `check(managed, grad)` may refuse by raising.
    """
    handles: list[RemovableHandle] = []
    for managed in managed_params:
        accumulating = [False]

        def before(
            grad: torch.Tensor,
            managed: ManagedParam = managed,
            accumulating: list[bool] = accumulating,
        ) -> None:
            check(managed, grad)
            accumulating[0] = managed.has_grad
            if managed.has_grad:
                managed.param.grad = None

        def after(
            param: torch.Tensor,
            managed: ManagedParam = managed,
            accumulating: list[bool] = accumulating,
        ) -> None:
            grad, param.grad = param.grad, None
            assert grad is not None
            keep(managed, grad, accumulating[0])

        handles.append(managed.param.register_hook(before))
        handles.append(managed.param.register_post_accumulate_grad_hook(after))
    return handles


def refuse_use(model: torch.nn.Module, error: Callable[[], Exception]) -> None:
    """Makes every forward of the model and of its modules raise `error()`."""

    def refuse(module: torch.nn.Module, args: Any) -> None:
        raise error()

    for module in model.modules():
        if module is model or module._parameters:
            module.register_forward_pre_hook(refuse, prepend=True)
