"""embeddings/tile_embeddings: models whose embeddings and heads are in parts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from tests.support.tiling.live_bytes import LiveBytes
from tests.support.tiling.tiled_models import TOKENS, joined, step
from tests.support.training.loops import tiny_gpt2
from tests.zoo import pretrained

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_that_somebody_needs_in_a_graph(tied: bool, dtype: torch.dtype) -> None:
    def grads(tiled: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model: Any = pretrained.gpt2() if tied else pretrained.llama()
        model.to(dtype)
        if tiled:
            hetero.tile_embeddings(model, 1)
        model(input_ids=TOKENS).logits.float().logsumexp(-1).mean().backward()
        return joined({n: p.grad for n, p in model.named_parameters() if p.grad is not None})

    plain, found = grads(False), grads(True)
    assert found.keys() == plain.keys()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for key, grad in found.items():
        largest = float(plain[key].abs().max())
        torch.testing.assert_close(grad, plain[key], rtol=tolerance, atol=tolerance * largest)


def test_plain_states_load_and_copies_are_tied() -> None:
    torch.manual_seed(0)
    plain, model = pretrained.gpt2(), pretrained.gpt2()
    hetero.tile_embeddings(model, 1)
    model.load_state_dict(plain.state_dict())
    torch.manual_seed(0)
    assert torch.equal(step(model)[0].loss, step(plain)[0].loss)
    other: Any = copy.deepcopy(model)
    assert other.lm_head.tiles[0].weight is other.transformer.wte.tiles[0].weight
    assert torch.equal(other.lm_head.weight, plain.lm_head.weight)


def test_what_is_tiled() -> None:
    model: Any = pretrained.gpt2()
    assert hetero.tile_embeddings(model, 1 << 30) == {}
    with pytest.raises(ValueError, match="max_numel must be 1 or more, got 0"):
        hetero.tile_embeddings(model, 0)
    with pytest.raises(ValueError, match="tile_tokens must be 1 or more"):
        hetero.tile_embeddings(model, tile_tokens=0)
    shared = nn.ModuleDict({"e": nn.Embedding(200, 8), "user": nn.Module()})
    shared["user"].own = shared["e"].weight
    assert hetero.tile_embeddings(shared, 1) == {}, "somebody else has the weight whole"
    alone = nn.Sequential(nn.Embedding(200, 8), nn.Linear(8, 200), nn.Embedding(9, 8, max_norm=1.0))
    assert list(hetero.tile_embeddings(alone, 1)) == ["0"], "a layer that is no head stays"


def test_tiles_are_as_large_as_the_largest_other_parameter() -> None:
    torch.manual_seed(0)
    model = wide()
    hetero.tile_embeddings(model)
    largest = max(p.numel() for n, p in model.named_parameters() if "tiles" not in n)
    tiles = [p.numel() for n, p in model.named_parameters() if "tiles" in n]
    assert max(tiles) <= largest < 2 * max(tiles)
    assert not hetero.tile_embeddings(model)


# Under hetero

VOCABULARY, WIDTH, LENGTH = 4000, 64, 32


def wide() -> Any:
    """1 MB in fp32, and blocks' matrices of 64 KiB."""
    return tiny_gpt2(WIDTH, 2, LENGTH, VOCABULARY)


def trained(
    tiled: bool, dtype: str = "fp32", **options: Any
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses, gradients of the first step, and the closed engine."""
    torch.manual_seed(0)
    with hetero.ZeroInitContext(dtype=dtype, **options):
        model = wide()
        if tiled:
            hetero.tile_embeddings(model, tile_tokens=16)
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-3))
    losses, grads = [], []
    for number in range(2):
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCABULARY, (1, LENGTH), generator=draw)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.backward(loss)
        losses.append(loss.item())
        if not grads:
            embedding = [p for n, p in model.named_parameters() if "wte" in n]
            grads = [grad.clone() for grad in hetero.grads(embedding)]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.engine.close()
    return losses, grads, optimizer.engine


def test_the_sum_of_a_tied_gradient_has_the_bits_of_autograds() -> None:
    """In bf16 what is kept is rounded as autograd rounds: with and without early accumulation."""
    _, grads, _ = trained(True, dtype="bf16", placement_policy="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.tiling.cross_entropy.accumulate_now", lambda *_: False)
        _, joined, _ = trained(True, dtype="bf16", placement_policy="cpu")
    assert all(map(torch.equal, grads, joined))


def test_a_model_whose_embedding_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    """It is trained in less host memory than the embedding alone takes."""
    monkeypatch.setattr("hetero.setup.construction.BLOCK_BYTES", 1 << 16)  # it is a small one
    disk: dict[str, Any] = {"placement_policy": "nvme", "nvme_path": str(tmp_path)}
    embedding_bytes = VOCABULARY * WIDTH * 4
    budget = embedding_bytes * 3 // 4
    losses, _, engine = trained(True, **disk, host_memory=budget)
    assert engine.ledger.peak_bytes["host"] <= budget
    with pytest.raises(hetero.BudgetError):
        trained(False, **disk, host_memory=budget)
    assert losses == trained(True, placement_policy="cpu")[0]


@pytest.mark.parametrize("tied", [True, False])
def test_no_tensor_of_the_weights_size(tied: bool) -> None:
    """In forward and backward: neither whole logits nor a gradient, and of tiles one at a time."""
    torch.manual_seed(0)
    model = wide().bfloat16()
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    hetero.tile_embeddings(model, 256 * WIDTH, tile_tokens=1)
    for name, param in model.named_parameters():
        if "tiles" in name:  # kept elsewhere, as hetero does
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    tokens = torch.randint(0, VOCABULARY, (1, 8))
    with LiveBytes() as live:
        model(input_ids=tokens, labels=tokens).loss.backward()
    weight_bytes = VOCABULARY * WIDTH * 2
    assert live.largest < weight_bytes / 4
    assert live.peak < weight_bytes


@pytest.mark.parametrize("policy", ["cpu", "nvme"])
def test_backward_after_the_weight_changed_is_refused(policy: str, tmp_path: Path) -> None:
    """Also of logits that are needed whole, whose graph does not save the weight."""
    model: Any = pretrained.gpt2()
    hetero.tile_embeddings(model, 1)
    options: dict[str, Any] = {"placement_policy": policy, "dtype": "fp32"}
    if policy == "nvme":
        options |= {"nvme_path": str(tmp_path), "host_memory": "200KiB", "chunk_numel": 4096}
    optimizer = hetero.HybridAdam(model.parameters())
    model, optimizer = hetero.initialize(model, optimizer, **options)
    output = model(input_ids=TOKENS, labels=TOKENS)
    mean = model(input_ids=TOKENS).logits.float().logsumexp(-1).mean()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    for loss in (output.loss, mean):
        with pytest.raises(
            (hetero.StaleGraphError, RuntimeError), match="chang|modif|before an optimizer step"
        ):
            loss.backward()
    optimizer.engine.close()
