"""A weight in tiles, each a parameter of its own, so that hetero gathers one of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hetero.stand_ins.construction_uses import rows_of


class TiledWeight(torch.nn.Module):
    """A module in the place of a plain one whose weight, (rows, columns), it has in tiles.

    Each tile is the weight of a module inside. A state of the plain module loads as well as one of
    its own.
    """

    def _places(self) -> Iterator[tuple[str, slice, slice]]:
        """Yields the name of each tile's module, and the rows and the columns that it has."""
        raise NotImplementedError

    def _tiles(self) -> Iterator[tuple[Any, slice, slice]]:
        """As _places(), with the modules."""
        for name, rows, columns in self._places():
            yield self.get_submodule(name), rows, columns

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the whole weight, without gradient, in memory that no budget counts."""
        tiles = list(self._tiles())
        first, shape = tiles[0][0].weight, [part.stop for part in tiles[-1][1:]]
        whole = torch.empty(shape, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for tile, rows, columns in tiles:
                whole[rows, columns] = tile.weight
        return whole

    def _take(self, weight: torch.Tensor) -> None:
        """Gives the tiles the values of a whole weight, which may be larger than the budget."""
        for tile, rows, columns in self._tiles():
            values = rows_of(weight, rows)[:, columns].contiguous()
            tile.weight = torch.nn.Parameter(values, weight.requires_grad)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        tiles = list(self._tiles())
        biased = [tile for tile, _, _ in tiles if getattr(tile, "bias", None) is not None]
        weight = state_dict.pop(f"{prefix}weight", None)
        bias = state_dict.pop(f"{prefix}bias", None) if biased else None
        for name, rows, columns in self._places():
            if weight is not None:
                state_dict[f"{prefix}{name}.weight"] = weight[rows, columns]
            if bias is not None and self.get_submodule(name) in biased:
                state_dict[f"{prefix}{name}.bias"] = bias[rows]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
