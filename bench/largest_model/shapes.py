"""GPT-2s of all sizes, in a row in which each takes a little more memory than the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

HEAD_WIDTH = 64
LEAST_WIDTH, MOST_WIDTH = 64, 5120
MOST_LAYERS = 96  # GPT-3's
LEAST_WIDTH_PER_LAYER = 8  # GPT-2's are 33 to 64, GPT-3's 64 to 128
# A shape that is less than this larger than the one before is left out.
LEAST_GROWTH = 1.06


@dataclass(frozen=True)
class Shape:
    """A GPT-2."""

    layers: int
    width: int

    @property
    def heads(self) -> int:
        """Of 64 elements, or of the next larger width that divides."""
        return next(n for n in range(max(1, self.width // HEAD_WIDTH), 0, -1) if not self.width % n)

    def config(self, vocab_size: int, seq_len: int) -> dict[str, Any]:
        """What transformers' configuration takes."""
        return {
            "model_type": "gpt2",
            "n_layer": self.layers,
            "n_embd": self.width,
            "n_head": self.heads,
            "vocab_size": vocab_size,
            "n_positions": seq_len,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


def params_of(config: Mapping[str, Any]) -> int:
    """Parameters of a GPT-2 configuration, the tied embedding once."""
    w, layers = int(config["n_embd"]), int(config["n_layer"])
    rows = int(config["vocab_size"]) + int(config["n_positions"])
    return rows * w + layers * (12 * w * w + 13 * w) + 2 * w


def shape_name(config: Mapping[str, Any]) -> str:
    """Layers x width."""
    return f"{config['n_layer']} x {config['n_embd']}"


def widths() -> Iterator[int]:
    """Each at most an eighth more than the one before."""
    width = LEAST_WIDTH
    while width <= MOST_WIDTH:
        yield width
        # A power of two, so that what is wide has heads of HEAD_WIDTH.
        width += min(HEAD_WIDTH, max(8, 1 << (width // 8).bit_length() - 1))


def family(vocab_size: int, seq_len: int) -> list[dict[str, Any]]:
    """Configurations, the smallest first.

    Width is what takes RAM (a layer's parameters are on disk until it is computed, and an
    embedding's tiles are no larger), so of each width there are the shapes that have more
    parameters than all narrower ones: the deepest, up to MOST_LAYERS or a width of
    LEAST_WIDTH_PER_LAYER a layer.
    """
    found: list[dict[str, Any]] = []
    last = 0.0
    for width in widths():
        for layers in range(1, min(MOST_LAYERS, width // LEAST_WIDTH_PER_LAYER) + 1):
            config = Shape(layers, width).config(vocab_size, seq_len)
            if params_of(config) >= LEAST_GROWTH * last:
                found.append(config)
                last = params_of(config)
    return found
