"""What every benchmark is: options, a measurement, and its result as text or as one JSON object.

A program adds its options to an argparse parser; `measure` gets them read, and returns figures;
`show` turns these into blocks of text. Bad input is one line on stderr, and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.harness.machine import describe_machine, header, is_checkout
from offload.errors import HeteroError
from offload.memory.sizes import parse_bytes


class OptionError(Exception):
    """The options cannot be read; not a ValueError, which argparse would reword."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise OptionError(message.removeprefix("argument "))


class Program:
    """A benchmark that can be run; main() is its command."""

    def __init__(
        self,
        name: str,
        about: str | None,
        add_options: Callable[[argparse.ArgumentParser], object],
        measure: Callable[[argparse.Namespace], dict[str, Any]],
        show: Callable[[dict[str, Any]], Iterable[str]],
        exit_code: Callable[[dict[str, Any]], int] = lambda result: 0,
    ) -> None:
        """
        Args:
            name: of its module.
            about: the module's docstring, which is the help.
            add_options: adds those that it has beside --json.
            measure: makes the result; reports progress on stderr.
            show: makes the result's blocks of text, as tables.shown() does.
            exit_code: of a result.
        """
        self.name = name
        self._about = about
        self._add_options = add_options
        self._measure = measure
        self._show = show
        self._exit_code = exit_code

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The options, read. Raises OptionError."""
        parser = program_parser(self.name, self._about)
        self._add_options(parser)
        if "--json" not in parser._option_string_actions:
            text = "one JSON object instead of a table"
            parser.add_argument("--json", action="store_true", help=text)
        return parser.parse_args(argv)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Measures, and prints the result on stdout. Returns the exit code: 2 for bad input."""
        try:
            arguments = self.parse(argv)
            result = {
                **self._measure(arguments),
                "machine": describe_machine(),
                "command": command_line(self.name, argv),
            }
        except KeyboardInterrupt:
            return 130
        except (ValueError, HeteroError, OSError, MemoryError, OptionError) as error:
            print(f"{self.name}: error: {error}", file=sys.stderr)
            return 2
        print(json.dumps(result) if arguments.json else self.text(result))
        return self._exit_code(result)

    def text(self, result: dict[str, Any]) -> str:
        """The result for people, below what it was measured on."""
        return "\n".join([header(result["machine"], result["command"]), *self._show(result)])


def program_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the program's docstring, in the words of command_line()."""
    text = description or ""
    if not is_checkout():
        text = text.replace("python -m bench.", "hetero bench ")
    return _Parser(
        prog=" ".join(_words(name)),
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_options(parser: argparse._ActionsContainer, *table: tuple[str, Any, Any, str]) -> None:
    """Adds options from rows: name, how its text is read, default, and what it is.

    The reader is a function, or the names that can be chosen. A default is as one would type it,
    and shown by the help; None is none.
    """
    for name, read, default, about in table:
        how: dict[str, Any] = {"type": read} if callable(read) else {"choices": tuple(read)}
        metavar = name.removeprefix("--").upper() if callable(read) else None
        text = about if default is None else f"{about} (default: %(default)s)"
        parser.add_argument(name, default=default, metavar=metavar, help=text, **how)


def command_line(name: str, argv: Sequence[str] | None) -> str:
    """The command as one would type it; `name` is e.g. "bench.io"."""
    return shlex.join([*_words(name), *(sys.argv[1:] if argv is None else argv)])


def _words(name: str) -> list[str]:
    """How a benchmark is called where this is: `bench` can be imported in a checkout alone."""
    if is_checkout():
        return ["python", "-m", name]
    return ["hetero", "bench", name.removeprefix("bench.")]


def tell(text: str) -> None:
    """Progress of a program, on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


# Readers of options: each gets the text of one, and raises ArgumentTypeError.


def whole(least: int = 1) -> Callable[[str], int]:
    """Reads a whole number of `least` or more."""

    def read(text: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]+", text.strip()) is None:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {text}")
        return int(text)

    return read


def byte_size(text: str) -> int:
    """Reads bytes, such as "512MiB"."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def list_of(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Reads a comma-separated list of one at least."""

    def read_all(text: str) -> list[Any]:
        found = [read(each) for each in map(str.strip, text.split(",")) if each]
        if not found:
            raise argparse.ArgumentTypeError("must name one at least")
        return found

    return read_all


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Reads a list of some of these names; "none" is no name."""

    def read(text: str) -> str:
        if text not in known and text != "none":
            words = ", ".join(known)
            raise argparse.ArgumentTypeError(f"unknown name {text!r}; known: {words}, none")
        return text

    return lambda text: [name for name in list_of(read)(text) if name != "none"]


def left_out(failed: Mapping[str, str]) -> list[str]:
    """A line for each contender that was left out, and why."""
    return [f"{name}: left out: {reason}" for name, reason in failed.items()]
