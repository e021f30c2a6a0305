"""Cross-entropy of a linear head's logits that are never in memory whole, by its log-probabilities.

Vocabulary: hidden states are (T tokens, w), the head's weight is (V, w), logits would be (T, V).
*Row tiles* are parameters that have some rows of the weight each, in order; a plain head has one. A
*token tile* is the logits of some tokens over all of V, a *vocabulary tile* those of all tokens
over some rows of a row tile. Forward takes token tiles, because the normalisation of a token needs
all of its logits at once; it computes them from one row tile after another. Backward computes
logits once more, by vocabulary tiles: each rows of the weight's gradient are one matrix product
over all tokens, rounded once, as without tiles.

So no fp32 copy of the weight's gradient is needed, as a sum over token tiles would in bf16, where
each addition rounds, and small ones vanish. Only the gradient of the hidden states is summed over
vocabulary tiles, in fp32. The loss has the bits of transformers' because the rows of a matrix
product do not depend on how many there are (true of the CPU's from some 16 rows on; tests say so).

A head with several row tiles has one of them in memory at a time. The graph of its loss is a chain
with a node for each row tile: what backward sums up goes along the chain, and each node adds to it
and gives its tile's gradient away before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.overrides import handle_torch_function, has_torch_function

_REDUCTIONS = ("mean", "sum", "none")
_IGNORED = -100
# Elements of logits that are in memory at a time, if nothing else is said: 64 MiB of fp32, in which
# the matrix products of usual heads reach their speed.
TILE_NUMEL = 1 << 24
# Narrower matrix products waste most of a core or a GPU. With very many tokens a vocabulary tile
# is therefore larger than a token tile; it is smaller than the hidden states then.
LEAST_ROWS = 64
# Columns of the chain's gradient after those of the hidden states: what a node needs of each token,
# the gradient of its label's log-probability, the largest logit, and the logarithm of the sum of
# exponentials.
_COLUMNS = 3

Elementwise = Callable[[torch.Tensor], torch.Tensor]


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    tile_tokens: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy(F.linear(hidden, weight, bias).float(), labels, ...).

    Neither the logits nor their gradient are in memory whole: at most about `tile_tokens` rows of
    them are, in forward and in backward, which computes them once more. `weight` may be a managed
    parameter whose values are elsewhere; its gradient comes in its dtype. The loss has the bits of
    the plain one as far as torch's matrix products of some rows have those of all rows (on x86
    CPUs they do, for some 16 tokens and more). So has the gradient of `weight`, but for an
    exponential of fp32 that may differ in its last bit. That of `hidden` is a sum in fp32 of
    products in the dtype of `hidden`.

    Args:
        hidden: (..., w), what the head is applied to.
        weight: (V, w), the head's weight, whole; in the dtype of `hidden`.
        labels: (...) int64, the class of each token, or `ignore_index`. They are not shifted.
        bias: (V,), or None.
        ignore_index: tokens with this label count for nothing.
        reduction: "mean" over the tokens that count, "sum", or "none": (...), 0 for those that do
            not.
        tile_tokens: tokens whose logits are in memory at a time. Default: so many that there are
            2^24 logits (64 MiB of fp32; backward takes up to twice that). Fewer take less memory,
            and make smaller matrix products.
        scale: logits are multiplied by it (Cohere, Granite), before the cap.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).

    Returns:
        The loss in fp32.

    Raises:
        ValueError: for sizes and options that do not fit together.
    """
    _check(hidden, weight, labels, bias, reduction, softcap)
    check_tile_tokens(tile_tokens)
    elementwise: tuple[Elementwise, ...] = ()
    if scale is not None:
        elementwise += (partial(torch.mul, other=scale),)
    if softcap is not None:
        elementwise += (partial(_capped, softcap=softcap),)
    options = TileOptions(tile_tokens, elementwise)
    return reduced_loss(hidden, weight, labels, bias, ignore_index, reduction, options)


def reduced_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor | RowTiles,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    options: TileOptions,
    weight_grad_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of tiled_cross_entropy(), whose arguments are right.

    `weight_grad_to`, (V, w), gets the gradient of a weight that is whole in place of it, if it is
    not None.
    """
    # A weight that is whole is brought in once, for the whole function; tiles one after another.
    given = [each for each in (hidden, weight, bias) if isinstance(each, torch.Tensor)]
    if has_torch_function(given):
        others = (hidden, weight, labels, bias, ignore_index, reduction, options, weight_grad_to)
        made: torch.Tensor = handle_torch_function(reduced_loss, given, *others)
        return made
    shape = labels.shape
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if weight_grad_to is not None:
        weight = _GradTo.apply(weight, weight_grad_to)  # type: ignore[no-untyped-call]
    tiles = weight if isinstance(weight, RowTiles) else RowTiles([weight])
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # backward has none, so nothing may depend on it
        dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    ignored = labels == ignore_index
    with torch.autocast(device, enabled=False):
        labels = labels.masked_fill(ignored, 0)
        found = label_log_probs(hidden, tiles, bias, labels, options)
        # What torch does to the log-probabilities, on those of the labels alone: the same order of
        # summation, hence the same bits.
        target = torch.where(ignored, _IGNORED, 0)
        nll = torch.nn.functional.nll_loss(
            found.unsqueeze(1), target, ignore_index=_IGNORED, reduction=reduction
        )
    return nll.reshape(shape) if reduction == "none" else nll


class _GradTo(torch.autograd.Function):
    """A tensor whose gradient another one of the same shape gets."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, grad_to: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    softcap: float | None,
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} does not fit weight of shape "
            f"{tuple(weight.shape)}: they must be (..., w) and (V, w)"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} must have one class for each token of hidden, "
            f"of shape {tuple(hidden.shape)}"
        )
    if labels.is_floating_point():
        raise ValueError(f"labels must be classes, of an integer dtype, got {labels.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} does not fit weight of shape {tuple(weight.shape)}"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")


def _capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(logits / softcap)


@dataclass(frozen=True)
class TileOptions:
    """How logits are computed: `tile_tokens` of them at a time, and which functions, each of a
    logit alone, they go through (a scale, a cap), in order, in the dtype of the head."""

    tile_tokens: int | None = None
    elementwise: tuple[Elementwise, ...] = ()

    def tokens(self, vocabulary: int) -> int:
        """Tokens of a token tile."""
        if self.tile_tokens is not None:
            return self.tile_tokens
        return max(1, TILE_NUMEL // vocabulary)

    def rows(self, tokens: int, vocabulary: int) -> int:
        """Rows of the weight of a vocabulary tile: about as many logits as in a token tile."""
        rows = -(-self.tokens(vocabulary) * vocabulary // max(1, tokens))
        return min(vocabulary, -(-max(rows, LEAST_ROWS) // LEAST_ROWS) * LEAST_ROWS)


def check_tile_tokens(tile_tokens: int | None) -> None:
    """Raises ValueError for a number of tokens that cannot be."""
    if tile_tokens is not None and tile_tokens < 1:
        raise ValueError(
            f"tile_tokens must be 1 or more, or None for about {TILE_NUMEL:,} logits at a time, "
            f"got {tile_tokens}"
        )


class RowTiles:
    """The parameters of a head's weight, of which each has some rows.

    Args:
        params: (rows, w) each, one after another.
        shared: an embedding has them, too, whose gradient comes later in the same backward.
    """

    def __init__(self, params: Sequence[torch.Tensor], shared: bool = False) -> None:
        self.params = tuple(params)
        self.shared = shared
        ends = accumulate(len(param) for param in params)
        self.ranges = [slice(begin, end) for begin, end in pairwise([0, *ends])]

    @property
    def rows(self) -> int:
        """V."""
        return self.ranges[-1].stop

    @property
    def whole(self) -> torch.Tensor | None:
        """The whole weight, if it is one parameter."""
        return self.params[0] if len(self.params) == 1 else None

    def with_bias(
        self, bias: torch.Tensor | None
    ) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor | None]]:
        """Yields each parameter, its rows, and its part of a bias of (V,)."""
        for param, rows in zip(self.params, self.ranges, strict=True):
            yield param, rows, bias if bias is None or self.whole is not None else bias[rows]

    def linear(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """F.linear() with the whole matrix: (..., V); no more than one tile is needed at a time."""
        tiles = self.with_bias(bias)
        parts = [linear(hidden, param, part) for param, _, part in tiles]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def label_log_probs(
    hidden: torch.Tensor,
    weight: RowTiles,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: TileOptions,
) -> torch.Tensor:
    """Log-probabilities of the labels, (T,) in fp32.

    Softmax and logarithm are fp32, as transformers' losses have them. All row tiles are used once
    for each token tile; in backward each is used once.

    Args:
        hidden: (T, w).
        weight: the head's, (V, w).
        bias: (V,), or None.
        labels: (T,) int64, each in [0, V).
        options: the size of tiles, and what is done to logits.
    """
    tokens, vocabulary = hidden.shape[0], weight.rows
    results = torch.empty((_COLUMNS, tokens), dtype=torch.float32, device=hidden.device)
    chain: torch.Tensor | None = None
    given = (hidden, *weight.params, *(() if bias is None else (bias,)))
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        chain = _Begin.apply(hidden)  # type: ignore[no-untyped-call]
    parts = list(tile_parts(tokens, options.tokens(vocabulary))) or [slice(0, 0)]
    for part in parts:
        logits: torch.Tensor | None = None
        for param, rows, bias_part in weight.with_bias(bias):
            tile = _Tile(rows, weight.rows, weight.shared, labels, options, hidden.requires_grad)
            link = chain if part is parts[-1] else None
            of_rows, made = _use_tile(param, hidden, bias_part, part, tile, link)
            chain = chain if made is None else made
            if weight.whole is not None:
                logits = of_rows
                continue
            if logits is None:
                logits = of_rows.new_empty((len(of_rows), vocabulary))
            logits[:, rows] = of_rows
        with torch.no_grad():
            assert logits is not None
            _note_log_probs(logits, labels, part, options.elementwise, results)
        del logits, of_rows
    if chain is None:
        return results[0]
    found: torch.Tensor = _End.apply(chain, *results)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class _Tile:
    """What a node of the chain knows beside tensors that autograd saves: no values of a weight,
    which would stay in memory with the graph.

    `rows` are the tile's of all `vocabulary`; `shared` as RowTiles has it.
    """

    rows: slice
    vocabulary: int
    shared: bool
    labels: torch.Tensor
    options: TileOptions
    needs_hidden: bool


def _use_tile(
    param: torch.Tensor,
    hidden: torch.Tensor,
    bias: torch.Tensor | None,
    part: slice,
    tile: _Tile,
    chain: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tile's logits of some tokens, without a graph, and the `chain` with the tile's node."""
    if has_torch_function((param,)):  # an absent one is brought in once for both
        made: tuple[torch.Tensor, torch.Tensor | None] = handle_torch_function(
            _use_tile, (param,), param, hidden, bias, part, tile, chain
        )
        return made
    with torch.no_grad():
        detached = bias if bias is None else bias.detach()
        logits = linear(hidden[part], _as(param, hidden), detached)
    if chain is not None:
        chain = _Link.apply(  # type: ignore[no-untyped-call]
            chain, param, bias, hidden.detach(), tile
        )
    return logits, chain


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
        return sums[:, : ctx.width].to(ctx.dtype).contiguous()


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
        ctx.param, ctx.tile = param if tile.shared else None, tile
        return chain.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, bias, hidden, labels = ctx.saved_tensors
        tile: _Tile = ctx.tile
        values, width = _as(values, hidden), hidden.shape[1]
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight_grad = torch.empty_like(values) if needs_weight else None
        bias_grad = torch.empty_like(bias) if needs_bias else None
        numel = tile.rows.stop - tile.rows.start
        for part in tile_parts(numel, tile.options.rows(hidden.shape[0], tile.vocabulary)):
            at = slice(tile.rows.start + part.start, tile.rows.start + part.stop)
            rows = values[part]
            grad = _logit_grads(
                linear(hidden, rows, None if bias is None else bias[part]),
                sums[:, width:],
                labels,
                at,
                tile.options.elementwise,
            )
            if tile.needs_hidden:
                sums[:, :width] += grad @ rows
            if weight_grad is not None:
                torch.mm(grad.t(), hidden, out=weight_grad[part])
            if bias_grad is not None:
                torch.sum(grad, 0, out=bias_grad[part])
            del grad, rows
        del values
        if weight_grad is not None and tile.shared and accumulate_now(ctx.param, weight_grad):
            weight_grad = None
        return sums, weight_grad, bias_grad, None, None


class _End(torch.autograd.Function):
    """The chain's end, which has the results."""

    @staticmethod
    def forward(
        ctx: Any,
        chain: torch.Tensor,
        found: torch.Tensor,
        largest: torch.Tensor,
        log_sums: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(largest, log_sums)
        ctx.shape = chain.shape
        return found.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, found_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        begun = torch.zeros(ctx.shape, dtype=torch.float32, device=found_grad.device)
        columns = begun[:, -_COLUMNS:].unbind(1)
        for column, values in zip(columns, (found_grad, *ctx.saved_tensors), strict=True):
            column.copy_(values)
        return begun, None, None, None


def _note_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    part: slice,
    elementwise: tuple[Elementwise, ...],
    results: torch.Tensor,
) -> None:
    """Writes what comes of a token tile.

    Args:
        logits: (t, V), as the head gives them.
        labels: (T,) int64, those of all tokens.
        part: the tile's tokens.
        elementwise: what is done to logits.
        results: (_COLUMNS, T) fp32: gets the log-probability of the label, the largest logit, and
            the logarithm of the sum of exponentials, of these tokens.
    """
    found, largest, log_sums = results
    for function in elementwise:
        logits = function(logits)
    logits = logits.float()
    torch.amax(logits, 1, out=largest[part])
    log_probs = torch.log_softmax(logits, 1)
    del logits
    # Of the largest logit the log-probability is minus the logarithm of the sum, exactly.
    torch.neg(torch.amax(log_probs, 1), out=log_sums[part])
    found[part] = log_probs.gather(1, labels[part].unsqueeze(1)).squeeze(1)


def _logit_grads(
    given: torch.Tensor,
    of_tokens: torch.Tensor,
    labels: torch.Tensor,
    part: slice,
    elementwise: tuple[Elementwise, ...],
) -> torch.Tensor:
    """(T, rows), in the dtype of the head: gradients of what the head gives for some rows.

    Args:
        given: (T, rows), what the head gives; is written to.
        of_tokens: (T, _COLUMNS) fp32, the gradients of the labels' log-probabilities, the largest
            logits, and the logarithms of the sums of exponentials.
        labels: (T,) int64.
        part: the rows' numbers in the whole weight.
        elementwise: what is done to logits.
    """
    found, largest, log_sums = of_tokens.split(1, 1)
    dtype = given.dtype
    before = given.requires_grad_() if elementwise else None
    with torch.set_grad_enabled(bool(elementwise)):
        logits = given
        for function in elementwise:
            logits = function(logits)
        logits = logits.float()
    del given
    # Probabilities, in the order of operations that torch.log_softmax() has.
    grad = logits.detach().clone() if elementwise else logits
    grad.sub_(largest).sub_(log_sums).exp_().mul_(-found)
    # The label's, if it is in this part of the vocabulary.
    inside = (labels >= part.start) & (labels < part.stop)
    at = torch.where(inside, labels - part.start, 0).unsqueeze(1)
    grad.scatter_add_(1, at, torch.where(inside.unsqueeze(1), found, 0.0))
    if before is None:
        return grad.to(dtype)
    (made,) = torch.autograd.grad(logits, before, grad)
    return made


def tile_parts(length: int, size: int) -> Iterator[slice]:
    """Parts of at most `size`, of tokens or of rows."""
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))


# Gradients that a parameter gets at once, in the middle of a backward.
#
# A parameter that is used in two places of a graph gets one gradient at the end of backward: until
# then autograd holds the first one, to add the second one to it. What is accumulated at once here
# is kept where gradients are kept, and the second one is added to that, as that of another backward
# is.
#
# In one backward the result is the sum that autograd makes, rounded to the grad dtype: the same
# bits if that is the compute dtype. If it is wider, the sum is not rounded to the compute dtype
# first. With micro-batches it is (kept + head's) + embedding's in place of kept + (head's +
# embedding's). A parameter's hooks are called twice.


def accumulate_now(param: torch.Tensor, grad: torch.Tensor) -> bool:
    """Accumulates a gradient of a parameter, inside of a backward.

    Returns False, with nothing done, if autograd must have it: this backward accumulates nothing
    (torch.autograd.grad), or not in this parameter; or there are several ranks, between which each
    accumulated gradient would be a message more.
    """
    if _are_several_ranks() or not param.is_leaf:
        return False
    with torch.enable_grad(), torch._C.DisableTorchFunction():
        node: Any = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    try:
        if not torch._C._will_engine_execute_node(node):
            return False
    except RuntimeError:  # torch.autograd.grad() of the parameter
        return False
    with torch.enable_grad():
        given: torch.Tensor = _Given.apply(param, grad)  # type: ignore[no-untyped-call]
        given.backward()
    return True


def _are_several_ranks() -> bool:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1


class _Given(torch.autograd.Function):
    """A scalar of which a parameter has a gradient that is known."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.grad = grad
        return grad.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = ctx.grad
        del ctx.grad  # autograd need not copy what nobody else holds
        return grad, None
