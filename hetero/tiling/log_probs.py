"""The log-probabilities of labels under a linear head, without the head's whole output.

Vocabulary: hidden states are (T tokens, w), the head's weight is (V, w), logits would be (T, V). A
*token tile* is the logits of some tokens over all of V, a *vocabulary tile* those of all tokens
over some of V. Forward takes token tiles, because the normalisation of a token needs all of its
logits at once. Backward computes logits once more, by vocabulary tiles: each rows of the weight's
gradient are one matrix product over all tokens, rounded once, as without tiles.

So no fp32 copy of the weight's gradient is needed, as a sum over token tiles would in bf16, where
each addition rounds, and small ones vanish. Only the gradient of the hidden states is summed over
vocabulary tiles, in fp32. The loss has the bits of transformers' because the rows of a matrix
product do not depend on how many there are (true of the CPU's from some 16 rows on; tests say so).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

# Elements of logits that are in memory at a time, if nothing else is said: 64 MiB of fp32, in which
# the matrix products of usual heads reach their speed.
TILE_NUMEL = 1 << 24
# Narrower matrix products waste most of a core or a GPU. With very many tokens a vocabulary tile
# is therefore larger than a token tile; it is smaller than the hidden states then.
LEAST_ROWS = 64

Elementwise = Callable[[torch.Tensor], torch.Tensor]


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


def label_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: TileOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the labels, and the sums of those of all tokens of the vocabulary.

    Softmax and logarithm are fp32, as transformers' losses have them.

    Args:
        hidden: (T, w).
        weight: (V, w), with its values in memory.
        bias: (V,), or None.
        labels: (T,) int64, each in [0, V).
        options: the size of tiles, and what is done to logits.

    Returns:
        Two of (T,), fp32. The second one is what label smoothing needs.
    """
    inputs = (hidden, weight, bias, labels, options)
    found, sums = _LabelLogProbs.apply(*inputs)  # type: ignore[no-untyped-call]
    return found, sums


class _LabelLogProbs(torch.autograd.Function):
    """label_log_probs() and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        options: TileOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = hidden.shape[0]
        results = torch.empty((4, tokens), dtype=torch.float32, device=hidden.device)
        for part in tile_parts(tokens, options.tokens(weight.shape[0])):
            logits = _linear(hidden[part], weight, bias)
            note_log_probs(logits, labels, part, options.elementwise, results)
            del logits
        found, sums, largest, log_sums = results
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, labels, largest, log_sums)
        return found, sums

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, found_grad: torch.Tensor | None, sums_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, largest, log_sums = ctx.saved_tensors
        options: TileOptions = ctx.options
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        tokens, vocabulary = hidden.shape[0], weight.shape[0]
        # Summed over vocabulary tiles in fp32, and rounded once.
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        weight_grad = torch.empty_like(weight) if needs_weight else None
        bias_grad = torch.empty_like(bias) if needs_bias else None
        if found_grad is None:
            found_grad = torch.zeros_like(largest)
        total = found_grad if sums_grad is None else found_grad + vocabulary * sums_grad
        grads = VocabularyGrads(hidden, labels, largest, log_sums, found_grad, total, sums_grad)
        for part in tile_parts(vocabulary, options.rows(tokens, vocabulary)):
            rows = weight[part]
            grad = grads.of(rows, None if bias is None else bias[part], part, options)
            if hidden_grad is not None:
                hidden_grad += grad @ rows
            if weight_grad is not None:
                torch.mm(grad.t(), hidden, out=weight_grad[part])
            if bias_grad is not None:
                torch.sum(grad, 0, out=bias_grad[part])
            del grad
        return (
            None if hidden_grad is None else hidden_grad.to(hidden.dtype),
            weight_grad,
            bias_grad,
            None,
            None,
        )


def note_log_probs(
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
        results: (4, T) fp32: gets the log-probability of the label, the sum of all, the largest
            logit, and the logarithm of the sum of exponentials, of these tokens.
    """
    found, sums, largest, log_sums = results
    for function in elementwise:
        logits = function(logits)
    logits = logits.float()
    torch.amax(logits, 1, out=largest[part])
    log_probs = torch.log_softmax(logits, 1)
    del logits
    # Of the largest logit the log-probability is minus the logarithm of the sum, exactly.
    torch.neg(torch.amax(log_probs, 1), out=log_sums[part])
    torch.sum(log_probs, 1, out=sums[part])
    found[part] = log_probs.gather(1, labels[part].unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class VocabularyGrads:
    """Gradients of logits, by vocabulary tiles.

    Attributes:
        hidden: (T, w).
        labels: (T,) int64.
        largest, log_sums: (T,) fp32, as note_log_probs() has them.
        found_grad: (T,) fp32, the gradient of the labels' log-probabilities.
        total: (T,) fp32, the sum of the gradients of all log-probabilities.
        sums_grad: (T,) fp32, the gradient of the sums of all log-probabilities, or None.
    """

    hidden: torch.Tensor
    labels: torch.Tensor
    largest: torch.Tensor
    log_sums: torch.Tensor
    found_grad: torch.Tensor
    total: torch.Tensor
    sums_grad: torch.Tensor | None

    def of(
        self, rows: torch.Tensor, bias: torch.Tensor | None, part: slice, options: TileOptions
    ) -> torch.Tensor:
        """(T, rows), in the dtype of the head: of what the head gives for some rows of the weight.

        `part` are these rows' numbers in the whole weight.
        """
        linear = _linear(self.hidden, rows, bias)
        grad = _probs(linear, options.elementwise, self.largest, self.log_sums)
        if not options.elementwise:  # its values are not needed any more
            linear = linear.new_empty(0)
        grad.mul_(-self.total.unsqueeze(1))
        if self.sums_grad is not None:
            grad.add_(self.sums_grad.unsqueeze(1))
        _add_at_labels(grad, self.labels, part, self.found_grad)
        return _through(options.elementwise, linear, grad)


def tile_parts(length: int, size: int) -> Iterator[slice]:
    """Parts of at most `size`, of tokens or of rows."""
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))


def _linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(hidden, weight, bias)


def _probs(
    linear: torch.Tensor,
    elementwise: tuple[Elementwise, ...],
    largest: torch.Tensor,
    log_sums: torch.Tensor,
) -> torch.Tensor:
    """Probabilities in fp32, in the order of operations that torch.log_softmax() has."""
    logits = linear
    for function in elementwise:
        logits = function(logits)
    if logits.dtype is not torch.float32:
        logits = logits.float()
    elif elementwise:  # `linear` is needed once more
        logits = logits.clone() if logits is linear else logits
    return logits.sub_(largest.unsqueeze(1)).sub_(log_sums.unsqueeze(1)).exp_()


def _add_at_labels(
    grad: torch.Tensor, labels: torch.Tensor, part: slice, values: torch.Tensor
) -> None:
    """Adds a value a token at its label, if that is in this part of the vocabulary."""
    inside = (labels >= part.start) & (labels < part.stop)
    at = torch.where(inside, labels - part.start, 0).unsqueeze(1)
    grad.scatter_add_(1, at, torch.where(inside, values, 0.0).unsqueeze(1))


def _through(
    elementwise: tuple[Elementwise, ...], linear: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """The gradient of what the head gives, in its dtype, from that of logits in fp32."""
    if not elementwise:
        return grad.to(linear.dtype)
    with torch.enable_grad():
        before = linear.detach().requires_grad_()
        logits = before
        for function in elementwise:
            logits = function(logits)
        logits = logits.float()
    (made,) = torch.autograd.grad(logits, before, grad)
    return made
