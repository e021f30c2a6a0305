"""A weight in tiles, each a parameter of its own, so that hetero gathers one of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hetero.stand_ins.construction_uses import rows_of
from hetero.stand_ins.tile_changes import tiles

_PIECE_NUMEL = 1 << 20  # elements of the weight that are drawn at a time


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

    def _draw(
        self,
        add: Callable[[slice, slice], None],
        draw: Callable[[torch.Tensor], object],
        dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        """Adds the tiles and draws their values, a piece of the weight after another.

        Inside hetero.ZeroInitContext a tile has to fit the budget, and not the weight. Random
        numbers are those of the plain module on the CPU; on other devices the distribution is.

        Args:
            add: adds the module of some rows and columns, without values.
            draw: fills a piece of the weight, in order.
            dtype, device: of the parameters.
        """
        places = list(self._places())
        height, width = places[-1][1].stop, places[-1][2].stop
        numel = max(1, _PIECE_NUMEL // width // 16) * 16 * width  # (whole rows, for tiles())
        pieces = [slice(p.start // width, p.stop // width) for p in tiles(height * width, numel)]
        begins: dict[int, torch.Tensor] = {}  # states of the generator, by a piece's first row
        for name, rows, columns in places:
            add(rows, columns)
            weight: Any = self.get_submodule(name).weight
            if device.type != "cpu":
                if device.type != "meta":
                    draw(weight)
                continue
            # One tile after another: all of a row of tiles may not fit. Its pieces come again.
            for piece in pieces:
                first, last = max(rows.start, piece.start), min(rows.stop, piece.stop)
                if first >= last:
                    continue
                torch.set_rng_state(begins.setdefault(piece.start, torch.get_rng_state()))
                values = torch.empty((piece.stop - piece.start, width), dtype=dtype)
                draw(values)
                with torch.no_grad():
                    weight[first - rows.start : last - rows.start] = values[
                        first - piece.start : last - piece.start, columns
                    ]

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


def real_parameters(module: torch.nn.Module, device: torch.device) -> None:
    """Gives the parameters of a module on the meta device memory, without values."""
    for name, param in list(module.named_parameters(recurse=False)):
        setattr(module, name, torch.nn.Parameter(torch.empty_like(param, device=device)))


def owners_of(model: torch.nn.Module) -> dict[int, tuple[torch.Tensor, list[Any]]]:
    """By the id of each parameter, it and the modules that have it."""
    owners: dict[int, tuple[torch.Tensor, list[Any]]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), (param, []))[1].append(module)
    return owners


def replace(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> list[str]:
    """Puts a module in the place of another one, wherever that is; returns the names it has."""
    names = []
    for parent_name, parent in list(model.named_modules()):
        for name in [name for name, child in parent._modules.items() if child is old]:
            setattr(parent, name, new)
            names.append(f"{parent_name}.{name}".lstrip("."))
    return names
