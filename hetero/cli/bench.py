"""`hetero bench`: the programs of bench/, where they are not in the folder that one is in.

A wheel has bench/ as hetero/benchmarks/bench: no folder that Python looks in, so that no other
project's `bench` is hidden, until this command puts it there for its own process.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import hetero
from hetero.cli.outcome import EXIT_OK
from hetero.text_table import columns, terminal_width


class Benchmark(NamedTuple):
    """The module whose main() runs it, and a line that says what it measures."""

    module: str
    summary: str


def run(arguments: argparse.Namespace) -> int:
    """Lists the benchmarks, or runs one and returns its exit code."""
    folder = benchmarks_folder()
    known = programs(folder / "bench")
    if arguments.name is None:
        print(
            "\n".join(columns([(name, p.summary) for name, p in known.items()], terminal_width()))
        )
        return EXIT_OK
    if arguments.name not in known:
        near = difflib.get_close_matches(arguments.name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "`hetero bench` lists them"
        raise ValueError(f"no benchmark is called {arguments.name!r}; {hint}")
    sys.path.insert(0, str(folder))
    module = importlib.import_module(known[arguments.name].module)
    code: int = module.main(arguments.options)
    return code


def benchmarks_folder() -> Path:
    """The folder that has bench/: the one inside an installed hetero, or else the checkout.

    Raises ValueError if there is neither.
    """
    package = Path(hetero.__file__).resolve().parent
    for folder in (package / "benchmarks", package.parent):
        if (folder / "bench" / "harness" / "program.py").is_file():
            return folder
    raise ValueError(f"{package} was installed without its benchmarks; install hetero again")


def programs(bench: Path) -> dict[str, Benchmark]:
    """The benchmarks in the folder `bench`, by name, without importing any: the modules whose
    `main` is a Program's, or takes arguments and needs none."""
    found = {}
    for path in sorted(bench.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(
            r"^(main = PROGRAM\.main$|def main\(argv: [^=,]+ = None\))", text, re.MULTILINE
        ):
            parts = path.relative_to(bench).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__main__")
            summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            found[name] = Benchmark(".".join(("bench", *parts)), summary)
    return found
