"""The classes of a managed parameter: what user code can do with it while its values are here, and
while they are not.

torch does the same to its lazy modules, whose class changes when they get their shape. Compute has
the class whose operators are torch's own, so it pays nothing.

Functions that take a parameter past torch functions read the stand-in, which is NaN:
`torch.tensor(p)`, `torch.vmap(f)(p)`, `other.data = p`, a compiled TorchScript function. A change
of class costs 0.06 us.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo
from torch._functorch import vmap

from offload.errors import HeteroError


class ParamOwner(Protocol):
    """Who has a parameter's values while they are not in its memory."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a torch function that some absent parameters are given to."""

    def alias(self, param: torch.nn.Parameter) -> torch.Tensor:
        """What `param.data` and `param.detach()` are while the values are absent."""

    def assign(self, param: torch.nn.Parameter, values: torch.Tensor) -> None:
        """`param.data = values`."""

    def copy(self, param: torch.nn.Parameter) -> torch.Tensor:
        """A plain copy of the values."""

    def name(self, param: torch.nn.Parameter) -> str:
        """The parameter's name, for errors."""

    def version(self, param: torch.nn.Parameter) -> Hashable:
        """Another one after each change of the values."""

    def values(self, param: torch.nn.Parameter) -> AbstractContextManager[torch.Tensor]:
        """Inside the block: an alias that has the memory of the values."""

    def stand_in(self, param: torch.nn.Parameter) -> torch.Tensor:
        """A tensor of the parameter's own, in its shape and dtype, which takes no memory."""


class PresentParameter(torch.nn.Parameter):
    """A parameter with its values in memory: a plain one, but for a write through `.data`.

    `.data` shares the version with the parameter, so that such a write is noticed, and an
    assignment to it writes to the memory that the parameter has.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> torch.nn.Parameter:  # type: ignore[misc]
        """A plain parameter: others copy one by calling type(param)."""
        return torch.nn.Parameter(data, requires_grad)

    @property
    def data(self) -> torch.Tensor:
        """The values, without gradient."""
        return torch.Tensor.detach(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        owner_of(self).assign(self, values)

    def detach(self) -> torch.Tensor:
        """The values, without gradient."""
        if sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
            # torch.nn.Parameter(param), which must have the same memory, and the same class.
            raise HeteroError(
                f"torch.nn.Parameter() cannot be made over a managed parameter of shape "
                f"{tuple(self.shape)}, whose memory moves; share the parameter itself, or make a "
                f"copy: torch.nn.Parameter(param.detach().clone())"
            )
        return torch.Tensor.detach(self)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `.data = source`, which torch's parametrizations do by this."""
        if args or kwargs or not isinstance(source, torch.Tensor):
            owner_of(self).call(torch.Tensor.set_, (self, source, *args), kwargs)
        elif source is not self:
            owner_of(self).assign(self, source.detach())
        return self

    def __deepcopy__(self, memo: Any) -> torch.nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        copy: torch.nn.Parameter = memo[id(self)]
        return copy

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        try:
            return repr(self._plain())
        except HeteroError as error:  # whoever debugs that sees it
            return f"Parameter(shape={tuple(self.shape)}: {error})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(owner_of(self).copy(self), self.requires_grad)


class AbsentParameter(PresentParameter):
    """A parameter whose values are elsewhere: torch functions that need them get them."""

    @classmethod
    @_disable_dynamo  # torch.compile must not trace into what moves parameters
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VALUE_FREE:
            taker = _taker(sys._getframe(1)) if func in _SIZES else None
            if taker is not None:
                absent = args[-1] if isinstance(args[-1], AbsentParameter) else args[0]
                raise HeteroError(
                    f"{taker} cannot take a managed parameter of shape {tuple(absent.shape)}, "
                    f"because its values are not in memory; give it param.detach()"
                )
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        if func in _LAYOUT:
            there = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            return func(there, *args[1:], **kwargs)
        if func in _BACKWARDS:
            made = _backward_to_inputs(func, *args, **kwargs)
            if made is not NotImplemented:
                return made
        operands = tensors_among((*args, *kwargs.values()))
        absent = next(each for each in operands if isinstance(each, AbsentParameter))
        return owner_of(absent).call(func, args, kwargs)

    @property
    def data(self) -> torch.Tensor:
        """The values, without gradient; they are brought in for whatever uses it."""
        return owner_of(self).alias(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        owner_of(self).assign(self, values)


def _by_owner(name: str) -> Callable[..., Any]:
    """A method that the parameter's owner is asked for, also while the values are in memory."""
    method = getattr(torch.Tensor, name)

    def asked(self: PresentParameter, *args: Any, **kwargs: Any) -> Any:
        return owner_of(self).call(method, (self, *args), kwargs)

    asked.__name__, asked.__doc__ = name, f"torch.Tensor.{name}(), if the owner allows it."
    return asked


# What changes the shape or the memory of a tensor in place.
_CHANGE_MEMORY_NAMES = (
    "as_strided_",
    "resize_",
    "resize_as_",
    "share_memory_",
    "squeeze_",
    "swapaxes_",
    "swapdims_",
    "t_",
    "transpose_",
    "unsqueeze_",
)
for _name in _CHANGE_MEMORY_NAMES:
    setattr(PresentParameter, _name, _by_owner(_name))
CHANGE_MEMORY = {torch.Tensor.set_, *(getattr(torch.Tensor, n) for n in _CHANGE_MEMORY_NAMES)}


def become(param: torch.nn.Parameter, data: torch.Tensor, absent: bool) -> None:
    """Points the parameter's memory to `data`, which is not its values if they are `absent`."""
    if absent:  # before: who comes in between asks the owner
        set_absent(param, True)
    if "_hetero_itself" not in param.__dict__:
        # torch.utils.swap_tensors() refuses a tensor that has a weak reference.
        param._hetero_itself = weakref.ref(param)  # type: ignore[attr-defined]
    with torch._C.DisableTorchFunction():
        torch.Tensor.data.__set__(param, data)  # type: ignore[attr-defined]
    if not absent:
        set_absent(param, False)


def set_absent(param: torch.nn.Parameter, absent: bool) -> None:
    """Gives the parameter the class of absent ones, whose uses ask the owner, or of others."""
    base = _base_of(type(param))
    if absent:
        param.__class__ = _absent_class(base)
    else:
        param.__class__ = PresentParameter if base is torch.nn.Parameter else base


def become_plain(param: torch.nn.Parameter) -> None:
    """Nobody manages the parameter any more; it has its values."""
    param.__class__ = _base_of(type(param))
    param.__dict__.pop("_hetero_itself", None)


def memory_in(param: torch.Tensor) -> torch.Tensor:
    """An alias of the parameter's memory, whatever its class; it shares the version."""
    with torch._C.DisableTorchFunction():
        return torch.Tensor.detach(param)


def tensors_among(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among `values`, and in lists, tuples and mappings of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_among(value)
        elif isinstance(value, dict):
            yield from tensors_among(value.values())


def has_absent_param(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a torch function is given an absent parameter.

    torch asks the class of one operand only, the first one's say. Each class whose tensors meet
    parameters asks this, and leaves such a call to AbsentParameter.__torch_function__().
    """
    for each in (*args, *kwargs.values()):
        if isinstance(each, (list, tuple, dict)):
            if any(isinstance(t, AbsentParameter) for t in tensors_among((each,))):
                return True
        elif isinstance(each, AbsentParameter):
            return True
    return False


def owner_of(param: torch.Tensor) -> ParamOwner:
    """Who has the parameter's values. Raises HeteroError while hetero.initialize() moves them."""
    owner: ParamOwner | None = getattr(param, "_hetero_owner", None)
    if owner is None:
        raise HeteroError(
            f"a parameter of shape {tuple(param.shape)} was used while hetero.initialize() moves "
            f"its values; if that has failed, build the model again"
        )
    return owner


@cache
def _absent_class(base: type) -> type:
    """AbsentParameter, for a class of parameters of the user's."""
    if base is torch.nn.Parameter:
        return AbsentParameter
    return type(f"Absent{base.__name__}", (AbsentParameter, base), {"_hetero_base": base})


@cache
def _base_of(cls: type) -> type:
    """The class that the parameter had before it was managed."""
    if cls is PresentParameter or cls is AbsentParameter:
        return torch.nn.Parameter
    base: type = getattr(cls, "_hetero_base", cls)
    return base


def _taker(frame: FrameType | None) -> str | None:
    """Who asks for a tensor's size, to take its memory past torch functions then; None if nobody
    does. `frame` and the next ones are of this call."""
    for _ in range(4):  # torch's decorator of __torch_function__, and a comprehension
        if frame is None:
            return None
        if frame.f_code in _TAKERS:
            return _TAKERS[frame.f_code]
        frame = frame.f_back
    return None


def _backward_to_inputs(func: Any, outputs: Any, inputs: Any = None, **options: Any) -> Any:
    """backward(), or grad(), to `inputs`, of which autograd needs the nodes and no values.

    For as long as it runs none is in memory that it has no other use for. Returns NotImplemented
    if an absent parameter is something else for it.
    """
    ends = tuple(map(_end_of_graph, inputs or ()))
    if has_absent_param((outputs, ends), options):
        return NotImplemented
    if not options.get("materialize_grads"):
        return func(outputs, inputs=ends, **options)
    # torch makes no zeros for a node, whose shape it does not know.
    grads = func(outputs, inputs=ends, **{**options, "materialize_grads": False})
    needs_graph = options["create_graph"]
    return tuple(
        torch.zeros_like(param, requires_grad=needs_graph) if grad is None else grad
        for param, grad in zip(inputs, grads, strict=True)
    )


def _end_of_graph(tensor: Any) -> Any:
    """The node that gets the gradient of an absent parameter; another tensor as it is."""
    if not (isinstance(tensor, AbsentParameter) and tensor.requires_grad):
        return tensor
    with torch._C.DisableTorchFunction():  # which would bring the values in
        return torch.autograd.graph.get_gradient_edge(tensor)


_Tensor: Any = torch.Tensor  # its descriptors are not what its stubs say


def _named(owner: Any, names: str, part: str | None = None) -> set[Any]:
    """Attributes of `owner` by their names, as __torch_function__ gets them; `part` of each."""
    found = [getattr(owner, name) for name in names.split() if hasattr(owner, name)]
    return {each if part is None else getattr(each, part) for each in found}


# What does not need a parameter's values: its stand-in has the metadata.
_VALUE_FREE = {
    *_named(
        _Tensor,
        "device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_mps is_nested is_quantized "
        "is_sparse is_sparse_csr is_xpu itemsize layout ndim output_nr requires_grad retains_grad "
        "shape _backward_hooks _grad _version",
        "__get__",
    ),
    *_named(_Tensor, "grad requires_grad _backward_hooks _grad", "__set__"),
    *_named(
        _Tensor,
        "__len__ dim element_size get_device is_complex is_floating_point is_inference is_signed "
        "nelement new_empty new_full new_ones new_zeros numel register_hook "
        "register_post_accumulate_grad_hook requires_grad_ retain_grad size untyped_storage",
    ),
    *_named(
        torch,
        "empty_like full_like is_complex is_floating_point is_inference is_signed numel ones_like "
        "is_same_size rand_like randint_like randn_like zeros_like",
    ),
}
_TAKERS = {
    torch.autograd._make_grads.__code__: "backward(), as the gradient of an output,",
    vmap._validate_and_get_batch_size.__code__: "torch.vmap()",
}
_SIZES = {_Tensor.size, torch.is_same_size}
_BACKWARDS = {torch.autograd.backward, torch.autograd.grad}
# What a stand-in, which has a single element, would answer wrongly.
_LAYOUT = {
    _Tensor.is_contiguous,
    _Tensor.nbytes.__get__,
    _Tensor.storage_offset,
    _Tensor.stride,
}
