"""hetero/cli/finetune/pretrained: what a folder's configuration and tokenizer allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3Config, Gemma3TextConfig, LlamaConfig

from tests.support.ecosystem.tiny_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, trained_tokenizer
from tests.support.late import late

data = late("hetero.cli.finetune.data")
read_folder = late("hetero.cli.finetune.pretrained:read_folder")

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


def folder_of(path: Path, config: Any, template: str | None = None, **changes: Any) -> Path:
    """Without weights."""
    config.save_pretrained(path)
    tokenizer = trained_tokenizer(template)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(path)
    return path


def test_templates(tmp_path: Path) -> None:
    """The tokenizer's own, a file's, the default, and the default where there is none."""
    own = folder_of(tmp_path / "own", LlamaConfig(**SIZES), CHAT_TEMPLATE)
    without = folder_of(tmp_path / "without", LlamaConfig(**SIZES))
    (tmp_path / "file.jinja").write_text("{{ messages }}")
    for folder, given, wanted in (
        (own, None, CHAT_TEMPLATE),
        (own, str(tmp_path / "file.jinja"), "{{ messages }}"),
        (own, "default", data.DEFAULT_TEMPLATE),
        (without, None, data.DEFAULT_TEMPLATE),
    ):
        assert read_folder(folder, given, 64)[1].chat_template == wanted


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
        text_config=Gemma3TextConfig(**SIZES, sliding_window=32).to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
    )
    folder = folder_of(tmp_path, config)
    read_folder(folder, None, 48)
    with pytest.raises(ValueError, match="more than the 64 positions"):
        read_folder(folder, None, 128)


def test_what_does_not_fit(tmp_path: Path) -> None:
    small = folder_of(tmp_path / "small", LlamaConfig(**{**SIZES, "vocab_size": 100}))
    with pytest.raises(ValueError, match=r"tokens, and the model 100; enlarge it with model\.re"):
        read_folder(small, None, 64)
    endless = folder_of(tmp_path / "endless", LlamaConfig(**SIZES), eos_token=None)
    with pytest.raises(ValueError, match="the tokenizer has no eos_token, by which an answer"):
        read_folder(endless, None, 64)


def test_a_slow_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        is_fast = False

    folder = folder_of(tmp_path, LlamaConfig(**SIZES))
    loads = "hetero.cli.finetune.pretrained.AutoTokenizer.from_pretrained"
    monkeypatch.setattr(loads, lambda *args, **options: Slow())
    with pytest.raises(ValueError, match="the tokenizer Slow does not say which characters"):
        read_folder(folder, None, 64)
