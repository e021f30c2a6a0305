"""Models whose head, feed-forward layers or linear layers are computed in parts."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

from hetero.tiling.heads import tile_heads
from hetero.tiling.tiled_embeddings import tile_embeddings
from hetero.tiling.tiled_linear import TiledLinear
from hetero.tiling.tiled_sequence import tile_sequence
from tests.zoo.case import WIDTH, Case, ballasted, mean_square, vectors
from tests.zoo.pretrained import TRANSFORMER, gpt2_checkpointed, labelled, llama, own_loss


def tied() -> nn.Module:
    """With gradient checkpoints around the blocks, and inside them around parts of the sequence."""
    model = gpt2_checkpointed()
    tile_heads(model, tile_tokens=5)
    for block in model.transformer.h:  # type: ignore[union-attr]
        tile_sequence(block.mlp, 3)
    return model


def untied() -> nn.Module:
    """With gated layers, whose backward needs two of their parameters at once."""
    model = llama()
    tile_heads(model, tile_tokens=7)
    for layer in model.model.layers:  # type: ignore[union-attr]
        tile_sequence(layer.mlp, 5)
    return model


def qwen2_plain() -> nn.Module:
    """Its input embedding and head have one weight."""
    config = hf.Qwen2Config(**TRANSFORMER, num_key_value_heads=1, tie_word_embeddings=True)
    return hf.Qwen2ForCausalLM(config)


def qwen2() -> nn.Module:
    model = qwen2_plain()
    tile_heads(model, tile_tokens=24)
    return model


def tied_tiles() -> nn.Module:
    """An embedding and a head of the same two parameters."""
    model = gpt2_checkpointed()
    tile_embeddings(model, 1, tile_tokens=16)
    return model


def untied_tiles() -> nn.Module:
    model = llama()
    tile_embeddings(model, 1, tile_tokens=24)
    return model


class Linears(nn.Module):
    """Tiles of the smallest slot's size, and of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = TiledLinear(WIDTH, 4 * WIDTH, out_splits=4)
        self.middle = TiledLinear(4 * WIDTH, 3 * WIDTH, in_splits=3, out_splits=5, bias=False)
        self.down = TiledLinear(3 * WIDTH, WIDTH, in_splits=3)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.down(self.middle(nn.functional.gelu(self.up(x))))


CASES = [
    Case("tiled-tied", tied, labelled, own_loss),
    Case("tiled-untied", untied, labelled, own_loss),
    Case("tiled-qwen2", qwen2, labelled, own_loss),
    Case("tiled-embedding-tied", tied_tiles, labelled, own_loss),
    Case("tiled-embedding-untied", untied_tiles, labelled, own_loss),
    Case("tiled-linears", ballasted(Linears), vectors, mean_square),
]

TOKENS = torch.randint(1, 101, (2, 12), generator=torch.Generator().manual_seed(0))


def step(model: Any, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The output and the gradients of one forward and backward over TOKENS."""
    torch.manual_seed(1)
    model.zero_grad()
    output = model(input_ids=TOKENS, labels=TOKENS, **options)
    output.loss.backward()
    return output, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def joined(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With tiles' gradients joined, under the names that weights have without tiles."""
    found: dict[str, torch.Tensor] = {}
    for name, grad in grads.items():
        plain = name.split(".tiles.")[0] + ".weight" if ".tiles." in name else name
        found[plain] = torch.cat([found[plain], grad]) if plain in found else grad
    return found
