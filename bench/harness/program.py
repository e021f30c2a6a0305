"""What every benchmark is: options, a measurement, and its result as text or as one JSON object.

A program declares its options, each with a Kind that reads its text; `measure` gets them read, and
returns figures; `show` turns these into blocks of text. Bad input is one line on stderr, and exit
code 2.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bench.harness.machine import describe_machine, header, is_checkout
from offload.errors import HeteroError
from offload.memory.sizes import parse_bytes


class OptionError(Exception):
    """An option has a text that it cannot have; not a ValueError, which argparse would reword."""


@dataclass(frozen=True)
class Kind:
    """What an option takes: `read` gets its name and its text, and raises ValueError."""

    metavar: str
    read: Callable[[str, str], Any]


@dataclass(frozen=True)
class Option:
    """An option of a program.

    Attributes:
        name: with its dashes.
        default: as one would type it; False: a flag; None: nothing.
        help: what it is; the default is added.
        kind: how it is read.
    """

    name: str
    default: str | bool | None
    help: str
    kind: Kind

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Makes it an option of `parser`."""
        if self.default is False:
            parser.add_argument(self.name, action="store_true", help=self.help)
            return

        def read(text: str) -> Any:
            try:
                return self.kind.read(self.name, text)
            except ValueError as error:
                raise OptionError(str(error)) from None

        said = self.help if self.default is None else f"{self.help} (default: %(default)s)"
        parser.add_argument(
            self.name,
            type=read,
            default=self.default,
            metavar=self.kind.metavar,
            help=said,
        )


def options(text: str, **known: Kind | Iterable[str]) -> tuple[Option, ...]:
    """Options from a table: a line each, of name, kind, default and what it is.

    Between them are two spaces or more; a line that has no name goes on with the one before.

    Args:
        text: the table. A kind is one of KINDS; a default of "-" is none.
        known: the kinds of options that have one of their own, or the names that those of the kinds
            NAME, NAMES and PEERS take, by the option's name.
    """
    lines: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if re.match(r"--[\w-]+ {2,}", line):
            lines.append(line)
        else:
            lines[-1] += f" {line}"
    made = []
    for line in lines:
        name, word, default, about = re.split(r" {2,}", line, maxsplit=3)
        own = known.get(name.removeprefix("--").replace("-", "_"))
        kind = KINDS.get(word, TEXT)
        if isinstance(own, Kind):
            kind = own
        elif own is not None:
            kind = NAMED_KINDS[word](own)
        value = None if default == "-" else default
        made.append(Option(name, False if word == "FLAG" else value, about, kind))
    return tuple(made)


class Program:
    """A benchmark that can be run; main() is its command."""

    def __init__(
        self,
        name: str,
        about: str | None,
        options: Sequence[Option],
        measure: Callable[[argparse.Namespace], dict[str, Any]],
        show: Callable[[dict[str, Any]], Iterable[str]],
        add: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
        exit_code: Callable[[dict[str, Any]], int] = lambda result: 0,
    ) -> None:
        """
        Args:
            name: of its module.
            about: the module's docstring, which is the help.
            options: beside --json, which every program has.
            measure: makes the result; reports progress on stderr.
            show: makes the result's blocks of text, as tables.shown() does.
            add: adds options that are no Option.
            exit_code: of a result.
        """
        self.name = name
        self._about = about
        self._options = options
        self._measure = measure
        self._show = show
        self._add = add
        self._exit_code = exit_code

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The options, read. Raises OptionError."""
        parser = program_parser(self.name, self._about)
        self._add(parser)
        group = parser.add_argument_group("benchmark")
        for option in self._options:
            option.add_to(group)
        if "--json" not in parser._option_string_actions:
            parser.add_argument(
                "--json", action="store_true", help="one JSON object instead of a table"
            )
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
    return argparse.ArgumentParser(
        prog=" ".join(_words(name)),
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def command_line(name: str, argv: Sequence[str] | None) -> str:
    """The command as one would type it; `name` is e.g. "bench.io"."""
    return shlex.join([*_words(name), *(sys.argv[1:] if argv is None else argv)])


def _words(name: str) -> list[str]:
    """How a benchmark is called where this is: `bench` can be imported in a checkout alone."""
    if is_checkout():
        return ["python", "-m", name]
    return ["hetero", "bench", name.removeprefix("bench.")]


def names(text: str) -> list[str]:
    """The names of a comma-separated list, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


_COUNT_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
}
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([kmg]i?)?", re.IGNORECASE)


def parse_count(option: str, text: str) -> int:
    """A number of elements such as "500e6", "64Mi" (binary) or "64M" (decimal).

    Raises ValueError, naming the option, for anything else, for 0 and for parts of an element.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{option}: cannot read {text!r} as a count; write e.g. 500e6 or 64Mi")
    count = Fraction(match[1]) * _COUNT_UNITS[(match[2] or "").lower()]
    if count < 1 or count.denominator != 1:
        raise ValueError(f"{option} must be a whole number of 1 or more, got {text!r}")
    return int(count)


def parse_size(option: str, text: str) -> int:
    """Bytes, from text such as "512MiB". Raises ValueError, naming the option, if it is none."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def whole(least: int = 1) -> Kind:
    """A whole number of `least` or more."""

    def read(option: str, text: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]+", text.strip()) is None:
            raise ValueError(f"{option} must be a whole number, got {text!r}")
        if int(text) < least:
            raise ValueError(f"{option} must be {least} or more, got {text}")
        return int(text)

    return Kind("N", read)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} must be a number, got {text!r}") from None


def one_of(known: Iterable[str]) -> Kind:
    """One of these names."""

    def read(option: str, text: str) -> str:
        if text in known:
            return text
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"unknown name {text!r} in {option}; {hint}")

    return Kind("NAME", read)


def list_of(kind: Kind) -> Kind:
    """A comma-separated list of one at least."""

    def read(option: str, text: str) -> list[Any]:
        found = [kind.read(option, each) for each in names(text)]
        if not found:
            raise ValueError(f"{option} must name one at least")
        return found

    return Kind("LIST", read)


def some_of(known: Iterable[str]) -> Kind:
    """A list of some of these names, one at least."""
    return list_of(one_of(known))


def peers_of(known: Sequence[str]) -> Kind:
    """A list of some of the peers `known`; "none" is no peer."""
    some = some_of((*known, "none"))

    def read(option: str, text: str) -> list[str]:
        found: list[str] = some.read(option, text)
        return [name for name in found if name != "none"]

    return Kind("LIST", read)


TEXT = Kind("TEXT", lambda option, text: text)
SIZE = Kind("SIZE", parse_size)
SECONDS = Kind("SECONDS", _number)
MINUTES = Kind("MINUTES", _number)
KINDS = {
    "TEXT": TEXT,
    "FLAG": TEXT,
    "FILE": Kind("FILE", TEXT.read),
    "DIR": Kind("DIR", TEXT.read),
    "COUNT": Kind("N", parse_count),
    "SIZE": SIZE,
    "SIZES": list_of(SIZE),
    "SECONDS": SECONDS,
    "MINUTES": MINUTES,
    "N": whole(),
    "N>=0": whole(0),
    "N>=2": whole(2),
    "NUMBERS": list_of(whole()),
}
NAMED_KINDS: dict[str, Callable[[Any], Kind]] = {
    "NAME": one_of,
    "NAMES": some_of,
    "PEERS": peers_of,
}


def peer_python() -> tuple[Option]:
    """--peer-python."""
    python = os.environ.get("BENCH_PEER_PYTHON", sys.executable)
    return (Option("--peer-python", python, "Python that has DeepSpeed", KINDS["FILE"]),)


def peer_options(known: Sequence[str], default: str | None = None) -> tuple[Option, ...]:
    """--peers, by default all of them as far as they are installed, and --peer-python."""
    about, default = f"of {', '.join(known)}; or none", default or ",".join(known)
    return Option("--peers", default, about, peers_of(known)), *peer_python()


def left_out(failed: Mapping[str, str]) -> list[str]:
    """A line for each contender that was left out, and why."""
    return [f"{name}: left out: {reason}" for name, reason in failed.items()]
