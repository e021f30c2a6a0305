"""`hetero finetune`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.cli.commands.train import run_training
from hetero.cli.finetune.options import FinetuneOptions, add_finetune_arguments
from hetero.cli.parser import examples

if TYPE_CHECKING:
    from hetero.cli.commands import Commands
    from hetero.cli.job.job import Task
    from hetero.cli.job.options import TrainOptions
    from hetero.cli.job.ranks import Ranks


def add_command(commands: Commands) -> None:
    """Adds `finetune`."""
    command = commands.add_parser(
        "finetune",
        usage="hetero finetune --model DIR --data PATH --output DIR [OPTION ...]",
        help="fine-tune a Hugging Face model within budgets",
        description="Fine-tunes a causal language model from a local folder, whole or with a LoRA"
        " adapter, and writes a folder that from_pretrained() reads. Conversations are written by"
        " the tokenizer's chat template, and their answers alone are learned; texts are learned"
        " whole, one after another. All data are checked before training starts. Budgets, run"
        " folder, checkpoints and --resume are those of hetero train; under torchrun the ranks"
        " shard the model state.",
        epilog=examples(
            (
                "hetero finetune --model llama --data alpaca.jsonl --output tuned --lora-rank 16",
                "an adapter, learned from instructions",
            ),
            (
                "hetero finetune --model llama --data texts --output tuned --host-memory 8GiB",
                "the whole model, learned from a folder of texts, in 8 GiB of RAM",
            ),
        ),
    )
    add_finetune_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fine-tunes, exports, and prints a report."""
    if arguments.model is None:
        raise ValueError("--model is missing; give the folder of a Hugging Face model")
    options = FinetuneOptions.from_namespace(arguments)
    # Late, because transformers takes seconds and belongs to the extra `train`.
    from hetero.cli.finetune.export import check_place
    from hetero.cli.finetune.task import FinetuneTask

    if options.lora_rank:
        import peft  # noqa: F401 (or the error that it is missing, before anything is read)

    def make_task(ranks: Ranks) -> tuple[TrainOptions, Task]:
        task = FinetuneTask(options, ranks)
        ranks.from_first(lambda: check_place(Path(options.output)))
        return task.with_steps(), task

    return run_training("finetune", options, make_task)
