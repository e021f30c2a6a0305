"""Heads of language models that do not compute logits before somebody needs them."""

from __future__ import annotations

from typing import Any

import torch

from hetero.tiling.deferred_logits import DeferredLogits, HeadInputs
from hetero.tiling.forward_swap import ForwardSwap, Swaps
from hetero.tiling.log_probs import RowTiles, check_tile_tokens
from hetero.tiling.row_gradients import GradRoute, joins


def tile_heads(model: torch.nn.Module, tile_tokens: int | None = None) -> Swaps:
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

    swaps = [ForwardSwap(head, defer)]
    if embedding is not None and embedding.weight is head.weight:
        swaps.append(ForwardSwap(embedding, embed))
    return Swaps(swaps, route.clear)


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
