"""hetero/tiling/cross_entropy: log-probabilities have the bits of those of one weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetero.tiling.cross_entropy import RowTiles, TileOptions, label_log_probs

TOKENS, VOCABULARY, WIDTH = 40, 300, 32


def inputs(dtype: torch.dtype, bias: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=dtype))
    offset = torch.nn.Parameter(torch.randn(VOCABULARY, dtype=dtype)) if bias else None
    return hidden, weight, offset, torch.randint(0, VOCABULARY, (TOKENS,))


def tiled(weight: torch.Tensor, rows: int) -> RowTiles:
    return RowTiles([nn.Parameter(part.clone()) for part in weight.detach().split(rows)])


@pytest.mark.covering(1)
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile_tokens", [16, 32, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_against_one_weight(
    dtype: torch.dtype, tile_tokens: int | None, bias: bool, capped: bool
) -> None:
    options = TileOptions(tile_tokens, (torch.tanh,) if capped else ())
    hidden, weight, offset, labels = inputs(dtype, bias)
    factors = torch.rand(TOKENS)
    found = label_log_probs(hidden, RowTiles([weight]), offset, labels, options)
    (found * factors).sum().backward()
    expected = hidden.grad, weight.grad, None if offset is None else offset.grad
    hidden.grad = None
    if offset is not None:
        offset.grad = None
    tiles = tiled(weight, 64)
    made = label_log_probs(hidden, tiles, offset, labels, options)
    assert torch.equal(made, found)
    (made * factors).sum().backward()
    # The rows of the weight's gradient are one product each, whatever the tiles are; that of the
    # hidden states is a sum over tiles in fp32.
    by_tiles = torch.cat([param.grad for param in tiles.params])  # type: ignore[misc]
    assert expected[1] is not None
    if dtype is torch.bfloat16:
        assert torch.equal(by_tiles, expected[1])
    torch.testing.assert_close(by_tiles, expected[1], rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(hidden.grad, expected[0], rtol=tolerance, atol=tolerance)
    if offset is not None:
        assert expected[2] is not None
        torch.testing.assert_close(offset.grad, expected[2], rtol=1e-5, atol=1e-5)


def test_no_tokens_and_no_graph() -> None:
    hidden, weight, _, labels = inputs(torch.float32, False)
    tiles = tiled(weight, 64)
    found = label_log_probs(hidden[:0], tiles, None, labels[:0], TileOptions())
    found.sum().backward()
    assert all(param.grad is not None and not param.grad.any() for param in tiles.params)
    with torch.no_grad():
        found = label_log_probs(hidden, tiles, None, labels, TileOptions())
    assert not found.requires_grad


def test_backward_twice() -> None:
    hidden, weight, _, labels = inputs(torch.float32, False)
    tiles = tiled(weight, 64)
    found = label_log_probs(hidden, tiles, None, labels, TileOptions())
    found.sum().backward(retain_graph=True)
    first = [param.grad.clone() for param in tiles.params]  # type: ignore[union-attr]
    found.sum().backward()
    for param, grad in zip(tiles.params, first, strict=True):
        assert torch.equal(param.grad, 2 * grad)  # type: ignore[arg-type]
