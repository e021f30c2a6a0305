"""The options of `hetero finetune`: those of `hetero train`, and what only fine-tuning has."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path

from hetero.cli.finetune.formats import FORMATS
from hetero.cli.job.options import GROUPS, TrainOptions, _option, add_train_arguments

GROUPS["output"] = ("fine-tuning", None)

# Of TrainOptions: not asked for, because the folder and the epochs say them.
_UNASKED = ("config", "vocab_size", "steps")
_HELPS = {
    "model": "folder of a causal language model with its tokenizer, as save_pretrained() writes it",
    "data": "file (.json, .jsonl, .txt) or folder of such: instructions with answers, or texts",
    "seq_len": "tokens that a conversation is cut to, and that a packed sequence has",
}
_DEFAULTS = {"model": None, "seq_len": 512, "batch_size": 1, "lr": 1e-4, "weight_decay": 0.0}


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainOptions):
    """The options of `hetero finetune`; raises ValueError for values that make no sense."""

    output: str = _option(
        "folder for the result, which AutoModelForCausalLM.from_pretrained() reads: the model, or"
        " the adapter; new or empty, and with --resume also an earlier result, which is replaced",
        "",
        metavar="DIR",
    )
    format: str = _option(
        "what a record of --data is: alpaca (instruction, input, output), sharegpt (conversations),"
        " messages (role, content), text, or auto, by its keys",
        FORMATS[0],
        choices=FORMATS,
    )
    chat_template: str | None = _option(
        "file with a Jinja chat template instead of the tokenizer's; or default, a plain one, which"
        " is also taken where the tokenizer has none",
        metavar="FILE",
    )
    packing: bool = _option(
        "put several conversations into one sequence, each of which sees itself alone, instead of"
        " padding each to the longest of its micro-batch",
        False,
    )
    epochs: float = _option("how often each record is seen", 1.0)
    max_steps: int | None = _option(
        "end after so many optimizer steps, however many epochs that is (default: --epochs)",
        least=1,
    )
    lora_rank: int = _option(
        "train a LoRA adapter of this rank beside the frozen model, on all its linear layers but"
        " the head; 0: train the whole model",
        0,
        least=0,
    )
    lora_alpha: int | None = _option(
        "the adapter's product counts by this over its rank (default: twice the rank)", least=1
    )
    lora_dropout: float = _option("dropout before the adapter, in [0, 1)", 0.0)
    merge: bool = _option(
        "write a whole model with the adapter added to its weights, instead of the adapter", False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("epochs", math.isfinite(self.epochs) and self.epochs > 0, "more than 0")
        self._require("lora_dropout", 0 <= self.lora_dropout < 1, "in [0, 1)")
        if self.lora_rank == 0 and (self.merge or self.lora_alpha or self.lora_dropout):
            raise ValueError(
                "--merge, --lora-alpha and --lora-dropout are about an adapter; give --lora-rank, "
                "such as 16, or leave them out"
            )
        if self.data is None:
            raise ValueError("--data is missing; give the file or folder to train on")
        self._check_output()

    @property
    def asked_steps(self) -> str:
        """As of TrainOptions."""
        if self.max_steps is not None:
            return f"--max-steps {self.max_steps}"
        return f"--epochs {self.epochs:g}, or give --max-steps"

    def _check_output(self) -> None:
        if not self.output:
            raise ValueError("--output is missing; give a new folder for the result")
        path = Path(self.output)
        try:
            if path.exists() and not path.is_dir():
                raise ValueError(f"--output {path} is a file; give a new folder")
            if path.is_dir() and os.path.isdir(self.model) and path.samefile(self.model):
                raise ValueError(
                    f"--output {path} is the folder of --model, which it would replace; give a new "
                    f"folder"
                )
            if path.is_dir() and any(path.iterdir()) and self.resume is None:
                raise ValueError(f"--output {path} is not empty; give a new folder, or --resume")
        except OSError as error:
            raise ValueError(
                f"--output {path} cannot be read: {error.strerror}; give a new folder"
            ) from error


def add_finetune_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of FinetuneOptions."""
    names = [option.name for option in dataclasses.fields(FinetuneOptions)]
    helps = {name: _HELPS.get(name) for name in names if name not in _UNASKED}
    add_train_arguments(parser, _DEFAULTS, helps, FinetuneOptions)
