"""A tiny language model in a folder as Hugging Face's, and what a Trainer needs beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.late import late

hf = late("transformers")
VOCAB_SIZE = 64
ADAPTERS: dict[str, Any] = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}


class Sentences(torch.utils.data.Dataset[Any]):
    """Random tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCAB_SIZE, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def llama_folder(
    path: Path, vocab_size: int = VOCAB_SIZE, positions: int = 8, layers: int = 2
) -> Path:
    """Writes the folder of a model without dropout; returns it."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return _saved(hf.LlamaForCausalLM(config), path)


def gpt2_folder(path: Path) -> Path:
    """Writes the folder of a model with dropout; returns it."""
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=VOCAB_SIZE, n_positions=8, n_embd=32, n_layer=2, n_head=2)
    return _saved(hf.GPT2LMHeadModel(config), path)


def _saved(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def arguments(path: Path, kind: Any = None, **others: Any) -> Any:
    """Of a training of 6 steps that accumulates, clips, evaluates, saves and loads the best."""
    given = {
        "max_steps": 6,
        "save_steps": 2,
        "eval_steps": 2,
        "eval_strategy": "steps",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "load_best_model_at_end": True,
        "seed": 1,
    }
    kind = kind or hf.TrainingArguments
    return kind(output_dir=str(path), **{**given, **others})


def figures(trainer: Any, name: str) -> list[float]:
    """What was logged under a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def with_adapters(model: nn.Module, seed: int = 3) -> Any:
    """The model with LoRA on its attention."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **ADAPTERS)
    return get_peft_model(model, config)  # type: ignore[arg-type]
