"""`hetero finetune`."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from hetero.cli.commands.train import run_training
from hetero.cli.finetune.options import FinetuneOptions
from hetero.cli.parser import examples
from hetero.job.options import add_train_arguments

if TYPE_CHECKING:
    from hetero.cli.commands import Commands

# Of TrainOptions: the folder and the epochs say the first three, TRL does without the rest.
_UNASKED = {"config", "vocab_size", "steps", "save_model"}
_UNASKED |= {"commit_every", "discard_state", "timeline"}
_DEFAULTS = {"model": None, "seq_len": 512, "batch_size": 1, "lr": 1e-4, "weight_decay": 0.0}
_DEFAULTS["warmup"] = 0  # as TRL
_HELPS = {
    "model": "folder of a causal language model with its tokenizer, as save_pretrained() writes it",
    "data": "file (.json, .jsonl, .parquet, .txt) or folder of such: conversations, or texts",
    "seq_len": "tokens that a conversation is cut to, and that a packed sequence has",
    "dtype": "dtype of parameters and gradients: bf16 or fp32; the optimizer's master weights are"
    " fp32 in any case (default: bf16 where the hardware has it, else fp32)",
    "save_every": "steps between checkpoints, in the folder `checkpoints` of the run folder. The"
    " last step is saved, too, and SIGTERM saves and ends (default: none)",
    "resume": "continue from a checkpoint, or from the last one in a run folder, with any number of"
    " ranks and any memory; without PATH from the last of --run-dir or of the newest run, if any",
}


def add_command(commands: Commands) -> None:
    """Adds `finetune`."""
    command = commands.add_parser(
        "finetune",
        usage="hetero finetune --model DIR --data PATH --output DIR [OPTION ...]",
        help="fine-tune a Hugging Face model within budgets",
        description="Fine-tunes a causal language model from a local folder, whole or with a LoRA"
        " adapter, by TRL's SFTTrainer, and writes a folder that from_pretrained() reads."
        " Conversations are written by the tokenizer's chat template, and their answers alone are"
        " learned; texts are learned whole. All data are checked before training starts. Budgets"
        " are those of hetero train; under torchrun the ranks shard the model state.",
        epilog=examples(
            (
                "hetero finetune --model llama --data alpaca.jsonl --output tuned --lora-rank 16",
                "an adapter, learned from instructions",
            ),
            (
                "hetero finetune --model llama --data texts --output tuned --host-memory 8GiB",
                "the whole model, learned from a folder of texts, in 8 GiB of RAM",
            ),
            (
                "hetero finetune --model llama --data train.jsonl --eval-data test.jsonl --output"
                " tuned --eval-steps 50 --early-stopping-patience 3",
                "the model that does best on other records, evaluated every 50 steps",
            ),
        ),
    )
    names = {option.name for option in dataclasses.fields(FinetuneOptions)} - _UNASKED
    add_train_arguments(
        command, _DEFAULTS, {name: _HELPS.get(name) for name in names}, FinetuneOptions
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fine-tunes, exports, and prints a report."""
    options = FinetuneOptions.from_namespace(arguments)
    for name in ("model", "data", "output"):
        if not getattr(options, name):
            raise ValueError(f"--{name} is missing; `hetero finetune --help` says what it is")
    # Late, because these take seconds and belong to the extra `finetune`.
    import torch
    import trl  # noqa: F401 (or the error that it is missing)

    from hetero.cli.finetune.run import fine_tune

    # TRL gathers figures where it computes.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    return run_training("finetune", options, partial(fine_tune, options), backend)
