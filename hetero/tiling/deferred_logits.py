"""Logits that are computed only if somebody needs them whole.

An operator that is not known gets the values, which are computed once and kept, with plain torch's
bits: it costs memory and is never wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from hetero.stand_ins.offloaded_tensor import GIVE_MEMORY, OffloadedTensor
from hetero.tiling.cross_entropy import reduced_loss
from hetero.tiling.log_probs import Elementwise, RowTiles, TileOptions
from offload.errors import StaleGraphError
from offload.interrupts import uninterrupted


@dataclass(frozen=True)
class HeadInputs:
    """What logits are made of: F.linear(hidden, weight, bias).

    `weight_grad_to` gets the gradient of the weight that the tiled loss computes, if it is not
    None.
    """

    hidden: torch.Tensor
    weight: RowTiles
    bias: torch.Tensor | None
    tile_tokens: int | None
    weight_grad_to: torch.Tensor | None = None


class _Logits:
    """The values of deferred logits, whole once somebody has needed them.

    They are those of the head, or a function of other ones, element by element.
    """

    name = "deferred logits"

    def __init__(
        self,
        inputs: HeadInputs,
        meta: torch.Tensor,
        of: DeferredLogits | None = None,
        by: Elementwise | None = None,
    ) -> None:
        """`meta` has their shape and dtype; `by` makes them of `of`, and both are None for those of
        the head."""
        self.inputs, self.meta = inputs, meta
        self.of, self.by = of, by
        self.whole: torch.Tensor | None = None
        self.functions: weakref.WeakSet[_Logits] = weakref.WeakSet()  # of these

    @contextmanager
    def values(self, write: bool) -> Iterator[torch.Tensor]:
        if write:  # what was computed of these before has their values as they were
            for function in list(self.functions):
                with function.values(False):
                    pass
            self.functions.clear()
        if self.whole is None:
            # Under the operator that asked torch functions are off, by which an absent weight gets
            # its values.
            with torch.no_grad(), torch._C._EnableTorchFunction():
                self.whole = self._computed()
        yield self.whole

    def _computed(self) -> torch.Tensor:
        if self.of is None or self.by is None:
            return self.inputs.weight.linear(self.inputs.hidden, self.inputs.bias)
        with self.of._brought() as values:
            return self.by(values)

    def empty(self) -> torch.Tensor:
        with self.values(False) as values:
            return values


class DeferredLogits(OffloadedTensor):
    """What a head returns: (..., V) logits without memory.

    torch.nn.functional.cross_entropy() of them, of a part of the tokens, and of what a scale, a
    cap or a change of dtype makes of them, is tiled. Anything else that needs values computes
    all of them, once, and goes on with those: generation, metrics, other losses; in graphs, too.
    """

    _source: _Logits
    _is_meta_to_torch = False

    @staticmethod
    @_disable_dynamo
    def of(inputs: HeadInputs) -> torch.Tensor:
        """What a head returns for these inputs: in a graph, if one is recorded."""
        made: torch.Tensor = _Head.apply(  # type: ignore[no-untyped-call]
            inputs.hidden, inputs.bias, inputs, *inputs.weight.params
        )
        return made

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.cross_entropy:
            loss = _tiled_loss(*args, **(kwargs or {}))
            if loss is not None:
                return loss
        if func in GIVE_MEMORY and isinstance(args[0], DeferredLogits):
            with args[0]._brought() as values:
                return func(values.detach(), *args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    @uninterrupted
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten._unsafe_view.default:
            func = _aten.view.default  # of a clone that reshape() has made, which nobody else has
        if _is_elementwise(func, args, kwargs or {}):
            return _function_of(args[0], _Operator(func, args[1:], kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Head(torch.autograd.Function):
    """F.linear(), whose result is not computed: one row tile of the weight at a time is needed in
    backward, and none in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        inputs: HeadInputs,
        *params: torch.Tensor,
    ) -> torch.Tensor:
        # A whole weight is in memory now, and need not stay. Several tiles would come back at once:
        # absent ones have aliases without memory.
        whole = params if len(params) == 1 else ()
        ctx.save_for_backward(hidden, *whole)
        with torch._C._EnableTorchFunction():
            aliases = [] if whole else [param.detach() for param in params]
        ctx.ranges = inputs.weight.ranges
        ctx.tiles = [
            (alias, alias._version, ctx.ranges[index]) for index, alias in enumerate(aliases)
        ]
        return _deferred(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, *whole = ctx.saved_tensors
        needs_hidden, needs_bias, _, *needs_weight = ctx.needs_input_grad
        flat, states = grad.reshape(-1, grad.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
        made: torch.Tensor | None = None  # the sum over tiles, in fp32
        if needs_hidden and whole:
            made = flat @ whole[0]
        for alias, version, rows in ctx.tiles:
            if alias._version != version:
                raise StaleGraphError(
                    f"a part of a head's weight, of shape {tuple(alias.shape)}, that backward "
                    f"needs was changed after its use in forward"
                )
            if needs_hidden:
                part = (flat[:, rows] @ alias).float()
                made = part if made is None else made.add_(part)
        return (
            None if made is None else made.to(hidden.dtype).reshape(hidden.shape),
            flat.sum(0) if needs_bias else None,
            None,
            *(
                flat[:, rows].t() @ states if needed else None
                for rows, needed in zip(ctx.ranges, needs_weight, strict=True)
            ),
        )


def _deferred(inputs: HeadInputs) -> DeferredLogits:
    hidden = inputs.hidden
    shape = (*hidden.shape[:-1], inputs.weight.rows)
    meta = torch.empty(shape, dtype=hidden.dtype, device="meta")
    return DeferredLogits._make(_Logits(inputs, meta), meta, hidden.device)


_aten = torch.ops.aten
_CASTS = {_aten._to_copy.default, _aten.clone.default}
_SAME = {_aten.detach.default, _aten.alias.default}
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default}
_SLICES = {_aten.slice.Tensor, _aten.select.int}
_SCALES = {_aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar}


@dataclass(frozen=True)
class _Operator:
    """A function of each logit alone."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.func(logits, *self.args, **self.kwargs)
        return made


def _is_elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is one of those functions of each logit alone that models have after a head."""
    if not isinstance(args[0], DeferredLogits) or args[0]._source.whole is not None:
        return False
    if func in _CASTS:
        return bool(kwargs.get("device", args[0].device) == args[0].device)
    if func in _SCALES:
        return isinstance(args[1], (int, float)) and not kwargs
    return func is _aten.tanh.default


def _function_of(logits: DeferredLogits, operator: _Operator) -> DeferredLogits:
    on_meta = {name: value for name, value in operator.kwargs.items() if name != "device"}
    meta = operator.func(logits._meta, *operator.args, **on_meta)
    source = _Logits(logits._source.inputs, meta, logits, operator)
    logits._source.functions.add(source)
    return DeferredLogits._make(source, meta, logits.device)


def _tiled_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """torch.nn.functional.cross_entropy(); None if it needs the logits whole."""
    if not isinstance(input, DeferredLogits) or type(target) is not torch.Tensor:
        return None
    if input.dim() != 2 or target.shape != input.shape[:1] or target.is_floating_point():
        return None
    if not (weight is None and size_average is None and reduce is None):
        return None
    if reduction not in ("mean", "sum", "none") or not 0 <= label_smoothing <= 1:
        return None  # torch tells what is wrong
    # Logits that were detached, or made without a graph, have a loss without one.
    with torch.set_grad_enabled(torch.is_grad_enabled() and input.requires_grad):
        found = _of_tokens(input)
        if found is None:
            return None
        hidden, elementwise = found
        inputs = input._source.inputs
        loss = reduced_loss(
            hidden,
            inputs.weight if inputs.weight.whole is None else inputs.weight.whole,
            target,
            inputs.bias,
            ignore_index,
            reduction,
            label_smoothing,
            TileOptions(inputs.tile_tokens, elementwise),
            inputs.weight_grad_to,
        )
    return loss.to(input.dtype)


def _of_tokens(logits: DeferredLogits) -> tuple[torch.Tensor, tuple[Elementwise, ...]] | None:
    """The hidden states of these logits' tokens, and what is done to what the head gives of them.

    None if the logits are there, and may have been written to, or if they are not whole rows.
    """
    source = logits._source
    if source.whole is not None:
        return None
    hidden = source.inputs.hidden
    elementwise: tuple[Elementwise, ...] = ()
    if source.of is not None and source.by is not None:
        found = _of_tokens(source.of)
        if found is None:
            return None
        hidden, elementwise = found[0], (*found[1], source.by)
    meta, vocabulary = source.meta, source.meta.shape[-1]
    for view in logits._views:
        before, meta = meta, view.of(meta)
        if view.func in _SAME:
            continue
        if view.func in _RESHAPES and before.shape[-1] == meta.shape[-1] == vocabulary:
            hidden = hidden.reshape(*meta.shape[:-1], hidden.shape[-1])
        elif view.func in _SLICES and _dimension(view) % before.dim() != before.dim() - 1:
            hidden = view.of(hidden)
        else:
            return None
    return hidden, elementwise


def _dimension(view: Any) -> int:
    dimension: int = view.args[0] if view.args else 0
    return dimension
