"""hetero/tiling/tiled_embeddings: torch.nn.Embedding in parts, with its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetero import TiledEmbedding

ROWS, WIDTH = 300, 24


def pair(tile_rows: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """A plain embedding and a tiled one of its values."""
    torch.manual_seed(0)
    plain = nn.Embedding(ROWS, WIDTH, dtype=dtype, **options)
    return plain, TiledEmbedding(plain, tile_rows)


@pytest.mark.covering(2)
@pytest.mark.parametrize("tile_rows", [1, 64, 299, 300, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 70}, {"scale_grad_by_freq": True}], ids=str
)
def test_rows_and_gradients_have_the_bits(
    tile_rows: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    plain, tiled = pair(tile_rows, dtype, **options)
    ids = torch.randint(0, ROWS, (3, 50), generator=torch.Generator().manual_seed(1))
    ids[0, :9] = 70
    factor = torch.randn(3, 50, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)
    for embedding in (plain, tiled):
        rows = embedding(ids)
        assert torch.equal(rows, plain(ids))
        (rows * factor).sum().backward()
    assert torch.equal(torch.cat([tile.weight.grad for tile in tiled.tiles]), plain.weight.grad)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (2, 3, 4)])
def test_ids_of_any_shape(shape: tuple[int, ...]) -> None:
    plain, tiled = pair(64)
    ids = torch.ones(shape, dtype=torch.int32)
    assert torch.equal(tiled(ids), plain(ids))


@pytest.mark.parametrize("wrong", [-1, ROWS, 320, 100_000])
def test_ids_outside_are_refused(wrong: int) -> None:
    _, tiled = pair(64)
    with pytest.raises(IndexError):
        tiled(torch.tensor([0, wrong]))


def test_what_tiles_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="tile_rows must be 1 or more, got 0"):
        TiledEmbedding(nn.Embedding(4, 4), 0)
    for options in ({"max_norm": 1.0}, {"sparse": True}):
        with pytest.raises(ValueError, match="max_norm or sparse=True"):
            TiledEmbedding(nn.Embedding(4, 4, **options), 2)  # type: ignore[arg-type]


def test_states_of_both_kinds_load() -> None:
    _, tiled = pair(64)
    other = nn.ModuleDict({"e": nn.Embedding(ROWS, WIDTH)})
    model = nn.ModuleDict({"e": tiled})
    model.load_state_dict(other.state_dict())
    assert torch.equal(tiled.weight, other["e"].weight)
    assert torch.equal(tiled.embedding_state_dict("e.")["e.weight"], other["e"].weight)
    again = nn.ModuleDict({"e": pair(64)[1]})
    again.load_state_dict(model.state_dict())
    assert torch.equal(again["e"].weight, other["e"].weight)
    with pytest.raises(RuntimeError, match=r"weight: its shape is \(301, 24\) in the state"):
        tiled.load_state_dict(nn.Embedding(ROWS + 1, WIDTH).state_dict())


def test_from_a_frozen_embedding() -> None:
    plain, _ = pair(64)
    plain.weight.requires_grad_(False)
    state = torch.get_rng_state()
    tiled = TiledEmbedding(plain.eval(), 64)
    assert torch.equal(state, torch.get_rng_state())
    assert not tiled.training
    assert not any(param.requires_grad for param in tiled.parameters())
    assert torch.equal(tiled.weight, plain.weight)
