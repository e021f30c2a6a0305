"""What every benchmark's main() does alike: bad input is one line, --json exactly one object."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from rich.console import Console

from bench.harness.machine import header, is_checkout
from offload.errors import HeteroError
from offload.memory.sizes import parse_bytes


def run_program(
    name: str,
    measure: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any], Console], None],
    as_json: bool,
) -> int:
    """Measures, then prints the result on stdout. Returns the exit code: 2 for bad input.

    `measure` reports progress on stderr; `show` prints the result for people.
    """
    try:
        result = measure()
    except KeyboardInterrupt:
        return 130
    except (ValueError, HeteroError, OSError, MemoryError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(result))
    else:
        show(result, wide_console())
    return 0


def wide_console() -> Console:
    """Where there is no terminal rich would squeeze tables into 80 columns."""
    return Console(width=None if sys.stdout.isatty() else 160)


def print_header(result: Mapping[str, Any], console: Console) -> None:
    """The machine and the command of a result."""
    text = header(result["machine"], result["command"])
    console.print(text, markup=False, highlight=False, soft_wrap=True)


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


def add_peer_arguments(
    parser: argparse._ActionsContainer, known: Sequence[str], default: str
) -> None:
    """--peers, which chosen_peers() reads, and --peer-python."""
    shown = "all, as far as they are installed" if default == ",".join(known) else default
    parser.add_argument(
        "--peers",
        default=default,
        metavar="LIST",
        help=f"of {', '.join(known)}; or none (default: {shown})",
    )
    parser.add_argument(
        "--peer-python",
        default=os.environ.get("BENCH_PEER_PYTHON", sys.executable),
        metavar="FILE",
        help="Python that has DeepSpeed (default: $BENCH_PEER_PYTHON, else this one)",
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def names(text: str) -> list[str]:
    """The names of a comma-separated list, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def chosen_peers(text: str, known: Sequence[str]) -> list[str]:
    """The peers that --peers asks for; "none" is no peer. Raises ValueError for an unknown one."""
    chosen = names(text)
    if chosen == ["none"]:
        return []
    for name in chosen:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, "none"), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}, none"
            raise ValueError(f"unknown peer {name!r} in --peers; {hint}")
    return chosen


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
