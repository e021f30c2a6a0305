"""A tensor whose values are elsewhere: each operator that needs them gets them for its time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from hetero.stand_ins.parameter_classes import AbsentParameter, ParamOwner, has_absent_param
from offload.errors import BudgetError, HeteroError, StaleGraphError
from offload.interrupts import uninterrupted

Self = TypeVar("Self", bound="OffloadedTensor")


class ValueSource(Protocol):
    """Where the values of an OffloadedTensor are."""

    @property
    def name(self) -> str:
        """What they are the values of, for errors."""

    def values(self, write: bool) -> AbstractContextManager[torch.Tensor]:
        """The whole values, a plain tensor, inside the block; with `write` changes of it are kept.

        Raises what bringing them raises, and HeteroError for a write that cannot be kept.
        """

    def empty(self) -> torch.Tensor:
        """A tensor with a storage of its own that has the values' shape and dtype, for callers that
        look at addresses."""


@dataclass(frozen=True)
class _View:
    """A view operator, its arguments after the tensor, and which of its results the view is."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self.func(tensor, *self.args, **self.kwargs)
        found: torch.Tensor = made if self.index is None else made[self.index]
        return found


class OffloadedTensor(torch.Tensor):
    """A tensor without memory; `_source` has the values, of which it may be a view.

    Operators that give views of it give another OffloadedTensor; all others bring the values in,
    and let them go. So it never holds memory, however long it lives.
    """

    _source: ValueSource
    _meta: torch.Tensor  # on the meta device: shape, strides and offset
    _views: tuple[_View, ...]  # from the whole values to this tensor
    _device: torch.device  # where its values are brought
    # Its keys are those of the meta device, so whoever takes its memory past the operators, as an
    # assignment to a plain tensor's `.data` does, is refused by torch. All who ask for its device,
    # operators that are made of others among them, get the device of the values.
    _is_meta_to_torch = True

    @classmethod
    def _make(
        cls: type[Self],
        source: ValueSource,
        meta: torch.Tensor,
        device: torch.device,
        views: tuple[_View, ...] = (),
    ) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            dtype=meta.dtype,
            device=torch.device("meta") if cls._is_meta_to_torch else device,
            dispatch_device=True,
        )
        made._source, made._meta, made._views, made._device = source, meta, views, device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its values are brought."""
        return self._device

    @property
    def _whole(self) -> bool:
        """Whether it has all elements, in the shape of the whole."""
        return not self._views or all(view.func in _SAME for view in self._views)

    def _brought(self, write: bool = False) -> AbstractContextManager[torch.Tensor]:
        return _Brought(self, write)

    @uninterrupted
    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        try:
            with self._brought() as values:
                return repr(values.clone())
        except HeteroError as error:  # whoever debugs that sees it
            return f"{type(self).__name__}(shape={tuple(self.shape)}: {error})"

    @uninterrupted
    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._brought() as values:
            return values.clone().__reduce_ex__(protocol)

    @uninterrupted
    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        if id(self) not in memo:
            with self._brought() as values:
                memo[id(self)] = values.clone()
        copy: torch.Tensor = memo[id(self)]
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if has_absent_param(args, kwargs):  # no operator would bring it in
            return AbsentParameter.__torch_function__(func, types, args, kwargs)
        # Operators arrive in __torch_dispatch__, whatever Python name they were called by. What
        # gives out memory is no operator.
        outside = GIVE_MEMORY.get(func)
        if outside is not None and isinstance(args[0], OffloadedTensor):
            return outside(func, *args, **kwargs)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # (torch asks for the device of each tensor of a list.)
        return args[0]._device if func is _DEVICE else cls._operate(func, args, kwargs or {})

    @classmethod
    @uninterrupted
    def _operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator."""
        if _gives_views(func):
            return _viewed(func, args, kwargs)
        if func.__name__.startswith("_foreach_"):
            return one_by_one(func, args, kwargs, _bring_and_call)
        return _bring_and_call(func, args, kwargs)


class _Brought:
    """The context of `_brought()`. (A generator would keep `self` in its frame after an error.)"""

    def __init__(self, tensor: OffloadedTensor, write: bool) -> None:
        self._context = tensor._source.values(write)
        self._views = tensor._views

    def __enter__(self) -> torch.Tensor:
        values = self._context.__enter__()
        with torch.no_grad():
            for view in self._views:
                values = view.of(values)
        return values

    def __exit__(self, *failure: Any) -> bool | None:
        return self._context.__exit__(*failure)


def one_by_one(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
) -> Any:
    """A function over lists of tensors, called for one tensor at a time: so only one has to be in
    memory. Where the lists are not alike, it is called once for all."""
    lengths = {len(each) for each in args if isinstance(each, (list, tuple))}
    if len(lengths) != 1 or lengths < {2}:
        return call(func, args, kwargs)
    (length,) = lengths

    def only(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, (list, tuple)) else value

    made = [call(func, tuple(only(a, i) for a in args), kwargs) for i in range(length)]
    return None if made[0] is None else [one for each in made for one in each]


def _gives_views(func: Any) -> bool:
    """Whether all results of an operator are views of its first argument."""
    returns = func._schema.returns
    return bool(returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    if not isinstance(base, OffloadedTensor):  # of another argument: a plain view
        return _bring_and_call(func, args, kwargs)
    made = func(base._meta, *args[1:], **kwargs)
    several = isinstance(made, (list, tuple))
    found = [
        type(base)._make(
            base._source,
            meta,
            base.device,
            (*base._views, _View(func, args[1:], kwargs, index if several else None)),
        )
        for index, meta in enumerate(made if several else [made])
    ]
    return found if several else found[0]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Ids of the tensors to which an operator writes."""
    found: set[int] = set()
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found.update(map(id, value if isinstance(value, (list, tuple)) else [value]))
    return found


def _bring_and_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = _written(func, args, kwargs)
    found = (t for t in tree_iter((args, kwargs)) if isinstance(t, OffloadedTensor))
    needed = list({id(tensor): tensor for tensor in found}.values())
    with ExitStack() as contexts:
        brought: dict[int, torch.Tensor] | None = None
        try:
            brought = _bring(needed, written, contexts, copies=False)
        except BudgetError:
            if len(needed) == 1:
                raise
        if brought is None:  # not in the handler: the error's frames hold what was brought
            contexts.close()
            brought = _bring(needed, written, contexts, copies=True)
        plain_args, plain_kwargs = tree_map_only(
            OffloadedTensor, lambda tensor: brought[id(tensor)], (args, kwargs)
        )
        for each in tree_iter((plain_args, plain_kwargs)):
            if isinstance(each, torch.Tensor) and each.is_meta:
                raise HeteroError(
                    f"{func} of {needed[0]._source.name} got a tensor on the meta device, which "
                    f"has no values; take a copy first: .clone()"
                )
        result = func(*plain_args, **plain_kwargs)
        # In-place operators return their argument: give back the one that the caller has.
        stands_for = {id(brought[id(tensor)]): tensor for tensor in needed}
        return tree_map_only(torch.Tensor, lambda t: stands_for.get(id(t), t), result)


def _bring(
    needed: Sequence[OffloadedTensor], written: Container[int], contexts: ExitStack, copies: bool
) -> dict[int, torch.Tensor]:
    """The values by id of their tensor; `copies`, in memory that no budget counts, of those that
    are only read: so that one at a time is in memory that is counted."""
    brought: dict[int, torch.Tensor] = {}
    for tensor in sorted(needed, key=lambda tensor: id(tensor) in written):
        if copies and id(tensor) not in written:
            with tensor._brought() as values:
                brought[id(tensor)] = values.clone()
        else:
            brought[id(tensor)] = contexts.enter_context(tensor._brought(id(tensor) in written))
    return brought


_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_SAME = {_aten.detach.default, _aten.alias.default}  # .data, .detach()
_Tensor: Any = torch.Tensor  # its descriptors are not what its stubs say


@uninterrupted
def _read_only(func: Any, tensor: OffloadedTensor, *args: Any, **kwargs: Any) -> Any:
    """A NumPy array of a copy: what is written to it would be lost."""
    with tensor._brought() as values:
        array = func(values.clone(), *args, **kwargs)
    array.flags.writeable = False
    return array


@uninterrupted
def _of_copy(func: Any, tensor: OffloadedTensor, *args: Any, **kwargs: Any) -> Any:
    with tensor._brought() as values:
        return func(values.clone(), *args, **kwargs)


def _address(func: Any, tensor: OffloadedTensor) -> int:
    raise no_address(tensor._source.name)


def no_address(name: str) -> HeteroError:
    """The error for whoever asks for the address of values that are elsewhere."""
    return HeteroError(
        f"{name} has no address now, because its values are not in memory; read it inside "
        f"hetero.gathered(), or take a copy of it: .clone(), or model.state_dict()"
    )


GIVE_MEMORY: dict[Any, Callable[..., Any]] = {
    _Tensor.numpy: _read_only,
    _Tensor.__array__: _read_only,
    _Tensor.tolist: _of_copy,
    _Tensor.__dlpack__: _of_copy,
    _Tensor.data_ptr: _address,
    _Tensor.untyped_storage: lambda func, tensor: func(tensor._source.empty()),
}


class _ParamSource:
    """The values of one parameter, which `owner` has."""

    def __init__(self, owner: ParamOwner, param: torch.nn.Parameter) -> None:
        self.owner, self.param = owner, param
        self._version = owner.version(param)

    @property
    def name(self) -> str:
        return self.owner.name(self.param)

    @contextmanager
    def values(self, write: bool) -> Iterator[torch.Tensor]:
        version = self.owner.version(self.param)
        if torch._C._current_graph_task_id() == -1:
            self._version = version
        elif self._version != version:
            raise StaleGraphError(
                f"backward needs {self.name} as it was before it was changed, after its use in "
                f"forward; call backward before that"
            )
        with self.owner.values(self.param) as memory:
            try:
                yield memory
            finally:  # also what an operator wrote before it failed
                if write:  # (below autograd nothing counts versions)
                    torch.autograd.graph.increment_version(self.param)
                    self._version = self.owner.version(self.param)

    def empty(self) -> torch.Tensor:
        return self.owner.stand_in(self.param)


class ParamAlias(OffloadedTensor):
    """`param.data` or `param.detach()`, or a view of it, of a parameter whose values are absent."""

    _source: _ParamSource

    @staticmethod
    def of(owner: ParamOwner, param: torch.nn.Parameter) -> ParamAlias:
        """Makes the alias of all of a parameter that `owner` has."""
        whole = owner.stand_in(param)
        meta = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        return ParamAlias._make(_ParamSource(owner, param), meta, whole.device)

    @property
    def param(self) -> torch.nn.Parameter:
        """The parameter."""
        return self._source.param

    def is_of(self, owner: ParamOwner) -> bool:
        """Whether `owner` has the values."""
        return self._source.owner is owner

    def is_all_of(self, param: torch.nn.Parameter) -> bool:
        """Whether it is an alias of the whole parameter, in its shape."""
        return self._source.param is param and self._whole

    def detach(self) -> torch.Tensor:
        """An alias of it."""
        if sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
            raise HeteroError(
                f"torch.nn.Parameter() cannot be made over the memory of {self._source.name}, "
                f"whose values are not in memory; make a copy: torch.nn.Parameter(values.clone())"
            )
        return torch.Tensor.detach(self)
