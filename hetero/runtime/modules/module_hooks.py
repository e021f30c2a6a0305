"""Gives each module's parameters their values for the time of its forward."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from hetero.chunk_groups.chunk_group import Shared
from hetero.runtime.modules.call_stack import EnteredCalls, FramePlace, module_frame
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.runtime.modules.torch_function_uses import TorchFunctionUses
from hetero.state.managed_param import ManagedParam
from offload.errors import ClosedError, HeteroError
from offload.interrupts import uninterrupted
from offload.memory.tiers import Tier


class _OneWayOfAttention:
    """Inside the block torch's attention in evaluation is that of training.

    torch takes another operator there, with other roundings, if all of a layer's parameters are in
    memory, so the numbers would depend on the placement. What torch is told holds for all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._was_enabled = True

    def __enter__(self) -> None:
        with self._lock:
            if self._blocks == 0:
                self._was_enabled = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                torch.backends.mha.set_fastpath_enabled(self._was_enabled)


_ONE_WAY = _OneWayOfAttention()
_ATTENTION = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerEncoder,
)


class ModelHooks(ABC):
    """Hooks on a model's modules, and the calls of modules that they have seen begin."""

    def __init__(self, hooks: ExitStack, calls: EnteredCalls) -> None:
        """`hooks` takes them off when it is closed; `calls` takes the calls."""
        self._hooks = hooks
        self._calls = calls

    @abstractmethod
    def cover(self, model: torch.nn.Module) -> None:
        """Takes account of parameters whose homes have moved, and of modules that are new."""

    def unwind(self) -> None:
        """Ends calls that an exception, or Ctrl-C, has interrupted."""
        self._calls.unwind()


class ModuleHooks(ModelHooks):
    """Acquires a module's own parameters before its forward and releases them after it.

    While a module runs, autograd saves views of gathered copies as SavedView, so that a forward
    pins no copies for the backward. Several threads may run forwards of the model at once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        params: ParamRegistry,
        uses: TorchFunctionUses,
        calls: EnteredCalls,
        shared: Shared,
        before_forward: Callable[[], None],
        hooks: ExitStack,
    ) -> None:
        """Installs hooks on the model and on those of its modules that need them.

        `before_forward` is called before each forward of the whole model, while no other one runs.
        """
        super().__init__(hooks, calls)
        self._device = shared.backend.device
        self._dtype = params.chunk_groups[0].dtypes.torch_compute
        self._params = params
        self._uses = uses
        self._saved_tensors = uses.saved_tensors
        self._before_forward = before_forward
        # What each hooked module needs; its hooks have the same list objects.
        self._needed: weakref.WeakKeyDictionary[torch.nn.Module, list[ManagedParam]]
        self._needed = weakref.WeakKeyDictionary()
        self.cover(model)
        inputs = model.register_forward_pre_hook(
            ModelHook(self._begin_model_forward), prepend=True, with_kwargs=True
        )
        hooks.callback(inputs.remove)

    def cover(self, model: torch.nn.Module) -> None:
        self._packs = self._saved_tensors.needed
        for module in model.modules():
            params = (p for p in module._parameters.values() if p is not None)
            own = [m for p in params if (m := self._params.known(p)) is not None]
            needed = [m for m in own if self._params.group(m.chunk).params.may_be_absent(m.chunk)]
            if module in self._needed:
                self._needed[module][:] = needed
            elif needed or module is model or isinstance(module, _ATTENTION):
                self._needed[module] = needed
                self._hook(module, needed)

    def _hook(self, module: torch.nn.Module, needed: list[ManagedParam]) -> None:
        before = module.register_forward_pre_hook(ModelHook(partial(self._before, needed)))
        self._hooks.callback(before.remove)
        # always_call: after an exception too, so that nothing stays acquired.
        after = module.register_forward_hook(ModelHook(self._after), always_call=True)
        self._hooks.callback(after.remove)

    # torch.compile must not trace into what moves parameters: here its graphs end. (This is the
    # lazy form of torch.compiler.disable; importing the compiler takes a second.)

    @_disable_dynamo
    @uninterrupted
    def _before(self, needed: list[ManagedParam], module: torch.nn.Module, args: Any) -> None:
        call = self._calls.enter(module, module_frame())
        if call.is_outermost:
            self._uses.note_threads()
        call.present.enter_context(self._params.present(needed, steps_aside=True))
        if isinstance(module, _ATTENTION):
            call.present.enter_context(_ONE_WAY)
        if not self._packs:
            return
        hooks = self._saved_tensors.hooks()
        if hooks is not None:
            call.modes.enter_context(saved_tensors_hooks(*hooks))

    @_disable_dynamo
    @uninterrupted
    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._calls.leave(module):
            self._uses.note_threads()

    @property
    def running(self) -> bool:
        """Whether a forward runs in any thread."""
        self.unwind()
        return self._calls.threads > 0

    @_disable_dynamo
    @uninterrupted
    def _begin(self) -> None:
        self._calls.unwind(FramePlace.of(module_frame()))
        if not self._calls.threads:
            self._before_forward()

    def _begin_model_forward(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Inputs of the model where it computes, floating ones in the compute dtype, as FSDP2."""
        self._begin()

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            tensor = to_device(tensor, self._device)
            return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(torch.Tensor, cast, args), tree_map_only(torch.Tensor, cast, kwargs)


def refuse_use(model: torch.nn.Module, params: Iterable[torch.nn.Parameter]) -> None:
    """Makes every forward of the model and of its modules, and backward, raise ClosedError."""

    def refuse(*_: Any) -> None:
        raise ClosedError(
            "the model was used after its engine was closed; what is still needed has to be done "
            "before engine.close()"
        )

    for module in model.modules():
        if module is model or module._parameters:
            module.register_forward_pre_hook(refuse, prepend=True)
    for param in params:
        if param.requires_grad:
            param.register_hook(refuse)


class _NotScriptableError(HeteroError, AttributeError):
    """Whoever may do without a name sees that there is none."""


class ModelHook:
    """Calls `function`; in a copy of the module, and in what is unpickled, nothing.

    A copy of a managed model, by copy.deepcopy() or pickle, has plain parameters, so it must not
    have the hooks either.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def __name__(self) -> str:
        """torch.jit.script() alone needs one, to compile the hook."""
        raise _NotScriptableError(
            "torch.jit.script() cannot compile the hooks that bring in the parameters of a managed "
            "model, nor what a copy has in their place; build the model anew, without hetero, load "
            "state_dict() into it, and script that"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> Any:
        return _unpickled, ()


def no_hook(*args: Any, **kwargs: Any) -> None:
    """What a copy has instead."""


def _unpickled() -> Callable[..., None]:
    return no_hook


_MOST_STAGED_BYTES = 64 << 20


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, or a copy of it on `device` if it is in RAM and `device` is not."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor
    if tensor.nbytes > _MOST_STAGED_BYTES:
        # CUDA may read it later, when its owner may have changed it; so the host waits.
        return tensor.to(device)
    # By a copy that nobody changes the host need not wait for the device, which has all of the last
    # step to do yet. torch keeps the page-locked memory until the device has read it.
    staged = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return staged.to(device, non_blocking=True)


@torch.no_grad()
def move_rest(model: torch.nn.Module, managed: Iterable[int], shared: Shared) -> None:
    """Moves buffers, and parameters whose ids are not in `managed`, to the backend's device.

    It waits until they are there: the first forward may be in any stream of the user's, which does
    not wait for the one that copies here.

    Raises BudgetError, naming the parameter, if a parameter does not fit device_memory.
    """
    if not shared.backend.in_order:  # it is done where the CPU reads it
        return
    device = shared.backend.device
    known = set(managed)
    for name, param in model.named_parameters():
        if id(param) not in known:
            shared.unmanaged.charge(param, Tier.DEVICE, name)
            param.data = param.data.to(device)
    moved: dict[int, torch.Tensor] = {}  # modules may share a buffer
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
    shared.backend.synchronize()
