"""What says of hetero what it is: versions agree, and extras and type stubs are whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import hetero
from hetero.cli.outcome import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()

# What stubtest finds and is meant: names for type checkers alone, pybind11's metaclass, and
# pybind11's constructor of classes that have none.
MEANT = re.compile(
    r"Name is not present at runtime$|metaclass differs$|__init__ is inconsistent, stub does not"
    r' have \*args parameter "args"$'
)


def test_versions_agree() -> None:
    (version,) = re.findall(r'^version = "(.*)"', PROJECT, re.MULTILINE)
    assert hetero.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_what_an_extra_is_said_to_bring_it_brings() -> None:
    _, _, extras = PROJECT.partition("[project.optional-dependencies]")
    for extra, modules in EXTRAS.items():
        (listed,) = re.findall(rf"^{extra} = \[(.*?)\]$", extras, re.MULTILINE | re.DOTALL)
        for module in modules:
            assert f'"{module}>=' in listed, (extra, module)


def test_the_stubs_are_those_of_the_extension() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "offload._native", "--concise"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = checked.stdout.splitlines()
    assert lines, checked.stderr
    assert not [line for line in lines if not MEANT.search(line)]
