"""In-place operators made tile by tile have the bits of one call on the whole tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetero.stand_ins.tile_changes import largest_tile, tile_change, tiles

TILE = 64
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# One tile and its neighbours, a remainder that is smaller than what is drawn together, and one that
# is not; fewer elements than are drawn together.
NUMELS = [5, 15, 16, 17, 63, 64, 65, 79, 80, 81, 1000]


def by_tiles(flat: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found = tile_change(func, args, kwargs)
    assert found is not None
    for tile in tiles(flat.numel(), TILE):
        assert tile.stop - tile.start <= largest_tile(TILE)
        found[1].apply(flat[tile])


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize(
    ("func", "numbers"),
    [
        (torch.Tensor.normal_, (0.5, 0.02)),
        (torch.Tensor.uniform_, (-0.3, 0.7)),
        (torch.Tensor.fill_, (3.0,)),
        (torch.Tensor.zero_, ()),
        (torch.Tensor.mul_, (0.3,)),
        (torch.Tensor.clamp_, (-0.1, 0.2)),
        (torch.Tensor.erfinv_, ()),
    ],
)
def test_methods(dtype: torch.dtype, numel: int, func: Any, numbers: tuple[float, ...]) -> None:
    torch.manual_seed(1)
    whole = torch.rand(numel, dtype=dtype)
    tiled = whole.clone()
    state = torch.get_rng_state()
    func(whole, *numbers)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    by_tiles(tiled, func, (tiled, *numbers), {})
    assert torch.equal(tiled, whole)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize(
    ("func", "options"),
    [
        (torch.nn.init.normal_, {"mean": 0.1, "std": 0.5}),
        (torch.nn.init.uniform_, {"a": -1.0, "b": 2.0}),
        (torch.nn.init.constant_, {"val": 0.25}),
        (torch.nn.init.kaiming_uniform_, {"a": 5**0.5}),
        (torch.nn.init.kaiming_uniform_, {"mode": "fan_out", "nonlinearity": "relu"}),
    ],
)
def test_functions_of_torch_init(func: Callable[..., Any], options: dict[str, Any]) -> None:
    whole, tiled = torch.empty(50, 7), torch.empty(50, 7)
    torch.manual_seed(2)
    func(whole, **options)
    given = inspect.signature(func).parameters  # torch gives all options
    kwargs = {name: options.get(name, each.default) for name, each in given.items()}
    torch.manual_seed(2)
    by_tiles(tiled.view(-1), func, (tiled,), kwargs | {"tensor": tiled})
    assert torch.equal(tiled, whole)


def test_a_generator_of_the_users() -> None:
    whole, tiled = torch.empty(1000), torch.empty(1000)
    whole.normal_(generator=torch.Generator().manual_seed(3))
    kwargs = {"generator": torch.Generator().manual_seed(3)}
    by_tiles(tiled, torch.Tensor.normal_, (tiled,), kwargs)
    assert torch.equal(tiled, whole)


def test_what_is_no_tile_change() -> None:
    param = torch.nn.Parameter(torch.ones(4, 4))
    with torch.no_grad():
        assert tile_change(torch.Tensor.mul_, (param, torch.ones(4)), {}) is None
        assert tile_change(torch.Tensor.t_, (param,), {}) is None
        assert tile_change(torch.Tensor.mul_, (param, 2.0), {}) is not None
    assert tile_change(torch.Tensor.mul_, (param, 2.0), {}) is None  # a leaf, in a graph
