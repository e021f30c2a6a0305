"""Small models of Hugging Face that tests save as several files and load again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

TOKENS: dict[str, Any] = {
    "vocab_size": 301,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SHAPE: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 32,
}


def gpt2(layers: int) -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(**TOKENS, n_embd=64, n_layer=layers, n_head=2, n_positions=32)
    )


def llama(layers: int) -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **SHAPE, num_hidden_layers=layers, num_key_value_heads=1, tie_word_embeddings=False
        )
    )


def bert(layers: int) -> hf.PreTrainedModel:
    return hf.BertForMaskedLM(hf.BertConfig(**SHAPE, num_hidden_layers=layers))


def mixtral(layers: int) -> hf.PreTrainedModel:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            **SHAPE,
            num_hidden_layers=layers,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


@dataclass(frozen=True)
class Family:
    """How a folder is made, and which class loads it."""

    make: Callable[[int], hf.PreTrainedModel]  # of so many layers
    loader: Any
    host_memory: str  # less than the parameters of 4 layers take

    def save(self, folder: Path, layers: int = 4) -> None:
        """Saves random weights as several files."""
        torch.manual_seed(7)
        self.make(layers).save_pretrained(folder, max_shard_size="200KB")
        assert len(list(folder.glob("*.safetensors"))) > 1

    def load(self, folder: Path, seed: int = 1, **options: Any) -> nn.Module:
        """The model in that folder; what is not in the folder is drawn from `seed`."""
        torch.manual_seed(seed)
        model: nn.Module = self.loader.from_pretrained(folder, **options)
        return model


FAMILIES = {
    "gpt2-tied": Family(gpt2, hf.AutoModelForCausalLM, "700KiB"),
    "llama-untied": Family(llama, hf.AutoModelForCausalLM, "500KiB"),
    "bert-new-head": Family(bert, hf.AutoModelForSequenceClassification, "500KiB"),
    "mixtral-fused": Family(mixtral, hf.AutoModelForCausalLM, "1500KiB"),
}


def batches() -> list[torch.Tensor]:
    """Two batches of tokens."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, TOKENS["vocab_size"], (2, 12), generator=generator) for _ in range(2)]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of a model in one of FAMILIES."""
    labels = tokens[:, 0] % 2 if "Classification" in type(model).__name__ else tokens
    loss: torch.Tensor = model(input_ids=tokens, labels=labels).loss
    return loss
