"""What every benchmark's main() does alike: bad input is one line, --json exactly one object."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from offload.errors import HeteroError


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


def command_line(name: str, argv: Sequence[str] | None) -> str:
    """The command as one would type it; `name` is e.g. "bench.io"."""
    return shlex.join(["python", "-m", name, *(sys.argv[1:] if argv is None else argv)])


def names(text: str) -> list[str]:
    """The names of a comma-separated list, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
