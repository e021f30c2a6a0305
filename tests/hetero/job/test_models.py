"""Models by name and from configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.job.models import (
    MODEL_NAMES,
    build_model,
    count_parameters,
    model_config,
    model_label,
    wanted_vocab_size,
)
from hetero.job.options import TrainOptions

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 16,
}


def write(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "model.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("name", "vocabulary", "params"),
    [
        ("gpt2", 50257, 124_439_808),
        ("opt-6.7b", None, 6.658e9),
        ("llama-3-8b", None, 8.03e9),
        ("llama-70b", None, 68.977e9),
    ],
)
def test_published_sizes(name: str, vocabulary: int | None, params: float) -> None:
    given = TrainOptions(model=name, vocab_size=wanted_vocab_size(name, vocabulary))
    close = 0 if vocabulary else 1e6
    assert count_parameters(model_config(given)) == pytest.approx(params, rel=0, abs=close)
    assert name in MODEL_NAMES


def test_default_model_has_300m_parameters_and_a_byte_vocabulary() -> None:
    config = model_config(TrainOptions())
    assert count_parameters(config) >= 300_000_000
    assert config.vocab_size == 256


@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if "gpt2" in name])
def test_names_build_without_dropout_and_with_enough_positions(name: str) -> None:
    config = model_config(TrainOptions(model=name, seq_len=2048))
    assert config.n_positions == 2048
    assert (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) == (0.0, 0.0, 0.0)


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown model 'gpt2-medum'; did you mean gpt2-medium"):
        model_config(TrainOptions(model="gpt2-medum"))
    with pytest.raises(ValueError, match=f"known: {MODEL_NAMES[0]}, gpt2"):
        model_config(TrainOptions(model="ЖЖЖ"))


def test_small_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="--vocab-size must be at least 256, got 255"):
        model_config(TrainOptions(vocab_size=255))


def test_file_of_another_family_keeps_its_vocabulary(tmp_path: Path) -> None:
    options = TrainOptions(model=write(tmp_path, TINY_LLAMA | {"dtype": "bfloat16"}), seq_len=32)
    config = model_config(options)
    assert model_label(options) == "model"
    assert config.vocab_size == 300
    assert config.max_position_embeddings == 32
    model = build_model(config)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config)
    assert model(input_ids=torch.zeros(1, 32, dtype=torch.long)).logits.shape == (1, 32, 300)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([], "must be a JSON object"),
        ({"hidden_size": 8}, 'must be an object with a "model_type"'),
        (TINY_LLAMA | {"model_type": "lama"}, "did you mean llama"),
        (TINY_LLAMA | {"vocab_size": 100}, "vocab_size must be at least 256, got 100"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config(TrainOptions(model=write(tmp_path, content)))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the model's configuration"):
        model_config(TrainOptions(model=str(tmp_path / "none.json")))
