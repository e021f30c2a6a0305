"""Which modules of a model are its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hetero.runtime.recompute.recompute import find_blocks
from tests.zoo.pretrained import gpt2, llama, mixtral


class Residual(nn.Module):
    """A block of convolutions, as torchvision's."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels // stride, channels, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)


def resnet() -> nn.Module:
    """Stages of which the first block is another one than the rest."""
    stages = [nn.Sequential(Residual(c, 2), Residual(c), Residual(c)) for c in (8, 16)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *stages)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, vocab_size=64
    )
    return transformers.T5ForConditionalGeneration(config)


def torch_transformer() -> nn.Module:
    return nn.Transformer(16, 2, 2, 2, 32, batch_first=True)


def of(pattern: str, numbers: range) -> list[str]:
    return [pattern.format(number) for number in numbers]


FOUND: dict[Callable[[], nn.Module], list[str]] = {
    gpt2: of("transformer.h.{}", range(2)),
    llama: of("model.layers.{}", range(2)),
    mixtral: of("model.layers.{}", range(2)),
    # The first block of each stack has the biases of positions, too.
    t5: of("encoder.block.{}", range(3)) + of("decoder.block.{}", range(3)),
    torch_transformer: of("encoder.layers.{}", range(2)) + of("decoder.layers.{}", range(2)),
    resnet: of("2.{}", range(3)) + of("3.{}", range(3)),
    lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))): [],
}


@pytest.mark.parametrize("make", FOUND, ids=lambda make: make.__name__)
def test_found(make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = make()
    blocks = find_blocks(model)
    assert [block.name for block in blocks] == FOUND[make]
    modules = dict(model.named_modules())
    assert all(block.module() is modules[block.name] for block in blocks)


def test_kinds() -> None:
    def kinds(model: nn.Module) -> list[int]:
        return [block.kind for block in find_blocks(model)]

    assert kinds(gpt2()) == [0, 0]
    assert kinds(torch_transformer()) == [0, 0, 1, 1]
    assert kinds(resnet()) == [0, 1, 1, 2, 3, 3]
    assert kinds(t5()) == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["transformer.h.*"], of("transformer.h.{}", range(2))),
        (["*.mlp"], of("transformer.h.{}.mlp", range(2))),
        (["*.mlp", "transformer.h.0"], ["transformer.h.0", "transformer.h.1.mlp"]),
        (["*"], ["transformer", "lm_head"]),
        ([], []),
    ],
)
def test_patterns(patterns: list[str], names: list[str]) -> None:
    """Of modules inside each other the outermost is the block."""
    assert [block.name for block in find_blocks(gpt2(), patterns)] == names


def test_a_pattern_that_fits_nothing() -> None:
    with pytest.raises(ValueError, match=r"'transformer\.k\.\*'; the nearest is 'transformer\.h"):
        find_blocks(gpt2(), ["*.mlp", "transformer.k.*"])


def test_one_module_in_two_places() -> None:
    shared: Any = nn.Sequential(nn.Linear(4, 4))
    model = nn.ModuleList([shared, nn.Sequential(nn.Linear(4, 4)), shared])
    assert [block.name for block in find_blocks(model)] == ["0", "1"]
