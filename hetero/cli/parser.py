"""How all commands take arguments: help that keeps examples as they are, and errors of one line."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterable
from typing import Any, NoReturn

from hetero.cli.extras import missing_extra
from hetero.cli.job_file import with_job_files

_EXAMPLES = "examples:\n"
_EXIT_CODE = 2  # EXIT_USAGE of hetero/cli/commands/outcome.py, and what argparse has for errors


def examples(*given: tuple[str, str]) -> str:
    """The end of a command's help, for `epilog`: command lines, and what each does."""
    width = max(len(line) for line, _ in given)
    aligned = width <= 40
    lines = [
        f"  {line.ljust(width)}  {what}" if aligned else f"  {line}\n      {what}"
        for line, what in given
    ]
    return _EXAMPLES + "\n".join(lines)


class HelpFormatter(argparse.HelpFormatter):
    """argparse's, but for examples, whose lines stay whole, and for commands, which are a list."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_EXAMPLES):
            return textwrap.indent(text, indent)
        return super()._fill_text(text, width, indent)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(super()._format_action, action._get_subactions()))
        return super()._format_action(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction) and action.default is False:
            return action.option_strings[0]  # --no-NAME changes nothing, unless a job file has NAME
        return super()._format_action_invocation(action)


class _HelpAll(argparse.Action):
    """Prints the help with the advanced options, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        parser.print_help_all()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser whose commands have parsers of its own class, and whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        # A prefix that is unique today is another option's, too, when one is added.
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **options})
        self._advanced: list[argparse.Action] = []
        self._takes_job_file = False

    def take_job_file(self) -> None:
        """Adds --config, and --help-all for the options that hide() was called with."""
        self.add_argument(
            "--help-all",
            action=_HelpAll,
            nargs=0,
            help="show all options, advanced ones too, and exit",
        )
        self.add_argument(
            "--config",
            dest="job_file",
            metavar="FILE",
            help="YAML or JSON file of options (max_steps: 20), or the folder of an earlier run;"
            " flags of the command line win",
        )
        self._takes_job_file = True

    def hide(self, action: argparse.Action) -> None:
        """Has only --help-all show an option."""
        self._advanced.append(action)

    def format_help(self) -> str:
        """The help without the options that are advanced."""
        helps = [action.help for action in self._advanced]
        for action in self._advanced:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in zip(self._advanced, helps, strict=True):
                action.help = text

    def print_help_all(self) -> None:
        """Prints the help with all options."""
        print(super().format_help(), end="")

    def error(self, message: str) -> NoReturn:
        """Exits, naming the choice that is nearest."""
        given = re.search(r"invalid choice: '?([\w.-]+)'?", message)
        known = re.findall(r"[\w.-]+", message.partition("choose from ")[2])
        self._exit(message, given[1] if given else "", known)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As error(), for options that there are not: none is left for anybody else."""
        if self._takes_job_file and args:
            try:
                args = with_job_files(self, args)
            except ModuleNotFoundError as error:
                self.exit(_EXIT_CODE, f"{self.prog}: error: {missing_extra(error) or error}\n")
            except ValueError as error:
                self.exit(_EXIT_CODE, f"{self.prog}: error: {error}\n")
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            given = unknown[0].partition("=")[0]
            options = self._option_string_actions.items()
            shown = [name for name, action in options if action.help != argparse.SUPPRESS]
            self._exit(f"there is no {given}", given, shown)
        return found, unknown

    def _exit(self, message: str, given: str, known: Iterable[str]) -> NoReturn:
        near = difflib.get_close_matches(given, list(known), n=1)
        hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help says what there is"
        self.exit(_EXIT_CODE, f"{self.prog}: error: {message}; {hint}\n")
