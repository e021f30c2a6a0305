"""The `hetero` command."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

import hetero
from hetero.cli.commands import COMMANDS
from hetero.cli.outcome import (
    EXIT_BROKEN_PIPE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    missing_extra,
    print_error,
)
from hetero.cli.parser import Parser, examples
from hetero.job.options import add_train_arguments
from offload.errors import HeteroError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; argparse exits by itself for unknown options."""
    for stream in (sys.stdout, sys.stderr):  # a name that their encoding has not ends no run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = make_parser().parse_args(argv)
    module, _, function = arguments.run.rpartition(".")
    try:
        code: int = getattr(importlib.import_module(module), function)(arguments)
        sys.stdout.flush()  # here, where a reader that has gone is no error
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (ValueError, HeteroError, OSError, MemoryError) as error:
        print_error(arguments.command, error)
    except Exception as error:
        missing = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
        if missing is None:
            told = RuntimeError(
                f"{type(error).__name__}: {error}; this was not foreseen, HETERO_DEBUG=1 shows"
                " where it came from"
            )
            told.__cause__ = error
            print_error(arguments.command, told)
            return EXIT_FAILED
        print_error(arguments.command, missing)
    return EXIT_USAGE


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="hetero",
        description="Trains PyTorch models whose state does not fit in memory, inside strict"
        " budgets: chunks of it move between device memory, RAM and NVMe.",
        epilog="`hetero COMMAND --help` has its options and examples. HETERO_DEBUG=1 shows errors'"
        " tracebacks. In a program of your own: hetero.initialize(model, optimizer).",
    )
    parser.add_argument("--version", action="version", version=f"hetero {hetero.__version__}")
    added = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    for command in COMMANDS:
        synopsis = command.synopsis and f"hetero {command.name} {command.synopsis}"
        one = added.add_parser(
            command.name,
            usage=synopsis,
            help=command.help,
            description=command.description,
            epilog=examples(command.examples),
        )
        if command.training is not None:
            one.take_job_file()
            add_train_arguments(one, options=command.training)
        for flags, about in command.options:
            one.add_argument(*flags, **about)
        one.set_defaults(run=command.run)
    return parser
