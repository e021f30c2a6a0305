"""The `hetero` command."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence

from hetero.training.options import TrainOptions, add_train_arguments
from offload.errors import HeteroError

# What the extra `train` brings.
TRAIN_EXTRAS = ("matplotlib", "rich", "transformers")

EXIT_OK = 0
EXIT_FAILED = 1  # the run failed after it had begun
EXIT_USAGE = 2  # what was asked for cannot work
EXIT_INTERRUPTED = 130  # as the shell reports a program ended by Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; argparse exits by itself for unknown options."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ValueError, HeteroError, OSError, MemoryError) as error:
        _print_error(arguments.command, error)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hetero",
        description="Trains models whose state is larger than memory, inside hard budgets.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "train",
        help="train a language model on text",
        description="Trains a byte-level language model; without options on Python's own source"
        " text, with the optimizer state on NVMe and little of it in RAM.",
    )
    add_train_arguments(command)
    command.set_defaults(run=_train)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    options = TrainOptions.from_namespace(arguments)
    # Late, because transformers and matplotlib take seconds and belong to the extra `train`.
    try:
        from hetero.training.figure import draw_figure
        from hetero.training.loop import train
        from hetero.training.progress import make_observer
        from hetero.training.ranks import joined_ranks
        from hetero.training.report import print_report
        from hetero.training.run_folder import RunFolder
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in TRAIN_EXTRAS:
            raise
        raise ValueError(f"{missing} is missing; install it: pip install 'hetero[train]'") from None

    # Under --json nothing else may reach stdout, whatever a library prints.
    with (
        contextlib.redirect_stdout(sys.stderr),
        joined_ranks() as ranks,
        RunFolder(options.run_dir, ranks) as folder,
    ):
        result = train(options, folder, make_observer(options.log_every, ranks), ranks)
        summary = result.as_dict()
        if result.steps and ranks.leads:
            folder.write_json("config.json", options.as_dict())
            folder.write_json("summary.json", summary)
            draw_figure(result, folder.figure_path)
    if result.failure is not None:
        _print_error("train", result.failure)
        return EXIT_FAILED
    if not ranks.leads:
        pass  # rank 0 speaks for all
    elif options.json:
        print(json.dumps(summary))
    elif result.steps:
        print_report(result)
    return EXIT_INTERRUPTED if result.status == "interrupted" else EXIT_OK


def _print_error(command: str, error: Exception) -> None:
    """One line, so that a log shows it whole; its origin too if HETERO_DEBUG is set."""
    if os.environ.get("HETERO_DEBUG"):
        traceback.print_exception(error)
    print(f"hetero {command}: error: {' '.join(str(error).split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
