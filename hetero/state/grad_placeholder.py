"""The gradient placeholder: `.grad` of a managed parameter, whose gradient its chunk keeps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch.utils._pytree import tree_map_only

from offload.errors import HeteroError


class GradOps(Protocol):
    """What an engine does to gradients of `members` when an operator gets their placeholders."""

    def norms(self, members: Sequence[Any], norm_type: float) -> list[float]:
        """The norm of each gradient; `norm_type` is 2 or inf. Raises ValueError for others."""

    def multiply(self, members: Sequence[Any], factor: float) -> None:
        """Multiplies each gradient by `factor`."""

    def clamp(self, members: Sequence[Any], low: float | None, high: float | None) -> None:
        """Limits each element to [low, high]; None: no limit."""

    def unscale(self, members: Sequence[Any], factor: float) -> bool:
        """Multiplies each gradient by `factor`; returns whether an element is not finite."""

    def forget(self, members: Sequence[Any]) -> None:
        """Clears each gradient."""

    def any_non_finite(self, members: Sequence[Any]) -> bool:
        """Whether an element of a gradient is infinite or NaN."""

    def read(self, managed: Any) -> torch.Tensor:
        """A copy of the gradient, whole, fp32."""


class GradOwner(Protocol):
    """What a placeholder needs to know of its parameter."""

    param: torch.nn.Parameter
    grad_ops: GradOps | None

    @property
    def name(self) -> str:
        """The parameter's name in the model."""

    @property
    def has_grad(self) -> bool:
        """Whether the parameter has a gradient now."""


class GradPlaceholder(torch.Tensor):
    """A tensor with the shape of a gradient that reads NaN and stands for the kept gradient.

    Operators that training code applies to gradients act on the kept gradient: the 2-norm and the
    infinity norm, multiplying and dividing by a number, clamping between numbers, GradScaler's
    unscaling, setting to zero (which clears the gradient, as zero_grad() does), and isfinite(),
    isnan() and isinf(). So torch.nn.utils.clip_grad_norm_, clip_grad_value_, get_total_norm and
    torch.amp.GradScaler work. Any other write raises HeteroError. hetero.grads() has the values.
    """

    _owner: weakref.ref[GradOwner]  # weak: the garbage collector does not see through `.grad`
    _whole: bool  # False for a view of a part of it, or in another shape

    @staticmethod
    def of(owner: GradOwner, dtype: torch.dtype, device: torch.device) -> GradPlaceholder:
        """Makes the placeholder of `owner`'s gradient, in `dtype`, on `device`."""
        nan = _nan(owner.param.shape, dtype, device)
        return GradPlaceholder._make(nan, weakref.ref(owner), True)

    @staticmethod
    def _make(plain: torch.Tensor, owner: weakref.ref[GradOwner], whole: bool) -> GradPlaceholder:
        made: GradPlaceholder = torch.Tensor._make_subclass(GradPlaceholder, plain)
        made._owner = owner
        made._whole = whole
        return made

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype, but fp32 instead of fp16.

        GradScaler.unscale_() refuses fp16 gradients, because they would vanish when unscaled. These
        do not: unscaling changes a factor in fp32 and leaves the kept gradient as it is.
        """
        dtype = torch.Tensor.dtype.__get__(self)  # type: ignore[attr-defined]
        return torch.float32 if dtype is torch.float16 else dtype

    def owner(self) -> GradOwner:
        """The parameter. Raises HeteroError if its gradient has been cleared."""
        owner = self._owner()
        if owner is None or not owner.has_grad:
            raise HeteroError(
                f"the gradient of {owner.name if owner else 'a parameter'} was cleared; what was "
                f"its .grad stands for nothing now: take .grad again after backward()"
            )
        return owner

    @property
    def owner_name(self) -> str:
        """The parameter's name, for errors."""
        owner = self._owner()
        return owner.name if owner else "a parameter of a closed engine"

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"GradPlaceholder(shape={tuple(self.shape)}: the gradient of {self.owner_name} is kept "
            f"by hetero; hetero.grads() reads it)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HeteroError(
            f"the .grad of {self.owner_name} cannot be saved or copied, hetero keeps the gradient "
            f"elsewhere; use hetero.grads()"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(None)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Operators arrive in __torch_dispatch__, whatever Python name they were called by; but
        # isfinite() arrives there in tiles.
        if func in _WHERE and isinstance(args[0], GradPlaceholder) and args[0]._whole:
            return _where(func, args[0])
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        understood = _UNDERSTOOD.get(func)
        if understood is not None:
            result = understood(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        _refuse_writes(func, args, kwargs)
        result = func(*_as_nan(args), **_as_nan(kwargs))
        returns = func._schema.returns
        if returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write:
            # A view is a placeholder too, so that writes to it are refused or understood.
            owner, whole = args[0]._owner, args[0]._whole and func in _SAME
            return tree_map_only(
                torch.Tensor, lambda view: GradPlaceholder._make(view, owner, whole), result
            )
        return result


_WHERE = {
    torch.isfinite: True,
    torch.Tensor.isfinite: True,
    torch.isnan: False,
    torch.Tensor.isnan: False,
    torch.isinf: False,
    torch.Tensor.isinf: False,
}


def _where(func: Any, grad: GradPlaceholder) -> torch.Tensor:
    ((ops, (owner,)),) = _by_engine([grad])
    if ops.any_non_finite([owner]):
        return cast(torch.Tensor, func(ops.read(owner)))
    return torch.tensor(_WHERE[func], device=grad.device).expand(grad.shape)


def _nan(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def _as_nan(values: Any) -> Any:
    def plain(grad: GradPlaceholder) -> torch.Tensor:
        dtype = torch.Tensor.dtype.__get__(grad)  # type: ignore[attr-defined]
        return _nan(grad.shape, dtype, grad.device)

    return tree_map_only(GradPlaceholder, plain, values)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, GradPlaceholder):
                raise HeteroError(
                    f"{func} would write to the gradient of {tensor.owner_name}, which hetero "
                    f"keeps elsewhere; .grad can be clipped, clamped, multiplied by a number and "
                    f"cleared: for anything else read it with hetero.grads() and assign a new one "
                    f"to .grad"
                )


# Handlers of the operators that act on kept gradients. Each gets the operator itself first. If it
# returns NotImplemented, the call is a read of NaN or a refused write, as of any other operator.

_Handler = Callable[..., Any]
_Split = tuple[list[GradPlaceholder], list[torch.Tensor]]


def _split(grads: Sequence[torch.Tensor]) -> _Split:
    ours = [grad for grad in grads if isinstance(grad, GradPlaceholder)]
    return ours, [grad for grad in grads if not isinstance(grad, GradPlaceholder)]


def _whole(*grads: object) -> bool:
    """Whether every placeholder among `grads` stands for all of its gradient."""
    return all(grad._whole for grad in grads if isinstance(grad, GradPlaceholder))


def _by_engine(grads: Sequence[GradPlaceholder]) -> list[tuple[GradOps, list[GradOwner]]]:
    found: dict[int, tuple[GradOps, list[GradOwner]]] = {}
    for grad in grads:
        owner = grad.owner()
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
    if not (isinstance(grad, GradPlaceholder) and grad._whole and of_all and not keepdim):
        return NotImplemented
    ((ops, owners),) = _by_engine([grad])
    norm = ops.norms(owners, float(norm_type))[0]
    return torch.tensor(norm, dtype=dtype or torch.float32, device=grad.device)


def _foreach_norm(
    func: Any,
    grads: Sequence[torch.Tensor],
    norm_type: float = 2,
    dtype: torch.dtype | None = None,
) -> Any:
    if not _whole(*grads):
        return NotImplemented
    ours, others = _split(grads)
    norms = iter(func(others, norm_type, dtype=dtype) if others else [])
    found = {
        id(owner): torch.tensor(norm, dtype=dtype or torch.float32, device=owner.param.device)
        for ops, owners in _by_engine(ours)
        for owner, norm in zip(owners, ops.norms(owners, float(norm_type)), strict=True)
    }
    return [
        found[id(grad.owner())] if isinstance(grad, GradPlaceholder) else next(norms)
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
        grads = target if several else [target]
        ours, others = _split(grads)
        made = change(*args, **kwargs) if ours and _whole(*grads) else None
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


_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default}  # .data, .detach()
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
    _aten.zero_.default: _in_place(lambda: ("forget", ())),
    _aten._foreach_zero_.default: _in_place(lambda: ("forget", ())),
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
