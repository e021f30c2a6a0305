"""hetero/tiling/tiled_sequence: a module of tokens, one part of the sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetero
from tests.support.tiling.live_bytes import LiveBytes

WIDTH, INNER, TOKENS = 16, 512, 256


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.dropout(self.down(nn.functional.gelu(self.up(x)) * scale))


def made(dropout: float = 0.0) -> Mlp:
    torch.manual_seed(0)
    return Mlp(dropout)


@pytest.mark.covering(2)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tiles", [1, 3, 4, 100])
@pytest.mark.parametrize("outer", [False, True], ids=["alone", "inside a checkpoint"])
def test_outputs_and_gradients(tiles: int, batch: int, outer: bool) -> None:
    found = []
    for tiled in (False, True):
        mlp = made()
        if tiled:
            hetero.tile_sequence(mlp, tiles)
        x = torch.randn(batch, 48, WIDTH, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        output = checkpoint(mlp, x, 0.5, use_reentrant=False) if outer else mlp(x, scale=0.5)
        output.square().sum().backward()
        found.append((output, x.grad, *(p.grad for p in mlp.parameters())))
    for plain, tiled_one in zip(*found, strict=True):
        torch.testing.assert_close(
            tiled_one, plain, rtol=1e-5, atol=1e-5 * float(plain.detach().abs().max())
        )
    if tiles < 100:  # (products of one row are another routine)
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


def test_intermediates_of_one_part_are_in_memory() -> None:
    """Forward and backward; plainly two intermediates of all tokens are."""
    whole_bytes = TOKENS * INNER * 4
    peaks = {}
    for tiles in (0, 16):
        mlp = made()
        for param in mlp.parameters():
            param.grad = torch.zeros_like(param)
        if tiles:
            hetero.tile_sequence(mlp, tiles)
        x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
        with LiveBytes() as live:
            mlp(x).sum().backward()
        peaks[tiles] = live
    assert peaks[0].peak > 2 * whole_bytes
    assert peaks[16].largest <= whole_bytes / 16
    # Four of the part's intermediates (and gradients of them), and gradients of the parameters:
    # autograd's sum over parts, and a part's.
    params_bytes = sum(p.nbytes for p in made().parameters())
    tokens_bytes = 4 * TOKENS * WIDTH * 4
    assert peaks[16].peak < 5 * whole_bytes / 16 + 3 * params_bytes + tokens_bytes


def test_dropout_is_the_same_in_backward() -> None:
    mlp = made(dropout=0.5)
    hetero.tile_sequence(mlp, 4)
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    output = mlp(x)
    output.sum().backward()
    # The bias's gradient counts the elements that were not dropped, times two.
    kept = (output != 0).sum((0, 1))
    assert torch.equal(mlp.down.bias.grad, 2.0 * kept)


def test_without_a_graph_there_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = made(), torch.randn(1, TOKENS, WIDTH)
    expected = mlp(x)
    handle = hetero.tile_sequence(mlp, 4)
    monkeypatch.setattr("hetero.tiling.tiled_sequence.checkpoint", None)
    with torch.no_grad():
        assert torch.equal(mlp(x), expected)
    with handle:
        pass
    assert type(mlp) is Mlp
    assert torch.equal(mlp(x), expected)


def test_what_does_not_act_on_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="tiles must be 1 or more"):
        hetero.tile_sequence(made(), 0)
    x = torch.randn(1, TOKENS, WIDTH)
    several = nn.GRU(WIDTH, WIDTH)
    hetero.tile_sequence(several, 2)
    with pytest.raises(TypeError, match="GRU returned a tuple for a part of the sequence"):
        several(x)
    shorter = nn.Conv1d(TOKENS // 2, 3, 1)
    hetero.tile_sequence(shorter, 2)
    with pytest.raises(ValueError, match="Conv1d returned 3 tokens for 128"):
        shorter(x)
