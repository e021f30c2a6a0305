"""The parser of the command line, with job files (YAML or JSON) in place of flags, help that keeps
examples as they are, and errors of one line."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hetero.cli.outcome import EXIT_USAGE, missing_extra
from hetero.option_checks import options_from_file

_EXAMPLES = "examples:\n"
_RUN_MARK = "metrics.jsonl"  # of a run folder, whose config.json has more than options
_OF_ONE_RUN = ("run_dir", "resume")  # not taken from a run: the next one has its own


def examples(given: Sequence[tuple[str, str]]) -> str:
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
        self._takes_job_file = False

    def take_job_file(self) -> None:
        """Adds --config, and --help-all for the options that are advanced."""
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

    def format_help(self) -> str:
        """The help without the options that are advanced."""
        helps = [(each, each.help) for each in self._actions if getattr(each, "advanced", False)]
        for action, _ in helps:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in helps:
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
                self.exit(EXIT_USAGE, f"{self.prog}: error: {missing_extra(error) or error}\n")
            except ValueError as error:
                self.exit(EXIT_USAGE, f"{self.prog}: error: {error}\n")
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
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}; {hint}\n")


# Job files


def with_job_files(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments, after those of the files that --config names: what comes later counts.

    Raises ValueError for a file that cannot be read, or that has what is no option of `parser`.
    """
    found: list[str] = []
    for path in _named(arguments):
        for action, words in _options_in(parser, Path(path)):
            given = any(word.partition("=")[0] in action.option_strings for word in arguments)
            if not (given and isinstance(action, argparse._AppendAction)):
                found += words
    return [*found, *arguments]


def _named(arguments: Sequence[str]) -> Iterator[str]:
    for number, word in enumerate(arguments):
        if word.startswith("--config="):
            yield word.partition("=")[2]
        elif word == "--config" and number + 1 < len(arguments):
            yield arguments[number + 1]


def _options_in(
    parser: argparse.ArgumentParser, given: Path
) -> Iterator[tuple[argparse.Action, list[str]]]:
    """The options that a file or a run folder gives, and the words of a command line for each."""
    path = given / "config.json" if given.is_dir() else given
    content = _read(path)
    flags = parser._option_string_actions
    command = parser.prog.rpartition(" ")[2]
    if content.pop("command", command) != command and command != "plan":  # which plans any
        raise ValueError(f"{path} is not of {parser.prog}; give the file to the command it names")
    is_run = (path.parent / _RUN_MARK).is_file()
    # (Of several flags for one name the first, which the help shows.)
    by_name = {each.dest: each for each in reversed(parser._actions) if each.option_strings}
    for key, value in content.items():
        name = str(key).removeprefix("--").replace("-", "_")
        action = by_name.get(name) or flags.get("--" + name.replace("_", "-"))
        if action is None or action.dest in ("help", "help_all", "job_file"):
            if is_run:
                continue
            raise ValueError(f"{path}: there is no option {str(key)!r}{_nearest(parser, name)}")
        if value is not None and not (is_run and name in _OF_ONE_RUN):
            yield action, _words(f"{path}: {key}", action, value)


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        return options_from_file(path, "--config")
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read --config {path}: {reason}; give a YAML or JSON file") from (
            error
        )
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config {path} is not YAML: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must have options, such as `max_steps: 20`")
    return content


def _words(place: str, action: argparse.Action, value: object) -> list[str]:
    """The words of a command line that give `action` the value of a file."""
    shown = action.option_strings[0]
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise ValueError(f"{place} must be true or false, not {value!r}")
        off = "--no-" + shown.removeprefix("--")
        return [shown] if value else [off] if off in action.option_strings else []
    if value is True and action.nargs == "?":
        return [shown]
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
        raise ValueError(f"{place} takes one value, not a list")
    for each in values:
        if not isinstance(each, (str, int, float)) or isinstance(each, bool):
            raise ValueError(f"{place} takes a number or a text, not {each!r}")
        if each == "--":  # which a command line takes for the end of its options
            raise ValueError(f"{place} cannot be '--'; leave it out, or give a value")
    # One word, so that a value may begin with a dash.
    return [f"{shown}={each}" for each in values]


def _nearest(parser: argparse.ArgumentParser, name: str) -> str:
    known = [
        flag.removeprefix("--").replace("-", "_")
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--") and action.help is not argparse.SUPPRESS
    ]
    near = difflib.get_close_matches(name, known, n=1)
    if not near:
        return f"; {parser.prog} --help-all says what there is"
    return f"; did you mean {near[0]} (--{near[0].replace('_', '-')})?"
