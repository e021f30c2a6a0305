"""`hetero convert`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from hetero.cli.commands.outcome import EXIT_OK
from hetero.cli.parser import examples

if TYPE_CHECKING:
    from hetero.cli.commands import Commands


def add_command(commands: Commands) -> None:
    """Adds `convert`."""
    command = commands.add_parser(
        "convert",
        help="write a checkpoint in another format",
        description="Writes a checkpoint in another format, without a model and without holding"
        " more than a tensor. Read are hetero's checkpoints and commits, folders of Hugging"
        " Face's and .safetensors files, those of torch.distributed.checkpoint (DCP), and"
        " DeepSpeed's universal format. Between hetero and DCP optimizer states and options"
        " go along; to Hugging Face's go parameters and buffers.",
        epilog=examples(
            (
                "hetero convert runs/first exported --to hf --model-config config.json",
                "for transformers' from_pretrained()",
            ),
            ("hetero convert runs/first resharded --to dcp", "for torch.distributed.checkpoint"),
            ("hetero convert universal-folder imported --to hetero", "of DeepSpeed's, to go on"),
        ),
    )
    command.add_argument("source", help="the checkpoint, as `hetero inspect` takes it")
    command.add_argument("target", help="the new folder, which must not be there yet")
    command.add_argument(
        "--to",
        required=True,
        choices=("hetero", "hf", "dcp"),
        help="the format: hetero, hf (Hugging Face), or dcp (torch.distributed.checkpoint)",
    )
    command.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of parameters (default: as they are stored; masters are fp32); with --to hetero,"
        " of those that are not trained",
    )
    command.add_argument(  # the name of 0.1
        "--config", dest="config", help=argparse.SUPPRESS, default=argparse.SUPPRESS
    )
    command.add_argument(
        "--model-config",
        dest="config",
        metavar="PATH",
        help="with --to hf: a config.json, or a folder that has one, which is copied",
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Converts, and says what was written."""
    # Late, because other commands need none of it.
    from hetero.checkpoint.formats.conversion import convert
    from hetero.cli.stored import open_left

    stored = convert(
        arguments.source,
        arguments.target,
        arguments.to,
        arguments.dtype,
        arguments.config,
        open_left,
    )
    for note in stored.notes:
        print(f"hetero convert: {note}", file=sys.stderr)
    for what, left_out in _left_out(
        arguments.to, stored.manifest.optimizers, stored.manifest.ranks
    ):
        if left_out:
            print(f"hetero convert: {what} are not in {arguments.target}", file=sys.stderr)
    count = len(stored.manifest.params) + len(stored.manifest.buffers)
    print(f"{count} tensors of the {stored.kind} {stored.path} are in {arguments.target}")
    return EXIT_OK


def _left_out(to: str, optimizers: object, ranks: object) -> list[tuple[str, object]]:
    return [
        ("optimizer states", optimizers if to == "hf" else None),
        ("random numbers and extra", ranks),
    ]
