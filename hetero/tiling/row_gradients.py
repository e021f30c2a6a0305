"""The gradient of an embedding by rows, joined with that of a head that has the same weight.

A tied weight gets two gradients of its size in one backward, the head's and the embedding's, and
autograd adds them into a third one. Here the embedding gives the head something that takes the
gradient of the weight in its place: when backward reaches the embedding, its rows are added to
that, and one gradient goes on.

The result has the bits of the sum (but that -0.0 stays -0.0), and autograd's graph keeps it right
whatever part of the model a backward goes through. An embedding that is called several times before
the head (T5's) is joined with the last call only.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable


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
        ctx.vocabulary, ctx.padding_idx = (
            weight.shape[0],
            -1 if padding_idx is None else padding_idx,
        )
        ctx.set_materialize_grads(False)
        rows = torch.nn.functional.embedding(ids, weight, padding_idx)
        return rows, torch.zeros((), dtype=weight.dtype, device=rows.device).expand(weight.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, rows_grad: torch.Tensor | None, rest: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        if rows_grad is None or rest is None:
            dense = (
                None
                if rows_grad is None
                else _dense(rows_grad, ctx.ids, ctx.vocabulary, ctx.padding_idx)
            )
            return rest if dense is None else dense, None, None
        used, places = ctx.ids.unique(return_inverse=True)
        padding = (used == ctx.padding_idx).nonzero()
        row_of_padding = int(padding) if padding.numel() else -1
        by_row = _dense(rows_grad, places, used.numel(), row_of_padding)
        # Nobody else has it: the head's backward has made it for this.
        rest.index_copy_(0, used, rest.index_select(0, used).add_(by_row))
        return rest, None, None


def _dense(
    grad: torch.Tensor, ids: torch.Tensor, vocabulary: int, padding_idx: int
) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        grad, ids, vocabulary, padding_idx, False
    )
    return made
