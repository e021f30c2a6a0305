"""Tiny models and training loops that tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

import hetero

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

VOCABULARY = 301
# The configuration of a language model, for `hetero train --config`.
SMALLEST_MODEL = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 32,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 16,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}


def tiny_gpt2(
    n_embd: int = 64, n_layer: int = 3, n_positions: int = 32, vocab_size: int = VOCABULARY
) -> GPT2LMHeadModel:
    """A GPT-2, of about 0.2 M parameters unless another size is given, tied, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel  # tests of a GPU do without

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=n_embd,
            n_layer=n_layer,
            n_head=2,
            n_positions=n_positions,
            vocab_size=vocab_size,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def batches(count: int, seed: int = 1) -> list[torch.Tensor]:
    """Token batches of shape (2, 32)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (2, 32), generator=generator) for _ in range(count)]


@dataclass
class Run:
    """What a training run gave, to be compared bit for bit."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: list[torch.Tensor] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)

    def same_bits(self, other: Run) -> bool:
        """Whether losses, norms and weights are identical."""
        return (
            self.losses == other.losses
            and self.norms == other.norms
            and same(self.masters, other.masters)
            and same(self.params, other.params)
        )


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether there are as many tensors, and all have the same bits."""
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def build(
    make: Callable[[], torch.nn.Module] = tiny_gpt2,
    config: hetero.Config | None = None,
    lr: float = 1e-2,
    **options: object,
) -> tuple[torch.nn.Module, hetero.HybridAdam]:
    """A model under seed 0 and its optimizer, initialized."""
    torch.manual_seed(0)
    with hetero.ZeroInitContext(config, **options):
        model = make()
    optimizer = hetero.HybridAdam(model.parameters(), lr=lr, weight_decay=0.1)
    return hetero.initialize(model, optimizer)


def train(
    model: torch.nn.Module,
    optimizer: hetero.HybridAdam,
    data: Sequence[torch.Tensor],
    accumulate: int = 1,
    clip: float | None = None,
) -> Run:
    """Trains on `data`, `accumulate` micro-batches a step, and closes the engine."""
    run = Run()
    for first in range(0, len(data), accumulate):
        for tokens in data[first : first + accumulate]:
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.backward(loss / accumulate)
            run.losses.append(loss.item())
        if clip is not None:
            run.norms.append(hetero.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    params = list(model.parameters())
    run.masters = hetero.masters(params)
    for param in params:
        with hetero.gathered(param):
            run.params.append(param.detach().clone())
    optimizer.engine.close()
    return run
