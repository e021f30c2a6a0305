"""hetero/tiling/heads: one gradient of a tied weight, with the bits of the sum of two."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from hetero.tiling.heads import GradRoute, joins

VOCABULARY, WIDTH = 50, 16


def gradient(
    dtype: torch.dtype, padding_idx: int | None, joined: bool, uses: str
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Of a weight that an embedding and a head have, and the embedded rows; `uses`: of "both"."""
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx, dtype=dtype)
    ids = torch.randint(0, 9, (3, 20))  # most of them several times
    route = GradRoute()
    rows = route.embed(embedding, ids) if joined else embedding(ids)
    weight = route.take() if joined else embedding.weight
    assert weight is not None
    loss = torch.zeros(())
    if uses in ("both", "embedding"):
        loss = loss + (rows * torch.randn(rows.shape)).sum()
    if uses in ("both", "head"):
        # A fresh gradient of the weight's shape, as the head's backward makes it.
        loss = loss + (weight * torch.randn(weight.shape)).sum()
    loss.backward()
    return embedding.weight.grad, rows


@pytest.mark.covering(2)
@pytest.mark.parametrize("uses", ["both", "embedding", "head"])
@pytest.mark.parametrize("padding_idx", [None, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_the_sum(dtype: torch.dtype, padding_idx: int | None, uses: str) -> None:
    plain, plain_rows = gradient(dtype, padding_idx, False, uses)
    found, rows = gradient(dtype, padding_idx, True, uses)
    assert torch.equal(rows, plain_rows)
    assert found is not None
    assert plain is not None
    assert torch.equal(found, plain)


def test_calls_of_several_batches_may_be_nested() -> None:
    """The head of the first batch takes the route of the second one; each gradient is right."""
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    route = GradRoute()
    first = route.embed(embedding, torch.tensor([1, 2]))
    second = route.embed(embedding, torch.tensor([2, 3]))
    weight = route.take()
    assert weight is not None
    assert route.take() is None, "the next head has the weight itself"
    (first.sum() + (weight * 2).sum()).backward()
    (second.sum() + (embedding.weight * 4).sum()).backward()
    expected = torch.full((VOCABULARY, WIDTH), 6.0)
    expected[1:4] += torch.tensor([[1.0], [2.0], [1.0]])
    assert torch.equal(embedding.weight.grad, expected)


def test_there_is_no_route_without_a_graph() -> None:
    embedding, ids, route = nn.Embedding(VOCABULARY, WIDTH), torch.arange(3), GradRoute()
    with torch.no_grad():
        route.embed(embedding, ids)
    assert route.take() is None
    embedding.weight.requires_grad_(False)
    route.embed(embedding, ids)
    assert route.take() is None


def test_the_next_call_without_graph_forgets_the_last_one() -> None:
    embedding, route = nn.Embedding(VOCABULARY, WIDTH), GradRoute()
    route.embed(embedding, torch.arange(3))
    with torch.no_grad():
        route.embed(embedding, torch.arange(3))
    assert route.take() is None
    gone = weakref.ref(embedding.weight)
    del embedding
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_other_embeddings_keep_their_own_gradients(options: dict[str, object]) -> None:
    assert joins(nn.Embedding(VOCABULARY, WIDTH))
    assert not joins(nn.Embedding(VOCABULARY, WIDTH, **options))  # type: ignore[arg-type]
    assert not joins(nn.Linear(2, 2))
