"""`hetero completion`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetero.cli.commands.outcome import EXIT_OK
from hetero.cli.parser import examples

if TYPE_CHECKING:
    from hetero.cli.commands import Commands

SHELLS = ("bash", "zsh", "fish")
_FILES, _FOLDERS = ("FILE", "PATH"), ("DIR",)


def add_command(commands: Commands) -> None:
    """Adds `completion`."""
    command = commands.add_parser(
        "completion",
        help="print a script by which a shell completes commands and options",
        description="Prints a script by which a shell completes commands, options, and names of"
        " files and folders. Start a new shell when it is installed. Needs the extra `completion`.",
        epilog=examples(
            (
                "hetero completion bash > ~/.local/share/bash-completion/completions/hetero",
                "for bash with the package bash-completion; the folder must be there",
            ),
            ("hetero completion zsh > ~/.zfunc/_hetero", "for zsh, if ~/.zfunc is in its fpath"),
            ("hetero completion fish > ~/.config/fish/completions/hetero.fish", "for fish"),
        ),
    )
    command.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the script of the whole command."""
    import shtab

    parser: argparse.ArgumentParser = arguments.whole_parser
    for action in _actions(parser):
        metavar = action.metavar or (action.dest.upper() if not action.option_strings else None)
        if metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif metavar in _FILES or metavar in ("SOURCE", "TARGET"):
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
