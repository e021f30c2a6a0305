"""Building a model whose parameters do not all fit in RAM.

Initialisation code runs unchanged: a parameter is a plain one in RAM until the budget is needed for
another, so random numbers and bits are those of plain construction. A folder of Hugging Face's that
is larger than the budget passes through it: the process holds the budget, the tensor that is read,
and what transformers needs to convert it, for a fused tensor of experts up to three times its size
for a moment. The folder's files are mapped, and the kernel gives their pages up.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from os import PathLike
from typing import Any

import torch

from hetero.api.optimizer import unmanaged
from hetero.config import Config
from hetero.setup.construction import ConstructionArena
from hetero.setup.initialize import initialize, join_ranks
from hetero.stand_ins.construction_uses import arena_of, memory_of
from hetero.stand_ins.offloaded_tensor import ParamAlias
from hetero.stand_ins.parameter_classes import AbsentParameter, PresentParameter
from offload.errors import BudgetError, HeteroError
from offload.memory.sizes import format_bytes

_NO_READ_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"  # the environment variable that transformers asks


class ZeroInitContext:
    """Inside the block, parameters of modules, and deep copies, are built within the host budget.

    Weights come out bit for bit as in plain construction under the same seed, whatever
    initialisation the modules do. With torch.distributed all ranks build the model together; if
    they draw other random numbers the first one's weights count, as under DDP, and each goes on
    with its own.

        with hetero.ZeroInitContext(placement_policy="nvme", nvme_path="/mnt/nvme"):
            model = GPT2LMHeadModel(config)

    A model may be built on the meta device first, as Hugging Face's from_pretrained() does: its
    parameters are taken one by one as they get memory inside the block.

    Between the block and hetero.initialize() the parameters read and write as plain ones do; with
    several ranks only those that are in RAM. If an optimizer of hetero was made of them, the first
    forward in training mode calls initialize(), as loops need that make the optimizer themselves.

    Args:
        config: a Config, a mapping, or the path of a JSON file.
        process_group: the ranks, if not all; as hetero.initialize() takes it.
        mesh: a device mesh of the ranks; as hetero.initialize() takes it.
        options: Config's fields as keywords.

    Raises:
        ValueError, HeteroError: the options cannot work.
        BudgetError: in the block: a parameter alone does not fit the host budget.
        HeteroError: at the block's end: no parameter was built in it.
    """

    _active: ZeroInitContext | None = None

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | PathLike[str] | None = None,
        *,
        process_group: Any = None,
        mesh: Any = None,
        **options: Any,
    ) -> None:
        made, self._world = join_ranks(partial(Config.make, config, **options), process_group, mesh)
        with self._world.telling_failures("ZeroInitContext(...)"):
            self.construction = ConstructionArena(made, self._world)
        self._block = ExitStack()  # what ends with it
        # Modules, and names of parameters that were on the meta device when they were registered.
        self._on_meta: list[tuple[weakref.ref[torch.nn.Module], str]] = []

    def __enter__(self) -> ZeroInitContext:
        if ZeroInitContext._active is not None:
            raise HeteroError("ZeroInitContext is already active; contexts do not nest")
        with self._world.telling_failures("ZeroInitContext"), ExitStack() as block:
            block.callback(setattr, ZeroInitContext, "_active", None)
            ZeroInitContext._active = self
            module, parameter = torch.nn.Module, torch.nn.Parameter
            _wrap(block, module, "register_parameter", self._registering)
            _wrap(block, module, "_apply", self._applying)
            _wrap(block, parameter, "__deepcopy__", self._copying)
            _wrap(block, PresentParameter, "__deepcopy__", self._copying)
            _wrap(block, parameter, "__new__", _sharing)
            _load_one_by_one(block)
            block.enter_context(self.construction.block())
            self._block = block.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, *_: object
    ) -> None:
        if failure is not None:  # first of all: other ranks may wait for this one
            self._world.tell_failure("the block of ZeroInitContext", failure)
        with self._block, self._world.telling_failures("the end of ZeroInitContext"):
            if failure is None:
                self._adopt_late()
        if failure is None and self.construction.is_empty:
            raise HeteroError(
                "ZeroInitContext adopted no parameter: none was built inside its block, or all are "
                "on the meta device still; build the model there, or give the options to "
                "hetero.initialize() instead"
            )
        if failure is None:
            _await_forward(self.construction)

    def _registering(self, register: Callable[..., None]) -> Callable[..., None]:
        """Module.register_parameter() that also puts the parameter under construction."""

        def register_parameter(
            module: torch.nn.Module, name: str, param: torch.nn.Parameter | None
        ) -> None:
            register(module, name, param)
            if param is None:
                return
            if _on_meta(param):
                self._on_meta.append((weakref.ref(module), name))
            self._adopt(param, "building", f"{type(module).__name__}.{name}")

        return register_parameter

    def _adopt_late(self) -> None:
        """Takes what got memory and was not registered: accelerate fills Module._parameters."""
        for reference, name in self._on_meta:
            module = reference()
            if module is not None:
                self._adopt_named(module, [name])
        self._on_meta.clear()

    def _adopt_named(self, module: torch.nn.Module, names: Iterable[str]) -> None:
        for name in names:
            param = module._parameters.get(name)
            if param is not None:
                self._adopt(param, "building", f"{type(module).__name__}.{name}")

    def _applying(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Module._apply() that also does: to_empty() replaces parameters without registering."""

        def _apply(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = module._parameters.items()
            on_meta = [name for name, param in found if param is not None and _on_meta(param)]
            result = apply(module, *args, **kwargs)
            self._adopt_named(module, on_meta)
            return result

        return _apply

    def _copying(self, deep_copy: Callable[..., Any]) -> Callable[..., Any]:
        """Parameter.__deepcopy__() that also does: module's copies do not register parameters."""

        def __deepcopy__(param: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
            copy: torch.nn.Parameter = deep_copy(param, memo)
            self._adopt(copy, "copying", "a parameter")
            return copy

        return __deepcopy__

    def _adopt(self, param: torch.nn.Parameter, doing: str, name: str) -> None:
        """Puts a parameter under construction, unless it has no memory yet."""
        if _on_meta(param):
            return
        try:
            self.construction.adopt(param, name)
        except BudgetError as error:
            raise BudgetError(
                f"{doing} {name} of shape {tuple(param.shape)} "
                f"({format_bytes(param.numel() * param.element_size())}): {error}"
            ) from None


def _on_meta(param: torch.nn.Parameter) -> bool:
    """Whether it has no memory. (One made of an alias is_meta, too, but its device is the CPU.)"""
    return param.device.type == "meta"


def _wrap(block: ExitStack, owner: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
    """Puts wrapped(function) in the place of a class's function until the block ends."""
    block.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, wrapped(getattr(owner, name)))


def _load_one_by_one(block: ExitStack) -> None:
    """Makes transformers read a tensor when the one before it is in the model.

    Its threads would read, and convert, all tensors of a folder ahead of the budget.
    """
    before = os.environ.get(_NO_READ_AHEAD)
    if before is None:
        block.callback(os.environ.pop, _NO_READ_AHEAD, None)
    else:
        block.callback(os.environ.__setitem__, _NO_READ_AHEAD, before)
    os.environ[_NO_READ_AHEAD] = "1"


def _sharing(new: Callable[..., Any]) -> Callable[..., Any]:
    """Parameter.__new__() that shares the memory of the parameter given, as the plain one does,
    also if that is offloaded."""

    def __new__(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        if not issubclass(type(data), (AbsentParameter, ParamAlias)):
            return new(cls, data, requires_grad)
        with memory_of(data) as memory:
            return new(cls, memory, requires_grad)

    return __new__


# initialize() by the first training forward, for loops that make the optimizer themselves, as a
# Trainer does: it is given the class of the optimizer, and calls the model with one that no user
# code has seen. A model that was built in ZeroInitContext has its options: nothing is missing.

_waiting: weakref.WeakSet[ConstructionArena] = weakref.WeakSet()
_plain_call: Callable[..., Any] = torch.nn.Module.__call__


def _await_forward(arena: ConstructionArena) -> None:
    """From now on the first training forward of the model that the arena has initializes it.

    Unless initialize() was called before; and only if one optimizer of hetero, and no more, was
    made from its parameters.
    """
    _waiting.add(arena)
    torch.nn.Module.__call__ = _call  # type: ignore[method-assign]


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """torch.nn.Module.__call__(), while some model waits. (A hook could not add the hooks that
    initialize() adds to the call that has begun.)"""
    if torch.compiler.is_compiling():  # what is traced lies inside of a call that was not
        return _plain_call(module, *args, **kwargs)
    if module.training and torch.is_grad_enabled():
        for arena in list(_waiting):
            if arena.is_closed:
                _waiting.discard(arena)
            else:
                _initialize(module, arena)
    if not _waiting:
        torch.nn.Module.__call__ = _plain_call  # type: ignore[method-assign]
    return _plain_call(module, *args, **kwargs)


def _initialize(module: torch.nn.Module, arena: ConstructionArena) -> None:
    optimizers = [
        optimizer
        for optimizer in unmanaged
        if any(arena_of(p) is arena for group in optimizer.param_groups for p in group["params"])
    ]
    if len(optimizers) == 1 and arena.has_no_others_than(module.parameters()):
        initialize(module, optimizers[0])
