"""The gradient placeholder: `.grad` of a managed parameter, whose gradient its chunk keeps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hetero.stand_ins.offloaded_tensor import OffloadedTensor
from offload.errors import HeteroError
from offload.interrupts import uninterrupted


class GradOps(Protocol):
    """What an engine does to gradients of `members` when an operator gets their placeholders."""

    def norms(self, members: Sequence[Any], norm_type: float) -> list[float]:
        """The norm of each gradient; `norm_type` is 2 or inf."""

    def multiply(self, members: Sequence[Any], factor: float) -> None:
        """Multiplies each gradient by `factor`."""

    def clamp(self, members: Sequence[Any], low: float | None, high: float | None) -> None:
        """Limits each element to [low, high]; None: no limit."""

    def unscale(self, members: Sequence[Any], factor: float) -> bool:
        """Multiplies each gradient by `factor`; returns whether an element is not finite."""

    def zero(self, members: Sequence[Any]) -> None:
        """Makes each gradient zero."""

    def read(self, members: Sequence[Any]) -> list[torch.Tensor]:
        """A copy of each gradient, whole, fp32."""

    def replace(self, managed: Any, grad: torch.Tensor) -> None:
        """Keeps `grad`, whole, instead of the gradient."""


class GradOwner(Protocol):
    """What a placeholder needs to know of its parameter."""

    param: torch.nn.Parameter
    grad_ops: GradOps | None
    absent_grad: GradPlaceholder  # of the gradient that it has now, or had last

    @property
    def name(self) -> str:
        """The parameter's name in the model."""

    @property
    def has_grad(self) -> bool:
        """Whether the parameter has a gradient now."""


class GradSource:
    """The kept gradient of a parameter, for as long as the parameter has one."""

    def __init__(self, owner: GradOwner, dtype: torch.dtype) -> None:
        # Weak: the garbage collector does not see through `.grad`.
        self._owner = weakref.ref(owner)
        self._dtype = dtype

    @property
    def name(self) -> str:
        owner = self._owner()
        return f"the gradient of {owner.name if owner else 'a parameter of a closed engine'}"

    def owner(self) -> GradOwner:
        """The parameter. Raises HeteroError if its gradient has been cleared."""
        owner = self._owner()
        if owner is None or not owner.has_grad or owner.absent_grad._source is not self:
            raise HeteroError(
                f"{self.name} was cleared; what was its .grad stands for nothing now: take .grad "
                f"again after backward()"
            )
        return owner

    @contextmanager
    def values(self, write: bool) -> Iterator[torch.Tensor]:
        owner = self.owner()
        assert owner.grad_ops is not None
        values = owner.grad_ops.read([owner])[0].to(self._dtype)
        yield values
        if write:
            owner.grad_ops.replace(owner, values)

    def empty(self) -> torch.Tensor:
        return torch.empty((), dtype=self._dtype, device="cpu")


class GradPlaceholder(OffloadedTensor):
    """The `.grad` of a managed parameter: it has no memory and stands for the kept gradient.

    Reading it gives the gradient as the next step will use it: averaged over the ranks, unscaled
    and clipped so far. Operators that training code applies to gradients act on what is kept
    without bringing it in: the 2-norm and the infinity norm, multiplying and dividing by a number,
    clamping between numbers, GradScaler's unscaling and setting to zero. Any other change brings
    the gradient in and keeps the result. With several ranks all of them must do the same with it.
    """

    _source: GradSource
    _is_meta_to_torch = False  # torch wants a `.grad` on the parameter's device

    @staticmethod
    def of(owner: GradOwner, dtype: torch.dtype, device: torch.device) -> GradPlaceholder:
        """Makes the placeholder of `owner`'s gradient, in `dtype`, on `device`."""
        meta = torch.empty(owner.param.shape, dtype=dtype, device="meta")
        source = GradSource(owner, torch.float32 if dtype is torch.float16 else dtype)
        return GradPlaceholder._make(source, meta, device)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype, but fp32 instead of fp16.

        GradScaler.unscale_() refuses fp16 gradients, because they would vanish when unscaled. These
        do not: unscaling changes a factor in fp32 and leaves the kept gradient as it is.
        """
        dtype = torch.Tensor.dtype.__get__(self)  # type: ignore[attr-defined]
        return torch.float32 if dtype is torch.float16 else dtype

    @property
    def data(self) -> torch.Tensor:
        """An alias of the gradient."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values is not self:
            self.copy_(values)

    @classmethod
    @uninterrupted
    def _operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        understood = _UNDERSTOOD.get(func)
        if understood is not None:
            result = understood(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return super()._operate(func, args, kwargs)


# Handlers of the operators that act on kept gradients. Each gets the operator itself first. If it
# returns NotImplemented, the gradient is brought in, as for any other operator.

_Handler = Callable[..., Any]
_Split = tuple[list[GradPlaceholder], list[torch.Tensor]]


def _split(grads: Sequence[torch.Tensor]) -> _Split:
    ours = [grad for grad in grads if isinstance(grad, GradPlaceholder)]
    return ours, [grad for grad in grads if not isinstance(grad, GradPlaceholder)]


def _whole(*grads: object) -> bool:
    """Whether every placeholder among `grads` stands for all of its gradient."""
    return not any(isinstance(grad, GradPlaceholder) and not grad._whole for grad in grads)


def _by_engine(grads: Sequence[GradPlaceholder]) -> list[tuple[GradOps, list[GradOwner]]]:
    found: dict[int, tuple[GradOps, list[GradOwner]]] = {}
    for grad in grads:
        owner = grad._source.owner()
        assert owner.grad_ops is not None
        found.setdefault(id(owner.grad_ops), (owner.grad_ops, []))[1].append(owner)
    return list(found.values())


def _number(value: object) -> float | None:
    """`value` as a number, if it is one or a tensor of one element; else None."""
    if isinstance(value, torch.Tensor):
        plain = not isinstance(value, GradPlaceholder)
        return float(value) if plain and value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def _vector_norm(
    func: Any,
    grad: torch.Tensor,
    norm_type: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    of_all = dim is None or sorted(d % grad.ndim for d in dim) == list(range(grad.ndim))
    if not isinstance(grad, GradPlaceholder) or not grad._whole or not of_all or keepdim:
        return NotImplemented
    if norm_type not in _KEPT_NORMS:
        return NotImplemented
    owner = grad._source.owner()
    assert owner.grad_ops is not None
    (norm,) = owner.grad_ops.norms([owner], float(norm_type))
    return torch.tensor(norm, dtype=dtype or torch.float32, device=grad._device)


def _foreach_norm(
    func: Any,
    grads: Sequence[torch.Tensor],
    norm_type: float = 2,
    dtype: torch.dtype | None = None,
) -> Any:
    if not (_whole(*grads) and norm_type in _KEPT_NORMS):
        return NotImplemented
    ours, others = _split(grads)
    norms = iter(func(others, norm_type, dtype=dtype) if others else [])
    found = {
        id(owner): torch.tensor(norm, dtype=dtype or torch.float32, device=ours[0]._device)
        for ops, owners in _by_engine(ours)
        for owner, norm in zip(owners, ops.norms(owners, float(norm_type)), strict=True)
    }
    return [
        found[id(grad._source.owner())] if isinstance(grad, GradPlaceholder) else next(norms)
        for grad in grads
    ]


# A method of GradOps, and its arguments after the members; None if no method does what is asked.
_Change = tuple[str, tuple[Any, ...]] | None


def _in_place(change: Callable[..., _Change]) -> _Handler:
    """Makes the handler of an in-place operator on one tensor or on a list of tensors.

    `change` gets the operator's other arguments.
    """

    def handler(func: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        several = isinstance(target, (list, tuple))
        if several:
            ours, others = _split(target)
        else:
            ours, others = [target] if isinstance(target, GradPlaceholder) else [], []
        made = change(*args, **kwargs) if ours and _whole(*ours) else None
        if made is None:
            return NotImplemented
        method, values = made
        for ops, owners in _by_engine(ours):
            getattr(ops, method)(owners, *values)
        if others:
            func(others, *args, **kwargs)
        return None if several else target

    return handler


def _multiply(other: Any) -> _Change:
    factor = _number(other)
    return None if factor is None else ("multiply", (factor,))


def _divide(other: Any) -> _Change:
    divisor = _number(other)
    return None if not divisor else ("multiply", (1.0 / divisor,))


def _clamp(min: Any = None, max: Any = None) -> _Change:
    return "clamp", tuple(None if bound is None else float(bound) for bound in (min, max))


def _unscale(
    func: Any, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> Any:
    if not _whole(*grads):
        return NotImplemented
    ours, others = _split(grads)
    if others:
        func(others, found_inf, inv_scale)
    for ops, owners in _by_engine(ours):
        if ops.unscale(owners, float(inv_scale)):
            found_inf.fill_(1.0)
    return None


_KEPT_NORMS = (2, math.inf)  # that are taken without bringing the gradient in
_aten = torch.ops.aten
_UNDERSTOOD: dict[Any, _Handler] = {
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.mul_.Tensor: _in_place(_multiply),
    _aten._foreach_mul_.Scalar: _in_place(_multiply),
    _aten._foreach_mul_.Tensor: _in_place(_multiply),
    _aten.div_.Tensor: _in_place(_divide),
    _aten._foreach_div_.Scalar: _in_place(_divide),
    _aten._foreach_div_.Tensor: _in_place(_divide),
    _aten.clamp_.default: _in_place(_clamp),
    _aten.clamp_min_.default: _in_place(_clamp),
    _aten.clamp_max_.default: _in_place(lambda max: _clamp(max=max)),
    _aten._foreach_clamp_min_.Scalar: _in_place(_clamp),
    _aten._foreach_clamp_max_.Scalar: _in_place(lambda max: _clamp(max=max)),
    _aten.zero_.default: _in_place(lambda: ("zero", ())),
    _aten._foreach_zero_.default: _in_place(lambda: ("zero", ())),
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
