"""A matrix whose rows are several parameters, and log-probabilities under a head that has one.

Vocabulary: *row tiles* are parameters that have some rows of a (V, w) matrix each, in order. A head
with row tiles has one of them in memory at a time. The graph of its loss is a chain with a node for
each tile: what backward sums up goes along the chain, and each node adds to it and gives its tile's
gradient away before the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from hetero.tiling.leaf_gradients import accumulate_now
from hetero.tiling.log_probs import (
    TileOptions,
    VocabularyGrads,
    note_log_probs,
    tile_parts,
)

# Columns of the chain's gradient after those of the hidden states: what a node needs of each token,
# the gradient of its label's log-probability, the sum of those of all, that of the sum of all; the
# largest logit, and the logarithm of the sum of exponentials.
_COLUMNS = 5


class RowTiles:
    """The parameters of row tiles.

    Args:
        params: (rows, w) each, one after another.
        shared: an embedding has them, too, whose gradient comes later in the same backward.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], shared: bool) -> None:
        self.params = tuple(params)
        self.shared = shared
        ends = accumulate(len(param) for param in params)
        self.ranges = [slice(begin, end) for begin, end in pairwise([0, *ends])]

    @property
    def rows(self) -> int:
        """V."""
        return self.ranges[-1].stop

    def linear(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """F.linear() with the whole matrix: (..., V); no more than one tile is needed at a time."""
        parts = [
            torch.nn.functional.linear(hidden, param, None if bias is None else bias[rows])
            for param, rows in zip(self.params, self.ranges, strict=True)
        ]
        return torch.cat(parts, -1)


def tiled_log_probs(
    hidden: torch.Tensor,
    weight: RowTiles,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: TileOptions,
    with_sums: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """label_log_probs() of a head with row tiles.

    A token tile's logits are computed from one tile of the weight after another, so all of them are
    used once for each token tile; in backward each is used once.

    Args:
        hidden: (T, w).
        weight: the head's, (V, w).
        bias: (V,), or None.
        labels: (T,) int64, each in [0, V).
        options: as of label_log_probs().
        with_sums: whether the second result is used in a graph.

    Returns:
        Two of (T,), fp32: the log-probabilities of the labels, and the sums of all.
    """
    tokens, vocabulary = hidden.shape[0], weight.rows
    results = torch.empty((4, tokens), dtype=torch.float32, device=hidden.device)
    chain: torch.Tensor | None = None
    given = (hidden, *weight.params, *(() if bias is None else (bias,)))
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        chain = _Begin.apply(hidden)  # type: ignore[no-untyped-call]
    parts = list(tile_parts(tokens, options.tokens(vocabulary))) or [slice(0, 0)]
    for part in parts:
        logits = torch.empty(
            (part.stop - part.start, vocabulary), dtype=hidden.dtype, device=hidden.device
        )
        for param, rows in zip(weight.params, weight.ranges, strict=True):
            tile = _Tile(rows, labels, options, weight.shared, with_sums, vocabulary)
            bias_part = None if bias is None else bias[rows]
            link = chain if part is parts[-1] else None
            made = _use_tile(param, hidden, bias_part, part, logits, tile, link)
            chain = chain if made is None else made
        with torch.no_grad():
            note_log_probs(logits, labels, part, options.elementwise, results)
        del logits
    found, sums = results[0], results[1]
    if chain is None:
        return found, sums
    found, sums = _End.apply(chain, *results, vocabulary)  # type: ignore[no-untyped-call]
    return found, sums


class _Tile:
    """What a node of the chain knows beside tensors that autograd saves."""

    def __init__(
        self,
        rows: slice,
        labels: torch.Tensor,
        options: TileOptions,
        shared: bool,
        with_sums: bool,
        vocabulary: int,
    ) -> None:
        self.rows, self.labels, self.options = rows, labels, options
        self.shared, self.with_sums, self.vocabulary = shared, with_sums, vocabulary


def _use_tile(
    param: torch.Tensor,
    hidden: torch.Tensor,
    bias: torch.Tensor | None,
    part: slice,
    logits: torch.Tensor,
    tile: _Tile,
    chain: torch.Tensor | None,
) -> torch.Tensor | None:
    """Writes a tile's logits of some tokens; with `chain` returns that with the tile's node."""
    if has_torch_function((param,)):  # an absent one is brought in once for both
        made: torch.Tensor | None = handle_torch_function(
            _use_tile, (param,), param, hidden, bias, part, logits, tile, chain
        )
        return made
    with torch.no_grad():
        logits[:, tile.rows] = torch.nn.functional.linear(
            hidden[part], _as(param, hidden), bias if bias is None else bias.detach()
        )
    if chain is None:
        return None
    linked: torch.Tensor = _Link.apply(  # type: ignore[no-untyped-call]
        chain, param, bias, hidden.detach(), tile
    )
    return linked


def _as(param: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The parameter in the dtype of the hidden states, which autocast may have changed."""
    return param if param.dtype is hidden.dtype else param.to(hidden.dtype)


class _Begin(torch.autograd.Function):
    """The chain's beginning, whose gradient is that of the hidden states, in fp32, and more."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.width, ctx.dtype = hidden.shape[1], hidden.dtype
        shape = (hidden.shape[0], ctx.width + _COLUMNS)
        zero = torch.zeros((), dtype=torch.float32, device=hidden.device)
        made: torch.Tensor = zero.expand(shape)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sums: torch.Tensor) -> torch.Tensor:
        return sums[:, : ctx.width].to(ctx.dtype)


class _Link(torch.autograd.Function):
    """A tile's node."""

    @staticmethod
    def forward(
        ctx: Any,
        chain: torch.Tensor,
        param: torch.Tensor,
        bias: torch.Tensor | None,
        hidden: torch.Tensor,
        tile: _Tile,
    ) -> torch.Tensor:
        ctx.save_for_backward(param, bias, hidden, tile.labels)
        ctx.param, ctx.tile = param, tile
        return chain.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, bias, hidden, labels = ctx.saved_tensors
        tile: _Tile = ctx.tile
        dtype, values = values.dtype, _as(values, hidden)
        width = hidden.shape[1]
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight_grad = torch.empty_like(values) if needs_weight else None
        bias_grad = torch.empty_like(bias) if needs_bias else None
        found, total, of_sums, largest, log_sums = sums[:, width:].unbind(1)
        grads = VocabularyGrads(
            hidden, labels, largest, log_sums, found, total, of_sums if tile.with_sums else None
        )
        numel = tile.rows.stop - tile.rows.start
        for part in tile_parts(numel, tile.options.rows(hidden.shape[0], tile.vocabulary)):
            at = slice(tile.rows.start + part.start, tile.rows.start + part.stop)
            rows = values[part]
            grad = grads.of(rows, None if bias is None else bias[part], at, tile.options)
            sums[:, :width] += grad @ rows
            if weight_grad is not None:
                torch.mm(grad.t(), hidden, out=weight_grad[part])
            if bias_grad is not None:
                torch.sum(grad, 0, out=bias_grad[part])
            del grad, rows
        del values
        if weight_grad is not None:
            weight_grad = weight_grad.to(dtype)
            if tile.shared and accumulate_now(ctx.param, weight_grad):
                weight_grad = None
        return sums, weight_grad, bias_grad, None, None


class _End(torch.autograd.Function):
    """The chain's end, which has the results."""

    @staticmethod
    def forward(
        ctx: Any,
        chain: torch.Tensor,
        found: torch.Tensor,
        sums: torch.Tensor,
        largest: torch.Tensor,
        log_sums: torch.Tensor,
        vocabulary: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(largest, log_sums)
        ctx.shape, ctx.vocabulary = chain.shape, vocabulary
        ctx.set_materialize_grads(False)
        return found.clone(), sums.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, found_grad: torch.Tensor | None, sums_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        largest, log_sums = ctx.saved_tensors
        begun = torch.zeros(ctx.shape, dtype=torch.float32, device=largest.device)
        found, total, of_sums, *logarithms = begun[:, -_COLUMNS:].unbind(1)
        if found_grad is not None:
            found.copy_(found_grad)
        total.copy_(found)
        if sums_grad is not None:
            of_sums.copy_(sums_grad)
            total.add_(ctx.vocabulary * sums_grad)
        for into, values in zip(logarithms, (largest, log_sums), strict=True):
            into.copy_(values)
        return begun, None, None, None, None, None
