"""Embeddings and heads in parts, each a parameter of its own, in the place of large ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from hetero.stand_ins.construction_uses import rows_of
from hetero.tiling.cross_entropy import RowTiles, check_tile_tokens, tile_parts
from hetero.tiling.heads import DeferredLogits, HeadInputs
from hetero.tiling.tiled_weight import TiledWeight, owners_of, replace, require_replaceable

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
        ValueError: as hetero.tile_linears().
    """
    if max_numel is not None and max_numel < 1:
        raise ValueError(f"max_numel must be 1 or more, got {max_numel}")
    check_tile_tokens(tile_tokens)
    get: Any = getattr(model, "get_output_embeddings", None)
    output = None if get is None else get()
    made: dict[str, TiledEmbedding | TiledHead] = {}
    if max_numel is None:
        max_numel = _largest_other(model, output)
    large: list[tuple[torch.Tensor, list[Any], list[Any]]] = []
    for weight, owners in owners_of(model).values():
        if weight.dim() != 2 or weight.numel() <= max_numel:
            continue
        embeddings = [owner for owner in owners if _is_plain(owner, torch.nn.Embedding)]
        heads = [owner for owner in owners if _is_plain(owner, torch.nn.Linear)]
        kinds = {(each.padding_idx, each.scale_grad_by_freq) for each in embeddings}
        if len(embeddings) + len(heads) < len(owners) or len(kinds) > 1:
            continue  # somebody else uses the weight whole
        if not embeddings and output not in heads:
            continue  # tile_linears() is for those
        large.append((weight, embeddings, heads))
    require_replaceable(model, (each for _, *owners in large for some in owners for each in some))
    for weight, embeddings, heads in large:
        rows = max(_LEAST_ROWS, max_numel // weight.shape[1] // _LEAST_ROWS * _LEAST_ROWS)
        if embeddings:
            tiled = TiledEmbedding(embeddings[0], rows)
            for embedding in embeddings:
                made |= dict.fromkeys(replace(model, embedding, tiled), tiled)
            parts = tiled.tiles
        else:
            parts = _row_tiles(lambda r, c: torch.nn.Linear(c, r, bias=False), weight, rows)
        for head in heads:
            new = TiledHead(parts, head.bias, bool(embeddings), tile_tokens).train(head.training)
            made |= dict.fromkeys(replace(model, head, new), new)
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


def _is_plain(module: Any, kind: Any) -> bool:
    """Whether it is torch's own embedding, or linear layer, with a parameter as its weight."""
    plain = type(module) is kind and "weight" in module._parameters
    if plain and kind is torch.nn.Embedding:
        return module.max_norm is None and not module.sparse
    return plain


def _row_tiles(make: Any, weight: torch.Tensor, tile_rows: int) -> torch.nn.ModuleList:
    """Layers that `make` makes for some rows and columns, each with its rows of a weight."""
    tiles = torch.nn.ModuleList()
    for rows in tile_parts(len(weight), tile_rows):
        with torch.device("meta"):  # no random numbers are drawn
            tile = make(rows.stop - rows.start, weight.shape[1])
        tile.weight = torch.nn.Parameter(rows_of(weight, rows), weight.requires_grad)
        tiles.append(tile)
    return tiles


class TiledEmbedding(TiledWeight):
    """torch.nn.Embedding whose weight is larger than the memory that a parameter may take.

    Its rows are cut into tiles, each a torch.nn.Embedding, `tiles[i]`: so hetero gathers one at a
    time, and a gradient is one tile's. Every forward uses all tiles, in order. Results and
    gradients have the bits of torch.nn.Embedding.

    The names in `state_dict()` are `tiles.I.weight`. A state of torch.nn.Embedding (`weight`) loads
    as well, and embedding_state_dict() gives one.

    Args:
        embedding: a plain one, before hetero.initialize(); it stays as it is. It may be under
            construction, not in memory, and larger than the budget.
        tile_rows: rows of a tile; the last one may have fewer.

    Raises:
        ValueError: for a number that cannot be, and for options that tiles do not have.
    """

    def __init__(self, embedding: torch.nn.Embedding, tile_rows: int) -> None:
        super().__init__()
        if tile_rows < 1:
            raise ValueError(f"tile_rows must be 1 or more, got {tile_rows}")
        if embedding.max_norm is not None or embedding.sparse:
            raise ValueError("an embedding with max_norm or sparse=True cannot be tiled")
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.tile_rows, self.padding_idx = tile_rows, embedding.padding_idx
        self.ranges = list(tile_parts(self.num_embeddings, tile_rows))
        make = partial(torch.nn.Embedding, scale_grad_by_freq=embedding.scale_grad_by_freq)
        self.tiles = _row_tiles(make, embedding.weight, tile_rows)
        for tile, rows, _ in self._tiles():
            if self.padding_idx is not None and rows.start <= self.padding_idx < rows.stop:
                tile.padding_idx = self.padding_idx - rows.start
        self.train(embedding.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows (..., embedding_dim) for ids (...), of an integer dtype."""
        ids = input.reshape(-1)
        tile_of = ids.div(self.tile_rows, rounding_mode="floor")
        places, found = [], []
        for number, (tile, rows) in enumerate(zip(self.tiles, self.ranges, strict=True)):
            place = (tile_of == number).nonzero().squeeze(1)
            places.append(place)
            found.append(tile(ids[place] - rows.start))
        order = torch.cat(places).argsort()
        if order.shape != ids.shape:
            raise IndexError(f"an id is outside of the embedding's {self.num_embeddings} rows")
        return torch.cat(found).index_select(0, order).view(*input.shape, self.embedding_dim)

    def embedding_state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """The state of a torch.nn.Embedding with the same values, in memory that no budget
        counts."""
        return {f"{prefix}weight": self.weight}

    def _places(self) -> Iterator[tuple[str, slice, slice]]:
        for number, rows in enumerate(self.ranges):
            yield f"tiles.{number}", rows, slice(0, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tile_rows={self.tile_rows}"


class TiledHead(TiledWeight):
    """A head of a language model, torch.nn.Linear to the vocabulary, whose weight is in row tiles.

    It returns deferred logits, as heads do of which hetero.tile_heads() has changed the forward:
    their cross-entropy is computed from one tile of the weight after another, in forward and in
    backward. Whatever else needs logits gets them whole.

    Args:
        tiles: modules with the weights: a TiledEmbedding's `tiles`, or others.
        bias: of all outputs, or None.
        tied: an embedding has the same tiles.
        tile_tokens: as of hetero.tiled_cross_entropy().
    """

    def __init__(
        self,
        tiles: torch.nn.ModuleList,
        bias: torch.nn.Parameter | None = None,
        tied: bool = False,
        tile_tokens: int | None = None,
    ) -> None:
        super().__init__()
        check_tile_tokens(tile_tokens)
        self.tiles = tiles
        self.bias = bias
        self.tied = tied
        self.tile_tokens = tile_tokens
        weight = self._row_tiles()
        self.out_features = weight.rows
        self.in_features = weight.params[0].shape[1]

    def _row_tiles(self) -> RowTiles:
        return RowTiles([tile.weight for tile in self.tiles], self.tied)  # type: ignore[misc]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Deferred logits (..., out_features) for hidden states (..., in_features)."""
        return DeferredLogits.of(HeadInputs(input, self._row_tiles(), self.bias, self.tile_tokens))

    def _places(self) -> Iterator[tuple[str, slice, slice]]:
        for number, rows in enumerate(self._row_tiles().ranges):
            yield f"tiles.{number}", rows, slice(0, self.in_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
