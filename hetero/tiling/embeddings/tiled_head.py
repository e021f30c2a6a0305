"""A language model's head in parts, each a parameter of its own or an embedding's."""

from __future__ import annotations

from typing import Any

import torch

from hetero.tiling.deferred_logits import DeferredLogits, HeadInputs
from hetero.tiling.embeddings.tiled_embedding import cut_weight
from hetero.tiling.log_probs import check_tile_tokens
from hetero.tiling.row_tiles import RowTiles


class TiledHead(torch.nn.Module):
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

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the whole weight, (out_features, in_features), without gradient."""
        with torch.no_grad():
            return torch.cat([tile.weight.detach().clone() for tile in self.tiles])  # type: ignore

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        cut_weight(state_dict, prefix, self._row_tiles().ranges)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
