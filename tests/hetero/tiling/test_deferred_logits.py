"""hetero/tiling/heads: cross-entropy is tiled, all else is as with plain logits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from hetero.tiling.cross_entropy import RowTiles
from hetero.tiling.heads import DeferredLogits, HeadInputs

VOCABULARY, WIDTH = 37, 16
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 24, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    made = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    return made[0], made[1], made[2]


LABELS = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))


def deferred(given: Inputs) -> DeferredLogits:
    hidden, weight, bias = given
    made = DeferredLogits.of(HeadInputs(hidden, RowTiles([weight]), bias, tile_tokens=16))
    assert isinstance(made, DeferredLogits)
    return made


def is_whole(logits: torch.Tensor) -> bool:
    """Whether somebody has needed the values."""
    assert isinstance(logits, DeferredLogits)
    source = logits._source
    return source.whole is not None or (source.of is not None and is_whole(source.of))


def next_tokens(logits: torch.Tensor) -> torch.Tensor:
    """transformers before 4.45."""
    shifted = logits[..., :-1, :].contiguous()
    loss = torch.nn.CrossEntropyLoss()
    return loss(shifted.view(-1, VOCABULARY), LABELS[..., 1:].contiguous().view(-1))


def capped(logits: torch.Tensor) -> torch.Tensor:
    """Gemma's."""
    logits = torch.tanh(logits / 2.0) * 2.0
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), LABELS.view(-1))


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transformers": lambda x: F.cross_entropy(
        x.float().view(-1, VOCABULARY), LABELS.view(-1).to(x.device), reduction="sum"
    ),
    "next tokens": next_tokens,
    "capped": capped,
    "scaled": lambda x: F.cross_entropy((x * 0.25).flatten(0, 1), LABELS.flatten()),
    "flat, of a part": lambda x: F.cross_entropy(
        x[:, :-1].flatten(0, 1).float(), LABELS[:, 1:].flatten()
    ),
    "last": lambda x: F.cross_entropy(x[:, -1], LABELS[:, -1]),
    "last, float": lambda x: F.cross_entropy(x.float()[:, -1, :], LABELS[:, -1]),
    "all of the vocabulary": lambda x: F.cross_entropy(
        x.narrow(2, 0, VOCABULARY).flatten(0, 1), LABELS.flatten()
    ),
    "some": lambda x: F.cross_entropy(x[1, 3:7], LABELS[1, 3:7]),
    "none": lambda x: (
        F.cross_entropy(x.reshape(-1, VOCABULARY), LABELS.view(-1), reduction="none").square().sum()
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_that_is_understood_is_tiled(name: str, dtype: torch.dtype) -> None:
    given = inputs(dtype)
    logits = deferred(given)
    loss = LOSSES[name](logits)
    expected = LOSSES[name](F.linear(*given))
    assert not is_whole(logits)
    assert loss.dtype is expected.dtype
    # (Where a model does not ask for fp32, the tiled loss is fp32 inside, and rounded once.)
    close = {"rtol": 2e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(loss, expected, **close)
    found, plain = (torch.autograd.grad(each, given) for each in (loss, expected))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=close["rtol"] * float(other.abs().max())
        )


def other_loss(logits: torch.Tensor) -> torch.Tensor:
    """Distillation."""
    target = torch.linspace(0, 1, VOCABULARY).softmax(0).expand(2, 24, -1)
    return F.kl_div(logits.float().log_softmax(-1), target, reduction="batchmean")


class OwnLoss(torch.autograd.Function):
    """Gets the logits past torch functions."""

    @staticmethod
    def forward(ctx, logits):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (logits,) = ctx.saved_tensors
        return 2 * logits * grad


def masked(logits: torch.Tensor) -> torch.Tensor:
    """In place, before the loss."""
    logits[..., 5:] -= 3.0
    return F.cross_entropy(logits.view(-1, VOCABULARY), LABELS.view(-1))


def written_between(logits: torch.Tensor) -> torch.Tensor:
    """What was made before a write has the values from before it."""
    before = logits * 2.0
    logits[0] = 0.0
    return before.square().sum() + logits.sum()


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "distillation": other_loss,
    "own function": OwnLoss.apply,
    "own function of a view": lambda x: OwnLoss.apply(x[:, 3:].float()),
    "masked": masked,
    "written between": written_between,
    "weighted": lambda x: F.cross_entropy(
        x.view(-1, VOCABULARY), LABELS.view(-1), weight=torch.linspace(1, 2, VOCABULARY)
    ),
    "probabilities": lambda x: F.cross_entropy(
        x.view(-1, VOCABULARY), torch.full((48, VOCABULARY), 1 / VOCABULARY)
    ),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "half of the vocabulary": lambda x: F.cross_entropy(
        x[..., :20].reshape(-1, 20), LABELS.view(-1) % 20
    ),
    "half of the vocabulary, of one": lambda x: F.cross_entropy(x[0, :, :20], LABELS[0] % 20),
    "smoothed": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1),
    "chosen": lambda x: F.cross_entropy(x[LABELS > 9], LABELS[LABELS > 9]),
    "z loss": lambda x: x.logsumexp(-1).square().mean(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_else_gets_the_whole_logits_with_the_same_bits(name: str) -> None:
    given = inputs()
    logits = deferred(given)
    loss = OTHERS[name](logits)
    expected = OTHERS[name](F.linear(*given))
    assert is_whole(logits)
    assert torch.equal(loss, expected)
    found, plain = (torch.autograd.grad(each, given) for each in (loss, expected))
    assert all(map(torch.equal, found, plain))


def test_metadata_need_no_values() -> None:
    logits = deferred(inputs(torch.bfloat16))
    assert (logits.shape, logits.dtype, logits.device.type) == ((2, 24, 37), torch.bfloat16, "cpu")
    assert logits.requires_grad
    assert logits.float().dtype is torch.float32
    assert logits[:, -1].shape == (2, VOCABULARY)
    assert not is_whole(logits)


def test_values_are_given_to_whoever_asks() -> None:
    given = inputs()
    plain = F.linear(*given).detach()
    logits = deferred(given)
    assert torch.equal(logits.argmax(-1), plain.argmax(-1))
    assert torch.equal(logits.detach().clone(), plain)
    assert logits.tolist() == plain.tolist()
    assert (logits.detach().numpy() == plain.numpy()).all()
    assert torch.equal(pickle.loads(pickle.dumps(logits.detach())), plain)
    assert torch.equal(copy.deepcopy(logits.detach()), plain)
    assert logits.data_ptr() == logits.data_ptr() != 0
    assert repr(plain)[:30] in repr(logits.detach())


def test_detached_logits_and_no_grad_have_losses_without_graph() -> None:
    given = inputs()
    assert not LOSSES["transformers"](deferred(given).detach()).requires_grad
    with torch.no_grad():
        logits = deferred(given)
        assert not LOSSES["transformers"](logits).requires_grad
    assert not LOSSES["transformers"](logits).requires_grad, "as of plain logits of no_grad()"
    assert not other_loss(logits).requires_grad


def test_what_generation_takes_has_values_when_they_are_needed() -> None:
    logits = deferred(inputs())
    last = logits[:, -1, :].to(copy=True, dtype=torch.float32)
    assert not is_whole(logits)
    assert torch.equal(last, F.linear(*inputs())[:, -1, :])
