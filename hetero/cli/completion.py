"""`hetero completion`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from hetero.cli.outcome import EXIT_OK

_FOLDERS, _FILES = ("DIR", "FOLDER"), ("FILE", "PATH", "SOURCE", "TARGET")


def run(arguments: argparse.Namespace) -> int:
    """Prints the script of the whole command."""
    parser: argparse.ArgumentParser = arguments.whole_parser
    for action in _actions(parser):
        metavar = action.metavar or (action.dest.upper() if not action.option_strings else None)
        if metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return EXIT_OK


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
