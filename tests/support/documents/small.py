"""Small models and data for the blocks of documents, in the place of the large ones they name."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import pytest
import torch
import transformers

VOCABULARY = 128
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}


def gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT2Config() gives a model of 30,000 parameters instead of 124 million."""
    torch.manual_seed(0)
    small = partialmethod(transformers.GPT2Config.__init__, **_SHAPE)
    monkeypatch.setattr(transformers.GPT2Config, "__init__", small)


def batches(count: int = 3) -> list[torch.Tensor]:
    """Token ids, each of shape [2, 16]."""
    return list(torch.randint(0, VOCABULARY, (count, 2, 16)))


def folder(path: str) -> None:
    """A folder of Hugging Face's at `path`, with such a model."""
    config = transformers.GPT2Config(**_SHAPE)
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
