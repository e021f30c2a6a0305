"""The `hetero` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hetero.cli.commands import convert, generate, inspect, plan, profile, train
from hetero.cli.commands.outcome import EXIT_INTERRUPTED, EXIT_USAGE, missing_extra, print_error
from offload.errors import HeteroError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; argparse exits by itself for unknown options."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        print_error(arguments.command, missing)
    except (ValueError, HeteroError, OSError, MemoryError) as error:
        print_error(arguments.command, error)
    return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hetero",
        description="Trains PyTorch models whose state does not fit in memory, inside strict"
        " budgets: chunks of it move between device memory, RAM and NVMe.",
        epilog="Options of a command: hetero COMMAND --help. In a program of your own:"
        " hetero.initialize(model, optimizer).",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (train, generate, profile, plan, inspect, convert):
        command.add_command(commands)
    return parser
