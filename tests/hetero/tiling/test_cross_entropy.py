"""hetero/tiling/cross_entropy: the loss and its gradients, beside torch's over whole logits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hetero
from hetero.tiling.cross_entropy import TILE_NUMEL, TileOptions

VOCABULARY, WIDTH, TOKENS = 301, 48, 96
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(dtype: torch.dtype, grad: bool = True) -> tuple[torch.Tensor, ...]:
    """hidden (2, 48, w), weight, labels of which some are ignored, bias."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    hidden, weight, bias = normal(2, TOKENS // 2, WIDTH), normal(VOCABULARY, WIDTH) / 5, normal(1)
    bias = normal(VOCABULARY)
    labels = torch.randint(0, VOCABULARY, (2, TOKENS // 2), generator=generator)
    labels[0, :5] = -100
    for each in (hidden, weight, bias):
        each.requires_grad_(grad)
    return hidden, weight, labels, bias


def whole(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """As transformers' models compute it."""
    logits = F.linear(hidden, weight, bias)
    if scale is not None:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits.float().view(-1, weight.shape[0]), labels.view(-1), **options)
    return loss.view_as(labels) if options.get("reduction") == "none" else loss


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 7},
    {"scale": 0.5, "softcap": 3.0},
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile_tokens", [1, 20, None])
def test_the_loss_has_the_bits_of_the_whole_one(
    dtype: torch.dtype, options: dict[str, Any], tile_tokens: int | None
) -> None:
    hidden, weight, labels, bias = inputs(dtype)
    labels = labels.where(labels >= 0, options.get("ignore_index", -100))
    found = hetero.tiled_cross_entropy(
        hidden, weight, labels, bias, tile_tokens=tile_tokens, **options
    )
    expected = whole(hidden, weight, labels, bias, **options)
    assert found.dtype is torch.float32
    if tile_tokens == 1:  # a product of one row is another routine of the matrix library
        torch.testing.assert_close(
            found, expected, rtol=2e-6, atol=2e-6 if dtype.itemsize == 4 else 1e-2
        )
    else:
        assert torch.equal(found, expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_as_exact_as_the_whole_ones(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Of the error of the plain gradients against those of fp64 at most 1.5 times as much, in
    norm; in fp32, where errors are those of sums of this length, some 1e-6."""
    hidden, weight, labels, bias = inputs(dtype)
    labels = labels.where(labels >= 0, options.get("ignore_index", -100))
    scale = 1024.0  # as of a loss scale: gradients of fp16 would vanish before it
    params = (hidden, weight, bias)
    exact = [p.detach().double().requires_grad_() for p in params]
    losses = (
        hetero.tiled_cross_entropy(hidden, weight, labels, bias, tile_tokens=20, **options),
        whole(hidden, weight, labels, bias, **options),
    )
    tiled, plain = (torch.autograd.grad(loss.sum() * scale, params) for loss in losses)
    reference = torch.autograd.grad(
        _in_double(exact, labels, **options).sum() * scale, tuple(exact)
    )
    for name, t, p, e in zip(("hidden", "weight", "bias"), tiled, plain, reference, strict=True):
        assert t.dtype is dtype
        norm = e.norm().item()
        error, plain_error = ((each.double() - e).norm().item() / norm for each in (t, p))
        assert error <= max(1.5 * plain_error, 1e-6), name


def _in_double(exact: list[torch.Tensor], labels: torch.Tensor, **options: Any) -> torch.Tensor:
    hidden, weight, bias = exact
    scale, cap = options.pop("scale", None), options.pop("softcap", None)
    logits = F.linear(hidden, weight, bias)
    if scale is not None:
        logits = logits * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), **options)


def test_the_weights_gradient_is_rounded_once() -> None:
    """However many tiles there are: in bf16 nearly all its bits are the plain ones."""
    hidden, weight, labels, _ = inputs(torch.bfloat16)
    (plain,) = torch.autograd.grad(whole(hidden, weight, labels), weight)
    for tile_tokens in (1, 20, TOKENS):
        loss = hetero.tiled_cross_entropy(hidden, weight, labels, tile_tokens=tile_tokens)
        (tiled,) = torch.autograd.grad(loss, weight)
        assert (tiled != plain).float().mean() < 1e-3, tile_tokens


def test_only_the_gradients_that_are_needed() -> None:
    hidden, weight, labels, _ = inputs(torch.float32, grad=False)
    for needed in (hidden, weight):
        expected = torch.autograd.grad(whole(*_needing(needed, hidden, weight), labels), needed)
        found = torch.autograd.grad(
            hetero.tiled_cross_entropy(*_needing(needed, hidden, weight), labels), needed
        )
        torch.testing.assert_close(found, expected)
        needed.requires_grad_(False)


def _needing(needed: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    needed.requires_grad_()
    return tensors


def test_without_labels_the_mean_is_nan_as_torchs() -> None:
    hidden, weight, labels, _ = inputs(torch.float32)
    ignored = torch.full_like(labels, -100)
    assert hetero.tiled_cross_entropy(hidden, weight, ignored).isnan()
    assert hetero.tiled_cross_entropy(hidden, weight, ignored, reduction="sum").item() == 0


def test_inside_autocast_it_computes_in_its_dtype() -> None:
    hidden, weight, labels, bias = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = hetero.tiled_cross_entropy(hidden, weight, labels, bias, tile_tokens=20)
        expected = whole(hidden, weight, labels, bias)
    assert torch.equal(found, expected)
    tiled, plain = (torch.autograd.grad(each, weight)[0] for each in (found, expected))
    assert tiled.dtype is torch.float32
    torch.testing.assert_close(tiled, plain, rtol=1e-2, atol=1e-5)


def test_sizes_of_tiles() -> None:
    default = TileOptions()
    assert default.tokens(50257) * 50257 <= TILE_NUMEL
    assert default.tokens(1 << 30) == 1
    rows = default.rows(4096, 50257)
    assert 0.9 * TILE_NUMEL < rows * 4096 < 1.1 * TILE_NUMEL
    assert TileOptions(8).rows(1 << 20, 50257) == 64, "narrower products waste too much"
    assert TileOptions(8).rows(4, 50257) == 50257
    assert TileOptions(8).rows(0, 50257) == 50257


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"weight": torch.zeros(5, 4)}, "hidden of shape (2, 48, 48) does not fit weight"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "must have one class for each token"),
        ({"labels": torch.zeros(2, 48)}, "of an integer dtype"),
        ({"bias": torch.zeros(3)}, "bias of shape (3,) does not fit"),
        ({"reduction": "all"}, "reduction must be one of mean, sum, none"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"tile_tokens": 0}, "tile_tokens must be 1 or more"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], fact: str) -> None:
    hidden, weight, labels, bias = inputs(torch.float32)
    given: dict[str, Any] = {"weight": weight, "labels": labels, "bias": bias, **change}
    with pytest.raises(ValueError, match=re.escape(fact)):
        hetero.tiled_cross_entropy(hidden, **given)


def test_a_label_outside_of_the_vocabulary_is_an_error() -> None:
    hidden, weight, labels, _ = inputs(torch.float32)
    labels[1, 3] = VOCABULARY
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        hetero.tiled_cross_entropy(hidden, weight, labels)
