"""Models of Hugging Face's in folders: what training needs of one, and the model in its budgets."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hetero.cli.finetune.data import DEFAULT_TEMPLATE
from hetero.job.options import FinetuneOptions

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ADVICE = "put tokenizer.json and tokenizer_config.json into the folder"


def read_folder(folder: Path, chat_template: str | None, seq_len: int) -> tuple[Any, Any]:
    """The configuration and the tokenizer. Raises ValueError if one is missing or unfit.

    Args:
        folder: as save_pretrained() writes it.
        chat_template: a file with one; "default": DEFAULT_TEMPLATE; None: the tokenizer's own, or
            the default where it has none.
        seq_len: so many positions the model must have.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"--model {folder} has no config.json; give the folder of a model as save_pretrained() "
            f"writes it (a model of the hub is downloaded by `hf download NAME --local-dir DIR`)"
        )
    # Without any of these some versions make an empty tokenizer of the model's kind.
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"--model {folder} has no tokenizer; {_ADVICE}")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--model {folder}: config.json or the tokenizer cannot be loaded ({reason}); {_ADVICE}"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"--model {folder}: the tokenizer {type(tokenizer).__name__} does not say which "
            f"characters a token stands for, so that answers cannot be found in it; save a fast "
            f"one (tokenizer.json) in the folder"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"--model {folder}: the tokenizer has no eos_token, by which an answer ends; name one "
            f'in its tokenizer_config.json ("eos_token")'
        )
    # (A model of images and text has these in a part of its configuration.)
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if len(tokenizer) > text.vocab_size:
        raise ValueError(
            f"--model {folder}: the tokenizer has {len(tokenizer)} tokens, and the model "
            f"{text.vocab_size}; enlarge it with model.resize_token_embeddings(), and save it"
        )
    if positions is not None and positions < seq_len:
        raise ValueError(
            f"--seq-len {seq_len} is more than the {positions} positions of the model in {folder}; "
            f"give --seq-len {positions} or less"
        )
    if chat_template not in (None, "default"):
        tokenizer.chat_template = _read(Path(chat_template))
    elif chat_template == "default" or tokenizer.chat_template is None:
        tokenizer.chat_template = DEFAULT_TEMPLATE
    return config, tokenizer


def _read(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot read --chat-template {template}: {error.strerror}; give a file, or 'default'"
        ) from error


class FolderModel:
    """The model in the folder of --model, with an adapter if one is asked for; a ModelSource.

    Attributes:
        label: the folder's name.
        vocab_size: of the model.
        tokenizer: of the folder; its chat template is the one in use.
    """

    def __init__(self, options: FinetuneOptions) -> None:
        """Reads all but the weights. Raises ValueError if the folder or the options are unfit."""
        self._options = options
        self._config, self.tokenizer = read_folder(
            Path(options.model), options.chat_template, options.seq_len
        )
        self.label = Path(options.model).resolve().name
        self.vocab_size: int = self._config.get_text_config().vocab_size

    def shape(self) -> torch.nn.Module:
        """As of ModelSource. Raises ValueError if the model cannot be packed."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(self._config))
        takes = inspect.signature(model.forward).parameters
        if self._options.packing and "position_ids" not in takes:
            raise ValueError(
                f"--packing needs a model that is told positions, and the "
                f"{model.config.model_type} in {self._options.model} is not; leave --packing out"
            )
        with torch.device("meta"):
            return self._adapted(model)

    def build(self) -> torch.nn.Module:
        """As of ModelSource. Raises ValueError if the folder has no weights that fit."""
        # As a whole path: the configuration, and an adapter's, name the folder by it.
        folder = str(Path(self._options.model).resolve())
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"--model {folder}: no weights to load: {error}") from error
        return self._adapted(model)

    def _adapted(self, model: Any) -> torch.nn.Module:
        options = self._options
        if options.lora_rank:
            names = options.lora_target_modules
            adapter = LoraConfig(
                r=options.lora_rank,
                lora_alpha=options.lora_alpha or 2 * options.lora_rank,
                lora_dropout=options.lora_dropout,
                target_modules=names.split(",") if names else "all-linear",
                task_type="CAUSAL_LM",
            )
            model = get_peft_model(model, adapter)
        trained: torch.nn.Module = model.train()
        return trained
