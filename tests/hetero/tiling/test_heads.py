"""hetero/tiling/heads: a model's loss without whole logits; the model is the same otherwise."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetero
from hetero import TiledEmbedding, TiledHead
from hetero.tiling.heads import DeferredLogits
from tests.support.tiling.live_bytes import LiveBytes
from tests.support.tiling.tiled_models import TOKENS, joined, qwen2_plain, step
from tests.support.training.loops import tiny_gpt2
from tests.zoo import pretrained

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": pretrained.gpt2,
    "gpt2-checkpointed": pretrained.gpt2_checkpointed,
    "llama": pretrained.llama,
    "qwen2": qwen2_plain,
    "opt": pretrained.opt,
    "mixtral": pretrained.mixtral,
    "mamba": pretrained.mamba,
    "t5": pretrained.t5,
    "bert": pretrained.bert,
    "lora": pretrained.lora,
}
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


def heads(model: Any) -> Any:
    return hetero.tile_heads(model, tile_tokens=20)


def embeddings(model: Any) -> None:
    """Cuts embedding and head into parts, where they are plain ones."""
    made = hetero.tile_embeddings(model, 1, tile_tokens=20)
    assert model.get_output_embeddings() in made.values()
    assert isinstance(model.get_input_embeddings(), TiledEmbedding)
    assert isinstance(model.get_output_embeddings(), TiledHead)


@pytest.mark.parametrize(
    ("tile", "name"),
    [(heads, name) for name in MODELS]
    + [(embeddings, name) for name in ("gpt2", "qwen2", "t5", "bert")],
)
def test_the_loss_of_every_model_is_tiled(tile: Any, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    plain, plain_grads = step(model)
    handle = tile(model)
    output, grads = step(model)
    assert isinstance(output.logits, DeferredLogits)
    assert output.logits._source.whole is None
    assert torch.equal(output.loss, plain.loss)
    found = joined(grads)
    assert found.keys() == plain_grads.keys()
    largest = float(max(grad.abs().max() for grad in plain_grads.values()))
    for key, grad in found.items():
        torch.testing.assert_close(grad, plain_grads[key], rtol=1e-4, atol=1e-6 * largest)
    assert torch.equal(output.logits, plain.logits)
    if handle is not None:
        handle.remove()
        assert not isinstance(step(model)[0].logits, DeferredLogits)


def test_the_number_of_items_of_a_trainer() -> None:
    torch.manual_seed(0)
    model = pretrained.llama()
    plain, _ = step(model, num_items_in_batch=torch.tensor(7))
    with hetero.tile_heads(model, tile_tokens=20):
        output, _ = step(model, num_items_in_batch=torch.tensor(7))
    assert torch.equal(output.loss, plain.loss)


@pytest.mark.covering(1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("tile", "policy"), [(heads, "cpu"), (heads, "nvme"), (embeddings, "cpu")])
def test_the_whole_model_in_a_checkpoint(
    tile: Any, policy: str, reentrant: bool, tmp_path: Path
) -> None:
    """Embedding, head and loss are computed twice, and tied tiles accumulate inside of it."""

    def run(outer: bool) -> list[float]:
        torch.manual_seed(0)
        options: dict[str, Any] = {"placement_policy": policy, "dtype": "fp32"}
        if policy == "nvme":
            options |= {"nvme_path": str(tmp_path), "host_memory": "200KiB", "chunk_numel": 4096}
        with hetero.ZeroInitContext(**options):
            model: Any = pretrained.gpt2()
            tile(model)
        model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters(), lr=1e-2))
        losses = []
        for _ in range(3):
            torch.manual_seed(1)
            scale = torch.ones((), requires_grad=True)  # a reentrant one wants an input with grad

            def loss(scale: torch.Tensor) -> torch.Tensor:
                return model(input_ids=TOKENS, labels=TOKENS).loss * scale

            found = checkpoint(loss, scale, use_reentrant=reentrant) if outer else loss(scale)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(found.item())
        optimizer.engine.close()
        return losses

    assert run(True) == run(False)


def test_copies_are_plain_and_names_stay() -> None:
    model = pretrained.gpt2()
    names = list(model.state_dict())
    hetero.tile_heads(model)
    assert list(model.state_dict()) == names
    assert type(copy.deepcopy(model).get_output_embeddings()) is nn.Linear  # type: ignore[operator]
    assert type(copy.deepcopy(model).get_input_embeddings()) is nn.Embedding  # type: ignore[operator]


def test_threads_have_routes_of_their_own(tmp_path: Path) -> None:
    """Two forwards of one managed model at a time, between embedding and head."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"placement_policy": "nvme", "nvme_path": str(tmp_path)}
    with hetero.ZeroInitContext(**options, host_memory="400KiB", chunk_numel=4096, dtype="fp32"):
        model: Any = pretrained.gpt2().eval()
    hetero.tile_heads(model, tile_tokens=20)
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    both = threading.Barrier(2, timeout=60)

    def meet(*_: object) -> None:
        both.wait()

    model.transformer.ln_f.register_forward_hook(meet)
    losses: list[Any] = [None, None]

    def forward(index: int) -> None:
        losses[index] = model(input_ids=TOKENS.roll(index), labels=TOKENS.roll(index)).loss

    threads = [threading.Thread(target=forward, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sum(losses).backward()
    found = hetero.grads(model.parameters())
    plain = copy.deepcopy(model)
    plain.transformer.ln_f._forward_hooks.clear()
    for index in range(2):
        plain(input_ids=TOKENS.roll(index), labels=TOKENS.roll(index)).loss.backward()
    for one, param in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(one, param.grad, rtol=1e-4, atol=1e-6)
    optimizer.engine.close()


@pytest.mark.parametrize("tile", [heads, embeddings])
def test_generation_is_as_before(tile: Any) -> None:
    torch.manual_seed(0)
    model: Any = pretrained.gpt2().eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(TOKENS, **options)
    tile(model)
    assert torch.equal(model.generate(TOKENS, **options), plain)


def test_what_cannot_be_tiled_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no head that get_output_embeddings"):
        hetero.tile_heads(nn.Linear(2, 2))
    model: Any = pretrained.llama()
    with pytest.raises(ValueError, match="tile_tokens must be 1 or more"):
        hetero.tile_heads(model, tile_tokens=0)
    hetero.tile_heads(model)
    with pytest.raises(ValueError, match="a forward of its own"):
        hetero.tile_heads(model)
    model = pretrained.llama()
    nn.utils.parametrizations.orthogonal(model.lm_head)
    with pytest.raises(ValueError, match="forward of its own|is computed"):
        hetero.tile_heads(model)


def test_a_weight_that_is_untied_later_gets_its_own_gradient() -> None:
    torch.manual_seed(0)
    model: Any = pretrained.gpt2()
    hetero.tile_heads(model, tile_tokens=20)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    plain = copy.deepcopy(model)
    _, grads = step(model)
    _, expected = step(plain)
    for key in ("lm_head.weight", "transformer.wte.weight"):
        torch.testing.assert_close(grads[key], expected[key], rtol=1e-4, atol=1e-7)


# Memory

VOCABULARY, WIDTH, LENGTH, TILE = 4000, 32, 256, 16
LOGITS_BYTES = LENGTH * VOCABULARY * 4
WEIGHT_BYTES = VOCABULARY * WIDTH * 2  # in bf16


def wide() -> nn.Module:
    """A model that is nothing but its head, for its memory: 8,000 tokens would be less."""
    model = tiny_gpt2(WIDTH, 1, LENGTH, VOCABULARY)
    # RAM that is left goes to the first parameters: to one that nobody uses.
    children = dict(model._modules)
    model._modules.clear()
    model.ballast = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model._modules.update(children)
    return model


@pytest.mark.parametrize("policy", ["plain", "cpu", "nvme"])
def test_no_whole_logits_and_one_gradient_of_a_tied_weight(policy: str, tmp_path: Path) -> None:
    """Two micro-batches of a step; managed parameters may be absent."""
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    peaks = {}
    for tiled in (False, True):
        torch.manual_seed(0)
        model = wide().bfloat16()
        if tiled:
            hetero.tile_heads(model, tile_tokens=TILE)
        if policy != "plain":
            options: dict[str, Any] = {"placement_policy": "cpu"}
            if policy == "nvme":
                options = {
                    "placement_policy": "nvme",
                    "nvme_path": str(tmp_path),
                    "host_memory": "760KiB",
                    "chunk_numel": 16384,
                }
            optimizer = hetero.HybridAdam(model.parameters(), lr=1e-3)
            model, optimizer = hetero.initialize(model, optimizer, **options)
            if policy == "nvme":
                chunk = optimizer.engine.find(model.lm_head.weight).chunk  # type: ignore[union-attr]
                assert not optimizer.engine.params.is_resident(chunk)
        for _ in range(2):
            with LiveBytes() as live:
                model(input_ids=tokens, labels=tokens).loss.backward()
            peaks[tiled] = live
        if policy != "plain":
            optimizer.step()
            optimizer.engine.close()
    assert peaks[False].peak > 3 * LOGITS_BYTES
    assert peaks[True].largest < LOGITS_BYTES / 4
    # Tiles of fp32 twice, and one gradient of the weight; its rows, and what the block holds, are
    # less than another half. (A managed weight's memory is seen, too.)
    tile_bytes = TILE * VOCABULARY * 4
    seen = 0 if policy == "plain" else WEIGHT_BYTES
    assert peaks[True].peak < 3 * tile_bytes + 1.5 * WEIGHT_BYTES + seen + LOGITS_BYTES / 8


@pytest.mark.parametrize("policy", ["plain", "cpu", "nvme"])
def test_logits_that_nobody_needed_before_the_step_are_gone(policy: str, tmp_path: Path) -> None:
    """Those of the forward cannot be made of the new weight; what was needed before is kept."""
    torch.manual_seed(0)
    model = wide()
    hetero.tile_heads(model, tile_tokens=TILE)
    optimizer: Any = hetero.AdamW(model.parameters(), lr=1e-2)
    if policy == "plain":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        options = {"placement_policy": policy, "nvme_path": str(tmp_path), "dtype": "fp32"}
        model, optimizer = hetero.initialize(model, optimizer, **options)
    tokens = torch.arange(8).unsqueeze(0)
    for is_needed in (False, True):
        outputs = model(input_ids=tokens, labels=tokens)
        before = outputs.logits.sum().item() if is_needed else None
        outputs.loss.backward()
        doubled = outputs.logits * 2.0
        optimizer.step()
        if is_needed:
            assert (outputs.logits.sum().item(), doubled.sum().item()) == (before, 2 * before)
            continue
        with pytest.raises(hetero.StaleGraphError, match="before that"):
            outputs.logits.argmax(-1)
        with pytest.raises(hetero.StaleGraphError, match="before that"):
            doubled.tolist()
        with pytest.raises(hetero.StaleGraphError, match="before that"):
            nn.functional.cross_entropy(outputs.logits[0], tokens[0])
    if policy != "plain":
        optimizer.engine.close()


def test_a_dropped_model_is_gone() -> None:
    model = pretrained.gpt2()
    hetero.tile_heads(model)
    step(model)
    gone = weakref.ref(model.get_output_embeddings().weight)  # type: ignore[operator]
    del model
    gc.collect()
    assert gone() is None
