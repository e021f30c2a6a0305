"""The `hetero` command."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

import hetero
from hetero.cli import commands
from hetero.cli.commands.outcome import (
    EXIT_BROKEN_PIPE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    print_error,
)
from hetero.cli.extras import missing_extra
from hetero.cli.parser import Parser
from offload.errors import HeteroError

# How the help lists them; others follow in the order of their names.
_ORDER = ("train", "finetune", "generate", "plan", "profile", "doctor", "inspect", "convert")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; argparse exits by itself for unknown options."""
    arguments = make_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where a reader that has gone is no error
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            return _unexpected(arguments.command, error)
        print_error(arguments.command, missing)
    except (ValueError, HeteroError, OSError, MemoryError) as error:
        print_error(arguments.command, error)
    except Exception as error:
        return _unexpected(arguments.command, error)
    return EXIT_USAGE


def make_parser() -> Parser:
    """The parser of all commands: the modules of hetero.cli.commands that have an add_command()."""
    parser = Parser(
        prog="hetero",
        description="Trains PyTorch models whose state does not fit in memory, inside strict"
        " budgets: chunks of it move between device memory, RAM and NVMe.",
        epilog="`hetero COMMAND --help` has its options and examples. HETERO_DEBUG=1 shows errors'"
        " tracebacks. In a program of your own: hetero.initialize(model, optimizer).",
    )
    parser.add_argument("--version", action="version", version=f"hetero {hetero.__version__}")
    parser.set_defaults(whole_parser=parser)
    added = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    for name in sorted(names, key=lambda name: (_rank(name), name)):
        module = importlib.import_module(f"{commands.__name__}.{name}")
        if hasattr(module, "add_command"):
            module.add_command(added)
    return parser


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _unexpected(command: str, error: Exception) -> int:
    """For what no command foresees."""
    told = RuntimeError(
        f"{type(error).__name__}: {error}; this was not foreseen, HETERO_DEBUG=1 shows where it"
        " came from"
    )
    told.__cause__ = error
    print_error(command, told)
    return EXIT_FAILED
