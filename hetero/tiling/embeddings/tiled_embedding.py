"""An embedding in parts, each a parameter of its own."""

from __future__ import annotations

from typing import Any

import torch

from hetero.stand_ins.construction_uses import rows_of
from hetero.stand_ins.tile_changes import tiles
from hetero.tiling.log_probs import tile_parts

_PIECE_NUMEL = 1 << 20  # elements of the weight that are drawn at a time


class TiledEmbedding(torch.nn.Module):
    """torch.nn.Embedding whose weight is larger than the memory that a parameter may take.

    Its rows are cut into tiles, each a torch.nn.Embedding, `tiles[i]`: so hetero gathers one at a
    time, and a gradient is one tile's. Every forward uses all tiles, in order. Results and
    gradients have the bits of torch.nn.Embedding.

    The names in `state_dict()` are `tiles.I.weight`. A state of torch.nn.Embedding (`weight`) loads
    as well, and embedding_state_dict() gives one.

    Initial weights have the bits of torch.nn.Embedding under the same seed, on the CPU; on other
    devices they are of the same distribution. They are drawn in parts, so that inside
    hetero.ZeroInitContext a tile has to fit the budget, and not the embedding.

    Args:
        num_embeddings, embedding_dim: rows and columns of the weight.
        tile_rows: rows of a tile; the last one may have fewer.
        padding_idx: as of torch.nn.Embedding.
        scale_grad_by_freq: as of torch.nn.Embedding.
        device, dtype: of the parameters.

    Raises:
        ValueError: for sizes that cannot be.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tile_rows: int,
        padding_idx: int | None = None,
        scale_grad_by_freq: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._shape(num_embeddings, embedding_dim, tile_rows, padding_idx, scale_grad_by_freq)
        numel = num_embeddings * embedding_dim
        where = torch.empty(0, device=device).device
        pieces = tiles(numel, _PIECE_NUMEL) if where.type == "cpu" else iter(())
        drawn, begin = torch.empty(0, dtype=dtype), 0  # elements from `begin` on
        for rows in self.ranges:
            tile = self._add_tile(rows, where, dtype)
            if where.type == "meta":
                continue
            if where.type != "cpu":
                torch.nn.init.normal_(tile.weight)
            else:
                values = torch.empty(tile.weight.shape, dtype=tile.weight.dtype)
                flat, at = values.view(-1), rows.start * embedding_dim
                filled = 0
                while filled < flat.numel():
                    if begin + drawn.numel() <= at + filled:
                        piece = next(pieces)
                        begin = piece.start
                        drawn = torch.empty(piece.stop - piece.start, dtype=values.dtype).normal_()
                    part = drawn[at + filled - begin :][: flat.numel() - filled]
                    flat[filled : filled + part.numel()] = part
                    filled += part.numel()
                with torch.no_grad():
                    tile.weight.copy_(values)
            if tile.padding_idx is not None:
                with torch.no_grad():
                    tile.weight[tile.padding_idx].fill_(0)

    def _shape(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tile_rows: int,
        padding_idx: int | None,
        scale_grad_by_freq: bool,
    ) -> None:
        if tile_rows < 1 or num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(
                f"num_embeddings, embedding_dim and tile_rows must be 1 or more, got "
                f"{num_embeddings}, {embedding_dim} and {tile_rows}"
            )
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx must be a row of {num_embeddings}, got {padding_idx}"
                )
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.tile_rows, self.padding_idx = tile_rows, padding_idx
        self.scale_grad_by_freq = scale_grad_by_freq
        self.ranges = list(tile_parts(num_embeddings, tile_rows))
        self.tiles = torch.nn.ModuleList()

    def _add_tile(
        self, rows: slice, device: torch.device, dtype: torch.dtype | None
    ) -> torch.nn.Embedding:
        """A tile without values, for which no random numbers are drawn."""
        padding = self.padding_idx
        inside = padding is not None and rows.start <= padding < rows.stop
        with torch.device("meta"):
            tile = torch.nn.Embedding(
                rows.stop - rows.start,
                self.embedding_dim,
                padding - rows.start if inside and padding is not None else None,
                scale_grad_by_freq=self.scale_grad_by_freq,
                dtype=dtype,
            )
        tile.weight = torch.nn.Parameter(torch.empty_like(tile.weight, device=device))
        self.tiles.append(tile)
        return tile

    @classmethod
    def from_embedding(cls, embedding: torch.nn.Embedding, tile_rows: int) -> TiledEmbedding:
        """A tiled embedding with the values of a plain one, before hetero.initialize().

        Args:
            embedding: stays as it is. It may be under construction, and larger than the budget.
            tile_rows: as of the class.

        Raises:
            ValueError: for a number that cannot be, and for options that tiles do not have.
        """
        if embedding.max_norm is not None or embedding.sparse:
            raise ValueError("an embedding with max_norm or sparse=True cannot be tiled")
        with torch.device("meta"):
            tiled = cls(
                embedding.num_embeddings,
                embedding.embedding_dim,
                tile_rows,
                embedding.padding_idx,
                embedding.scale_grad_by_freq,
                dtype=embedding.weight.dtype,
            )
        for tile, rows in zip(tiled.tiles, tiled.ranges, strict=True):
            tile.weight = rows_param(embedding.weight, rows)  # type: ignore[arg-type]
        return tiled.train(embedding.training)

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

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the whole weight, (num_embeddings, embedding_dim), without gradient."""
        return self.embedding_state_dict()["weight"]

    @torch.no_grad()
    def embedding_state_dict(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """The state of a torch.nn.Embedding with the same values, in memory that no budget
        counts."""
        first: Any = self.tiles[0].weight
        shape = (self.num_embeddings, self.embedding_dim)
        weight = torch.empty(shape, dtype=first.dtype, device=first.device)
        for tile, rows in zip(self.tiles, self.ranges, strict=True):
            weight[rows] = tile.weight  # type: ignore[assignment]
        return {f"{prefix}weight": weight}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        cut_weight(state_dict, prefix, self.ranges)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tile_rows={self.tile_rows}"


def rows_param(weight: torch.nn.Parameter, rows: slice) -> torch.nn.Parameter:
    """A parameter of its own with some rows' values."""
    if weight.is_meta:
        values = torch.empty((rows.stop - rows.start, weight.shape[1]), dtype=weight.dtype,
                             device="meta")  # fmt: skip
    else:
        with torch.no_grad():
            values = rows_of(weight, rows)
    return torch.nn.Parameter(values, weight.requires_grad)


def cut_weight(state_dict: dict[str, Any], prefix: str, ranges: list[slice]) -> None:
    """Puts tiles in the place of a whole weight that a state has."""
    weight = state_dict.pop(f"{prefix}weight", None)
    if weight is not None:
        for index, rows in enumerate(ranges):
            state_dict[f"{prefix}tiles.{index}.weight"] = weight[rows]
