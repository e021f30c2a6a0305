"""Heads of language models that compute logits only if somebody needs them whole.

An operator that is not known gets the values, which are computed once and kept, with plain torch's
bits: it costs memory and is never wrong.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from hetero.stand_ins.offloaded_tensor import GIVE_MEMORY, OffloadedTensor
from hetero.tiling.cross_entropy import (
    Elementwise,
    RowTiles,
    TileOptions,
    check_tile_tokens,
    reduced_loss,
)
from hetero.tiling.forward_swap import ForwardSwap
from offload.errors import StaleGraphError
from offload.interrupts import uninterrupted


def tile_heads(model: torch.nn.Module, tile_tokens: int | None = None) -> ForwardSwap:
    """From here on the model's loss is computed without whole logits and without their gradient.

    The logits of a language model of Hugging Face's become deferred: cross-entropy of them, as
    `model(input_ids=..., labels=...)` computes it, is hetero.tiled_cross_entropy(); whatever else
    needs them (generate(), metrics, other losses) gets them whole, as before. Where the head has
    the embedding's weight, the embedding's gradient is made by rows and added to the head's, so
    that one gradient of the weight's size is in memory in place of three.

    Before or after hetero.initialize(), with any policy and number of ranks. Names, parameters and
    state stay; copies and pickles of the model are plain.

    Args:
        model: what has get_output_embeddings(), or parts that have.
        tile_tokens: as of hetero.tiled_cross_entropy().

    Returns:
        A handle: remove() makes the model plain again, and so does the end of a `with` block.

    Raises:
        ValueError: no head is found, it is not a plain torch.nn.Linear, or it is tiled already.
    """
    check_tile_tokens(tile_tokens)
    head = _head_of(model)
    route = GradRoute()
    embedding = _embedding_of(model)

    def defer(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        tied = embedding is not None and embedding.weight is head.weight
        grad_to = route.take() if tied else None
        weight = RowTiles([head.weight])
        return DeferredLogits.of(HeadInputs(hidden, weight, head.bias, tile_tokens, grad_to))

    def embed(embedding: torch.nn.Embedding, input: torch.Tensor) -> torch.Tensor:
        return route.embed(embedding, input)

    if embedding is None or embedding.weight is not head.weight:
        return ForwardSwap((head, defer))
    return ForwardSwap((head, defer), (embedding, embed), at_end=route.clear)


def _head_of(model: torch.nn.Module) -> torch.nn.Linear:
    get: Any = getattr(model, "get_output_embeddings", None)
    head = None if get is None else get()
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no head that get_output_embeddings() gives; give the "
            f"model of transformers itself, or call hetero.tiled_cross_entropy() in its loss"
        )
    if not isinstance(head, torch.nn.Linear) or type(head).forward is not torch.nn.Linear.forward:
        raise ValueError(
            f"the head of {type(model).__name__} is a {type(head).__name__} with a forward of its "
            f"own (adapters, or tile_heads() called twice?); it must be a plain torch.nn.Linear"
        )
    if "weight" not in head._parameters:
        raise ValueError(
            f"the weight of the head of {type(model).__name__} is computed (parametrized); it must "
            f"be a parameter"
        )
    return head


def _embedding_of(model: Any) -> torch.nn.Embedding | None:
    """The input embedding, if its gradient can be joined with the head's."""
    get = getattr(model, "get_input_embeddings", None)
    found = None if get is None else get()
    return found if isinstance(found, torch.nn.Embedding) and joins(found) else None


@dataclass(frozen=True)
class HeadInputs:
    """What logits are made of: F.linear(hidden, weight, bias).

    `weight_grad_to` gets the gradient of the weight that the tiled loss computes, if it is not
    None. Tiled losses that are made from now on have `loss_hooks`: no gradient of theirs passes a
    hook of the logits.
    """

    hidden: torch.Tensor
    weight: RowTiles
    bias: torch.Tensor | None
    tile_tokens: int | None
    weight_grad_to: torch.Tensor | None = None
    loss_hooks: list[Callable[[torch.Tensor], torch.Tensor | None]] = field(default_factory=list)

    @property
    def versions(self) -> list[int]:
        """Others after a change in place of what logits are made of, an update say."""
        given = (self.hidden, *self.weight.params, *(() if self.bias is None else (self.bias,)))
        return [0 if each.is_inference() else each._version for each in given]


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
        self._versions = inputs.versions
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
            made = self.inputs.weight.linear(self.inputs.hidden, self.inputs.bias)
            self.check_unchanged()
            return made
        with self.of._brought() as values:
            return self.by(values)

    def check_unchanged(self) -> None:
        """Raises StaleGraphError if the values that were just made are not those of the forward.

        (It comes after their use of the weight, which takes an update back that is a guess yet.)
        """
        if self.of is not None:
            self.of._source.check_unchanged()
        elif self.inputs.versions != self._versions:
            raise StaleGraphError(
                "logits of a tiled head, which are computed when they are needed, were needed for "
                "the first time after the head's weight or its input was changed, by "
                "optimizer.step() say; use them before that, or keep a copy: outputs.logits.clone()"
            )

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

    @property
    def inputs(self) -> HeadInputs:
        """What they are made of."""
        return self._source.inputs

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
            return _function_of(args[0], func, args[1:], kwargs or {})
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
        shape = (*hidden.shape[:-1], inputs.weight.rows)
        meta = torch.empty(shape, dtype=hidden.dtype, device="meta")
        return DeferredLogits._make(_Logits(inputs, meta), meta, hidden.device)

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


_aten = torch.ops.aten
_CASTS = {_aten._to_copy.default, _aten.clone.default}
_SAME = {_aten.detach.default, _aten.alias.default}
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default}
_SLICES = {_aten.slice.Tensor, _aten.select.int}
_SCALES = {_aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar}


def _is_elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is one of those functions of each logit alone that models have after a head."""
    if not isinstance(args[0], DeferredLogits) or args[0]._source.whole is not None:
        return False
    if func in _CASTS:
        return bool(kwargs.get("device", args[0].device) == args[0].device)
    if func in _SCALES:
        return isinstance(args[1], (int, float)) and not kwargs
    return func is _aten.tanh.default


def _function_of(
    logits: DeferredLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DeferredLogits:
    def by(values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = func(values, *args, **kwargs)
        return made

    on_meta = {name: value for name, value in kwargs.items() if name != "device"}
    meta = func(logits._meta, *args, **on_meta)
    source = _Logits(logits._source.inputs, meta, logits, by)
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
    if reduction not in ("mean", "sum", "none") or label_smoothing:
        return None  # torch makes it of whole logits, or tells what is wrong
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
            TileOptions(inputs.tile_tokens, elementwise),
            inputs.weight_grad_to,
        )
    input._source.check_unchanged()
    loss = loss.to(input.dtype)
    for hook in inputs.loss_hooks if loss.requires_grad else ():
        loss.register_hook(hook)
    return loss


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
        elif view.func in _SLICES and before.shape == meta.shape:
            pass  # all of the vocabulary
        else:
            return None
    return hidden, elementwise


def _dimension(view: Any) -> int:
    dimension: int = view.args[0] if view.args else 0
    return dimension


# The gradient of an embedding by rows, joined with that of a head that has the same weight.
#
# A tied weight gets two gradients of its size in one backward, the head's and the embedding's, and
# autograd adds them into a third one. Here the embedding gives the head something that takes the
# gradient of the weight in its place: when backward reaches the embedding, its rows are added to
# that, and one gradient goes on.
#
# The result has the bits of the sum (but that -0.0 stays -0.0), and autograd's graph keeps it right
# whatever part of the model a backward goes through. An embedding that is called several times
# before the head (T5's) is joined with the last call only.


def joins(embedding: torch.nn.Module) -> bool:
    """Whether the gradient of the embedding can be made by rows, with the same bits."""
    return (
        isinstance(embedding, torch.nn.Embedding)
        and type(embedding).forward is torch.nn.Embedding.forward
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
        and not embedding.sparse
    )


class GradRoute:
    """From the last call of an embedding to the next call of the head, in each thread its own."""

    def __init__(self) -> None:
        self._last = threading.local()

    @_disable_dynamo  # the compiler makes one function of what gives two
    def embed(self, embedding: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        """What the embedding gives for `ids`, in its place."""
        weight = embedding.weight
        if not (torch.is_grad_enabled() and weight.requires_grad):
            self.clear()
            return torch.nn.functional.embedding(ids, weight, embedding.padding_idx)
        inputs = (weight, ids, embedding.padding_idx)
        rows: torch.Tensor
        rows, self._last.grad_to = _RowsAndRoute.apply(*inputs)  # type: ignore[no-untyped-call]
        return rows

    def take(self) -> torch.Tensor | None:
        """What takes the gradient of the weight; None if nothing was embedded since the last call.

        It has the weight's shape, dtype and device, and the memory of one element.
        """
        grad_to: torch.Tensor | None = getattr(self._last, "grad_to", None)
        self.clear()
        # (A reentrant checkpoint embeds without a graph first.)
        return grad_to if grad_to is not None and grad_to.requires_grad else None

    def clear(self) -> None:
        """Forgets the last call."""
        self._last.grad_to = None


class _RowsAndRoute(torch.autograd.Function):
    """F.embedding(), and a tensor whose gradient is the rest of the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, ids: torch.Tensor, padding_idx: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Not saved by autograd: the head of another call may have taken the route of this one, and
        # then backward comes here twice.
        ctx.ids = ids.clone() if ids.is_inference() else ids
        ctx.vocabulary = weight.shape[0]
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        ctx.set_materialize_grads(False)
        rows = torch.nn.functional.embedding(ids, weight, padding_idx)
        return rows, torch.zeros((), dtype=weight.dtype, device=rows.device).expand(weight.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, rows_grad: torch.Tensor | None, rest: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        dense = torch.ops.aten.embedding_dense_backward
        if rows_grad is None:
            return rest, None, None
        if rest is None:
            made = dense(rows_grad, ctx.ids, ctx.vocabulary, ctx.padding_idx, False)
            return made, None, None
        used, places = ctx.ids.unique(return_inverse=True)
        padding = (used == ctx.padding_idx).nonzero()
        row_of_padding = int(padding) if padding.numel() else -1
        by_row = dense(rows_grad, places, used.numel(), row_of_padding, False)
        # Nobody else has it: the head's backward has made it for this.
        rest.index_copy_(0, used, rest.index_select(0, used).add_(by_row))
        return rest, None, None
