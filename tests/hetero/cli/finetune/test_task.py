"""hetero/cli/finetune/task: what a model's configuration allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from hetero.cli.finetune.options import FinetuneOptions
from hetero.cli.finetune.task import FinetuneTask
from hetero.cli.job.ranks import ALONE
from tests.support.ecosystem.tiny_tokenizer import VOCAB_SIZE, trained_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
WINDOW = {**SIZES, "sliding_window": 32}


def task_of(config: PreTrainedConfig, folder: Path, **options: Any) -> FinetuneTask:
    """On one record, of a folder without weights."""
    config.save_pretrained(folder)
    trained_tokenizer().save_pretrained(folder)
    data = folder / "data.jsonl"
    data.write_text(json.dumps({"instruction": "What?", "output": "It."}))
    given = {"model": str(folder), "data": str(data), "output": str(folder / "out"), **options}
    return FinetuneTask(FinetuneOptions(**given), ALONE)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MistralConfig(**WINDOW), "sees 32 tokens at a time, fewer than --seq-len 48"),
        (Gemma3TextConfig(**WINDOW), r"has layers of other kinds \(sliding_attention\)"),
        (
            LlamaConfig(**SIZES, layer_types=["linear_attention", "full_attention"]),
            r"has layers of other kinds \(linear_attention\)",
        ),
    ],
)
def test_layers_that_see_less_are_not_packed(
    config: PreTrainedConfig, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        task_of(config, tmp_path, packing=True, seq_len=48)
    task_of(config, tmp_path, seq_len=48)


@pytest.mark.parametrize(
    ("config", "seq_len"),
    [
        (MistralConfig(**WINDOW), 32),
        (MistralConfig(**{**WINDOW, "sliding_window": None}), 48),
        (Qwen2Config(**WINDOW, use_sliding_window=False), 48),
    ],
)
def test_layers_that_see_all_are_packed(
    config: PreTrainedConfig, seq_len: int, tmp_path: Path
) -> None:
    assert task_of(config, tmp_path, packing=True, seq_len=seq_len).data.rows


def test_a_model_of_images_and_text(tmp_path: Path) -> None:
    """Sizes are those of its part for text."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**WINDOW).to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
    )
    task = task_of(config, tmp_path, seq_len=48)
    assert task.vocab_size == VOCAB_SIZE
    model: Any = task.shape()
    assert model.config.get_text_config().use_cache is False
    task.restore_cache(model)
    assert model.config.get_text_config().use_cache is True
    with pytest.raises(ValueError, match="more than the 64 positions"):
        task_of(config, tmp_path, seq_len=128)
