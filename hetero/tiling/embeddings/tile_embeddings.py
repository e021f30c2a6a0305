"""Puts embeddings and heads in parts in the place of large ones of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hetero.tiling.embeddings.tiled_embedding import TiledEmbedding, rows_param
from hetero.tiling.embeddings.tiled_head import TiledHead
from hetero.tiling.log_probs import check_tile_tokens, tile_parts

_LEAST_ROWS = 64  # a tile's rows are a multiple: narrower matrix products have other bits


def tile_embeddings(
    model: torch.nn.Module, max_numel: int | None = None, tile_tokens: int | None = None
) -> dict[str, TiledEmbedding | TiledHead]:
    """Puts embeddings and heads in parts in the place of those of a model that are too large.

    Before hetero.initialize(), inside the block of hetero.ZeroInitContext if there is one: then the
    whole weight is never in memory. An embedding whose weight the head has, too, is tiled with the
    head, and they have the same tiles; the head of get_output_embeddings() is tiled in any case.

    With one rank the head's gradient of a tied tile is kept where gradients are kept as soon as it
    is there, and the embedding's is added to it at the end of backward, in the grad dtype. Autograd
    would hold all tiles' until then, as it does with several ranks. The sum of one backward has the
    same bits where the grad dtype is the compute dtype.

    Args:
        model: is changed in place.
        max_numel: elements of a weight; a larger one is cut into tiles of at most so many, but of
            64 rows at least. Default: as many as the largest parameter has that is no embedding's
            and not the head's, so that tiles take no more memory than what is there anyway.
        tile_tokens: of the loss, as of hetero.tiled_cross_entropy().

    Returns:
        The new modules by name.

    Raises:
        ValueError: for a number that cannot be.
    """
    if max_numel is not None and max_numel < 1:
        raise ValueError(f"max_numel must be 1 or more, got {max_numel}")
    check_tile_tokens(tile_tokens)
    get: Any = getattr(model, "get_output_embeddings", None)
    output = None if get is None else get()
    made: dict[str, TiledEmbedding | TiledHead] = {}
    if max_numel is None:
        max_numel = _largest_other(model, output)
    for owners in list(_owners_of_large_weights(model, max_numel)):
        embeddings = [owner for owner in owners if _is_plain(owner, torch.nn.Embedding)]
        heads = [owner for owner in owners if _is_plain(owner, torch.nn.Linear)]
        kinds = {(each.padding_idx, each.scale_grad_by_freq) for each in embeddings}
        if len(embeddings) + len(heads) < len(owners) or len(kinds) > 1:
            continue  # somebody else uses the weight whole
        if not embeddings and output not in heads:
            continue  # tile_linears() is for those
        weight: torch.nn.Parameter = owners[0].weight
        rows = max(_LEAST_ROWS, max_numel // weight.shape[1] // _LEAST_ROWS * _LEAST_ROWS)
        if embeddings:
            tiled = TiledEmbedding.from_embedding(embeddings[0], rows)
            for embedding in embeddings:
                _replace(model, embedding, tiled, made)
            parts = tiled.tiles
        else:
            parts = torch.nn.ModuleList(
                _row_tile(weight, part) for part in tile_parts(weight.shape[0], rows)
            )
        for head in heads:
            new = TiledHead(parts, head.bias, bool(embeddings), tile_tokens)
            _replace(model, head, new.train(head.training), made)
    return made


def _largest_other(model: torch.nn.Module, output: Any) -> int:
    """Elements of the largest parameter that no embedding has, nor the head."""
    excluded = {
        id(param)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) or module is output
        for param in module.parameters(recurse=False)
    }
    others = [param.numel() for param in model.parameters() if id(param) not in excluded]
    return max(others, default=1)


def _owners_of_large_weights(model: torch.nn.Module, max_numel: int) -> Iterator[list[Any]]:
    """Yields, for each parameter that is too large, the modules that have it."""
    owners: dict[int, list[Any]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None and param.dim() == 2 and param.numel() > max_numel:
                owners.setdefault(id(param), []).append(module)
    yield from owners.values()


def _is_plain(module: Any, kind: Any) -> bool:
    """Whether it is torch's own embedding, or linear layer, with a parameter as its weight."""
    plain = type(module) is kind and "weight" in module._parameters
    if plain and kind is torch.nn.Embedding:
        return module.max_norm is None and not module.sparse
    return plain


def _replace(model: torch.nn.Module, old: Any, new: Any, made: dict[str, Any]) -> None:
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
                made[f"{parent_name}.{name}".lstrip(".")] = new


def _row_tile(weight: torch.nn.Parameter, rows: slice) -> torch.nn.Linear:
    with torch.device("meta"):
        tile = torch.nn.Linear(weight.shape[1], rows.stop - rows.start, bias=False)
    tile.weight = rows_param(weight, rows)
    return tile
