"""Uses of parameters outside their modules' forwards, wherever the values are.

A function whose parameters do not fit the slots together (`torch.cat`) gets copies that no budget
counts, and so does a view in a graph outside of any forward. Functions over lists of tensors
(`torch._foreach_*`) go through them one by one.

Not noticed are: a write to a tensor of `model.state_dict()` where the parameter is absent, and one
through `.data` of a view inside the forward that took it, which are lost; and a backward that was
recorded over `p.detach()` outside of any forward and comes after an update, if the alias was read
in between.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import psutil
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter, tree_map_only

from hetero.activations.store import ActivationStore
from hetero.runtime.modules.call_stack import EnteredCalls
from hetero.runtime.modules.param_registry import ParamRegistry
from hetero.runtime.modules.saved_tensors import SavedTensors
from hetero.stand_ins.offloaded_tensor import (
    GIVE_MEMORY,
    OffloadedTensor,
    ParamAlias,
    no_address,
    one_by_one,
)
from hetero.stand_ins.parameter_classes import (
    CHANGE_MEMORY,
    AbsentParameter,
    PresentParameter,
    has_absent_param,
    owner_of,
    tensors_among,
)
from hetero.state.managed_param import ManagedParam, ParamState
from offload.errors import BudgetError, HeteroError
from offload.interrupts import uninterrupted
from offload.memory.sizes import format_bytes


class NoticedView(torch.Tensor):
    """A view, made while autograd recorded it, of a parameter that was a copy then.

    What is written to it is lost, and counted in the parameter's version, which its next use looks
    at. `.data` of a plain tensor has a version of its own; this one's shares the parameter's.
    """

    @property
    def data(self) -> torch.Tensor:
        """The values, without gradient."""
        return torch.Tensor.detach(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(values)

    def __format__(self, spec: str) -> str:
        with torch._C.DisableTorchFunctionSubclass():  # torch formats the numbers of plain tensors
            return format(self.as_subclass(torch.Tensor), spec)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if has_absent_param(args, kwargs):
            return AbsentParameter.__torch_function__(func, types, args, kwargs)
        return with_noticed_writes(
            torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        )


def with_noticed_writes(result: Any) -> Any:
    """The result of a torch function, in which views of parameters are NoticedViews."""
    return tree_map_only(torch.Tensor, _noticed, result)


def _noticed(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and isinstance(tensor._base, PresentParameter):
        tensor.__class__ = NoticedView
    return tensor


class TorchFunctionUses:
    """Gives torch functions the values of parameters that are not in memory.

    Hooks on the owning module cannot see these uses: MultiheadAttention uses its projection's
    weight, a language model's head the embedding's, a loss all parameters, an average of weights.
    """

    def __init__(
        self, params: ParamRegistry, calls: EnteredCalls, activations: ActivationStore | None = None
    ) -> None:
        """`calls` are the forwards of all threads; `activations` have what these save."""
        self._params = params
        self._calls = calls
        self.saved_tensors = SavedTensors(params, activations)
        self._threads = threading.Lock()
        self._several_threads = False

    # ParamOwner

    @uninterrupted
    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a torch function that some absent parameters are given to.

        Raises:
            ClosedError: the engine is closed.
            BudgetError: the values do not fit, not even as copies.
            HeteroError: something was written that cannot be kept.
        """
        if getattr(func, "__name__", "").startswith("_foreach_"):
            return one_by_one(func, args, kwargs, self._call)
        if not args or not isinstance(args[0], PresentParameter):
            return self._call(func, args, kwargs)
        if func in CHANGE_MEMORY:
            raise HeteroError(
                f"{func.__name__}() would change the shape or the memory of "
                f"{self._managed(args[0]).name}, which is managed; use a view, or do it before "
                f"hetero.initialize()"
            )
        if not isinstance(args[0], AbsentParameter):
            return self._call(func, args, kwargs)
        if func is torch.Tensor.detach:
            return self.alias(args[0])
        if func is torch.Tensor.data_ptr:
            managed = self._managed(args[0])
            if _only_compares_addresses(sys._getframe(1)):
                return managed.stand_in.data_ptr()  # no other parameter has it
            raise no_address(managed.name)
        if func in GIVE_MEMORY and not args[0].requires_grad:
            return func(self.alias(args[0]), *args[1:], **kwargs)
        return self._call(func, args, kwargs)

    @uninterrupted
    def alias(self, param: torch.nn.Parameter) -> torch.Tensor:
        """What `param.data` is while the values are absent."""
        return ParamAlias.of(self, self._managed(param).param)

    def assign(self, param: torch.nn.Parameter, values: torch.Tensor) -> None:
        """`param.data = values`. Raises HeteroError if shape, dtype or device are others."""
        managed = self._managed(param)
        same = (values.shape, values.dtype) == (param.shape, managed.dtype)
        if not same or values.device != managed.device:
            raise HeteroError(
                f"{managed.name} is managed: {tuple(param.shape)}, {managed.dtype} on "
                f"{managed.device}; it cannot become {tuple(values.shape)}, {values.dtype} on "
                f"{values.device}, as by model.to(), .half(), resize_token_embeddings() or an "
                f"assignment to .data; choose dtype and device at hetero.initialize(), and resize "
                f"before it"
            )
        if _is_to_empty(sys._getframe(2)):
            raise HeteroError(
                f"{managed.name} is managed, and model.to_empty() would lose its values; "
                f"initialize the model before hetero.initialize()"
            )
        if values is param or (isinstance(values, ParamAlias) and values.is_all_of(param)):
            return
        other = self._whose_memory(values)
        if other is managed:
            values = values.clone()  # another view of what is overwritten
        elif other is not None:
            raise HeteroError(
                f"{managed.name} cannot get the memory of {other.name}, because each managed "
                f"parameter has memory of its own; assign a copy: {other.name}.data.clone()"
            )
        with torch.no_grad():
            torch.Tensor.copy_(param, values)

    def _whose_memory(self, values: torch.Tensor) -> ManagedParam | None:
        """The parameter whose values `values` is a view of, if it is of one."""
        if isinstance(values, ParamAlias):
            return self._params.known(values.param)
        if isinstance(values, OffloadedTensor):
            return None
        with torch._C.DisableTorchFunction():
            address, storage = values.data_ptr(), values.untyped_storage().data_ptr()
            for each in list(self._params.managed.values()):
                param = each.param
                if param.untyped_storage().data_ptr() == storage:
                    first = param.data_ptr()
                    if first <= address < first + max(1, param.nbytes):
                        return each
        return None

    @uninterrupted
    def copy(self, param: torch.nn.Parameter) -> torch.Tensor:
        """A plain copy of the values, in memory that no budget counts."""
        managed = self._managed(param)
        nbytes = managed.numel * managed.dtype.itemsize
        available = psutil.virtual_memory().available
        if managed.device.type == "cpu" and nbytes > available:
            raise BudgetError(
                f"no memory for a copy of {managed.name}: it takes {format_bytes(nbytes)}, and "
                f"this machine has {format_bytes(available)} left"
            )
        with self.present([managed]), torch._C.DisableTorchFunction():
            return torch.Tensor.detach(param).clone()

    def name(self, param: torch.nn.Parameter) -> str:
        """In the model."""
        return self._known(param).name

    def version(self, param: torch.nn.Parameter) -> tuple[int, int]:
        """ManagedParam's."""
        return self._known(param).version

    @contextmanager
    def values(self, param: torch.nn.Parameter) -> Iterator[torch.Tensor]:
        """Inside the block: an alias that has the memory of the values."""
        managed = self._managed(param)
        copied = managed.state is ParamState.COPIED  # by a call that is given the parameter, too
        present = nullcontext() if copied else self.present([managed])
        with present, torch._C.DisableTorchFunction():
            yield torch.Tensor.detach(param)

    def stand_in(self, param: torch.nn.Parameter) -> torch.Tensor:
        """ManagedParam's."""
        return self._known(param).stand_in

    # How

    def _managed(self, param: torch.Tensor) -> ManagedParam:
        self._params.check_open()
        self._calls.unwind()
        return self._known(param)

    def _known(self, param: torch.Tensor) -> ManagedParam:
        managed = self._params.known(param)
        assert managed is not None
        return managed

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = (self._needed(each) for each in tensors_among((*args, *kwargs.values())))
        needed = list(dict.fromkeys(managed for managed in found if managed is not None))
        hooks = self.saved_tensors.hooks() if torch.is_grad_enabled() else None
        with ExitStack() as contexts:
            contexts.enter_context(self.present(needed, (args, kwargs)))
            contexts.enter_context(saved_tensors_hooks(*hooks) if hooks else nullcontext())
            if self._several_threads:  # the parameters keep their class
                contexts.enter_context(torch._C.DisableTorchFunctionSubclass())
            result = func(*args, **kwargs)
            views = _views_of(result, needed)
            if not views:
                return result
        # (A view that is made without grad requires it, too.)
        in_graph = torch.is_grad_enabled() and any(view.requires_grad for view in views)
        if in_graph and self._calls.own:
            return result  # until the forward is over the view is a pin on the copy
        if in_graph:
            del result, views
            with self._copied(needed):
                return with_noticed_writes(func(*args, **kwargs))
        aliases = {id(m.param): ParamAlias.of(self, m.param) for m in needed}
        args, kwargs = tree_map_only(
            AbsentParameter, lambda p: aliases.get(id(p), p), (args, kwargs)
        )
        return func(*args, **kwargs)

    def _needed(self, operand: torch.Tensor) -> ManagedParam | None:
        """The parameter whose values a call is given, by itself or by an alias.

        Those of aliases come with the others: each alone would find room or not.
        """
        if isinstance(operand, ParamAlias) and operand.is_of(self):
            return self._managed(operand.param)
        absent = isinstance(operand, AbsentParameter) and owner_of(operand) is self
        return self._managed(operand) if absent else None

    @contextmanager
    def present(self, members: Sequence[ManagedParam], operands: Any = None) -> Iterator[None]:
        """Inside the block the parameters have their values; as copies if their slots have no room
        for all of them. `operands` are used together with them."""
        with ExitStack() as contexts:
            fits = False
            try:
                contexts.enter_context(self._params.present(members, operands))
                fits = True
            except BudgetError:
                if len(members) == 1:
                    raise
            if not fits:  # not in the handler: the error's frames hold what was gathered
                contexts.enter_context(self._copied(members))
            yield

    @contextmanager
    def _copied(self, members: Sequence[ManagedParam]) -> Iterator[None]:
        """Inside the block the parameters are copies, in memory that no budget counts."""
        changed: dict[ManagedParam, torch.Tensor] = {}
        with ExitStack() as contexts:
            for m in members:
                with self._params.present([m]), torch._C.DisableTorchFunction():
                    values = torch.Tensor.detach(m.param).clone()
                contexts.enter_context(m.as_copy(values))
            yield
            for m in members:
                if m.writes.are_unnoticed:
                    changed[m] = torch.Tensor.detach(m.param)
        for m, values in changed.items():
            self._params.keep_written(m, values)

    # Threads

    def note_threads(self) -> None:
        """The number of threads that run forwards may have changed.

        What one thread has gathered may go while another uses it. So as long as there are several,
        parameters that are gathered have the class of absent ones: each use counts for itself.
        """
        with self._threads:
            several = self._calls.threads > 1
            if several == self._several_threads:
                return
            # A call that finds the class without this flag would come back here without end.
            self._several_threads = True
            for managed in list(self._params.managed.values()):
                managed.guard(several)
            self._several_threads = several


def _views_of(result: Any, members: Sequence[ManagedParam]) -> list[torch.Tensor]:
    """The tensors in `result` that have the memory of a parameter and are not the parameter."""
    with torch._C.DisableTorchFunction():
        storages = {m.param.untyped_storage().data_ptr() for m in members}
        own = {id(m.param) for m in members}
        return [
            each
            for each in tree_iter(result)
            if isinstance(each, torch.Tensor)
            and not isinstance(each, OffloadedTensor)
            and id(each) not in own
            and each.layout is torch.strided
            and not torch._C._functorch.is_functorch_wrapped_tensor(each)  # has no storage
            and each.untyped_storage().data_ptr() in storages
        ]


def _only_compares_addresses(frame: FrameType | None) -> bool:
    """Whether an address that is asked for tells which parameters are tied; the first frame that is
    neither ours nor torch's says so."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in ("hetero", "offload", "torch"):
            return module in _COMPARE_ADDRESSES
        frame = frame.f_back
    return False


_COMPARE_ADDRESSES = {"peft.tuners.tuners_utils"}  # merge_and_unload(), of the two embeddings


def _is_to_empty(frame: Any) -> bool:
    """Whether `frame` is the one in which Module.to_empty() assigns `param.data`."""
    if frame.f_code is not torch.nn.Module._apply.__code__:
        return False
    return str(getattr(frame.f_locals.get("fn"), "__qualname__", "")).startswith("Module.to_empty.")
