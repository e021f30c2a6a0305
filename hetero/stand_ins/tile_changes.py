"""In-place operators that may be made on a parameter under construction part by part.

Vocabulary: a *tile change* is an operator that fills a whole parameter, or changes each element
alone. It is made on tiles of the flat parameter, in order, with the bits of one call on all of
it: so a parameter whose values are in the scratch file changes there, and a tile at a time is in
memory.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# torch draws normal numbers in blocks of so many; a tensor's last ones, if they are fewer, are
# drawn again together with those before them. So tiles are multiples of it, and none is smaller.
_DRAWN_TOGETHER = 16


@dataclass(frozen=True)
class TileChange:
    """An operator on a whole parameter.

    Attributes:
        apply: changes a flat tile in place; tiles must come in order, as tiles() gives them.
        fills: it does not need the values that are there.
    """

    apply: Callable[[torch.Tensor], object]
    fills: bool


def tile_change(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, TileChange] | None:
    """The parameter that a torch function changes, and how; None if it cannot be made by tiles.

    `args` and `kwargs` are what it was called with. That is an in-place method of a tensor with
    numbers as arguments, or one of torch.nn.init's functions, called by torch for its parameter.
    """
    init = _INITS.get(getattr(func, "__name__", ""))
    # By their names, because transformers puts others, which call them, in the place of torch's;
    # and by what torch gives all of them.
    if init is not None and kwargs.keys() == _options_of(init) | {"tensor"}:
        param, given = kwargs["tensor"], {k: v for k, v in kwargs.items() if k != "tensor"}
        made = init(param, **given)
        return None if made is None else (param, made)
    if func not in _FILLS and func not in _CHANGES:
        return None
    param, *numbers = args
    if torch.is_grad_enabled() and param.requires_grad:
        return None  # torch refuses it
    if any(isinstance(v, torch.Tensor) for v in (*numbers, *kwargs.values())):
        return None
    return param, TileChange(lambda tile: func(tile, *numbers, **kwargs), func in _FILLS)


def tiles(numel: int, tile_numel: int) -> Iterator[slice]:
    """Parts of a flat parameter, the last of which may be larger by a few elements."""
    assert tile_numel % _DRAWN_TOGETHER == 0
    begin = 0
    while begin < numel:
        end = min(begin + tile_numel, numel)
        if numel - end < _DRAWN_TOGETHER:
            end = numel
        yield slice(begin, end)
        begin = end


def largest_tile(tile_numel: int) -> int:
    """The most elements that a tile of tiles() has."""
    return tile_numel + _DRAWN_TOGETHER - 1


def _normal(
    param: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None
) -> TileChange:
    return TileChange(lambda tile: tile.normal_(mean, std, generator=generator), True)


def _uniform(
    param: torch.Tensor, a: float = 0.0, b: float = 1.0, generator: Any = None
) -> TileChange:
    return TileChange(lambda tile: tile.uniform_(a, b, generator=generator), True)


def _constant(param: torch.Tensor, val: float) -> TileChange:
    return TileChange(lambda tile: tile.fill_(val), True)


def _kaiming_uniform(
    param: torch.Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Any = None,
) -> TileChange | None:
    if param.dim() != 2 or mode not in ("fan_in", "fan_out"):
        return None  # torch tells what is wrong, or computes it
    fan = param.shape[1] if mode == "fan_in" else param.shape[0]
    gain = torch.nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    bound = math.sqrt(3.0) * (gain / math.sqrt(fan))
    return _uniform(param, -bound, bound, generator)


def _options_of(init: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(init).parameters) - {"param"}


_INITS: dict[str, Callable[..., TileChange | None]] = {
    "normal_": _normal,
    "uniform_": _uniform,
    "constant_": _constant,
    "kaiming_uniform_": _kaiming_uniform,
}
_Tensor: Any = torch.Tensor
_FILLS = {_Tensor.normal_, _Tensor.uniform_, _Tensor.zero_, _Tensor.fill_}
_CHANGES = {
    getattr(_Tensor, name)
    for name in (
        "add_",
        "sub_",
        "mul_",
        "div_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "erfinv_",
        "neg_",
        "abs_",
        "exp_",
        "log_",
        "sqrt_",
        "pow_",
    )
}
