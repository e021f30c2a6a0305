"""Commands of shell blocks: whether the program that a line names takes what the line gives it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Callable, Sequence
from unittest import mock

from torch.distributed.run import get_args_parser

from hetero.cli.main import main as hetero_main
from tests.support.documents.blocks import ROOT

_ASSIGNMENT = re.compile(r"[A-Z_]+=")
_MAKEFILE = (ROOT / "Makefile").read_text()


class _Parsed(BaseException):
    """A program has taken its arguments; it must not take this for an error of its own."""


def commands_of(text: str) -> list[list[str]]:
    """The commands of a shell block, in words: comments are gone, and lines that go on are one."""
    joined = text.replace("\\\n", " ")
    commands = []
    for line in joined.splitlines():
        words = shlex.split(line.split(" > ")[0], comments=True)
        while words and _ASSIGNMENT.match(words[0]):
            words = words[1:]
        if words:
            commands.append(words)
    return commands


def check(words: Sequence[str]) -> None:
    """A command that exists, with options that it has.

    Raises:
        AssertionError: there is no such command, or it refuses its options.
    """
    program, rest = words[0], list(words[1:])
    if program == "hetero":
        _check_arguments(hetero_main, rest)
    elif program == "python" and rest[:1] == ["-m"]:
        _check_module(rest[1], rest[2:])
    elif program == "torchrun":
        _check_torchrun(rest)
    elif program == "make":
        _check_make(rest)
    elif program == "pip" and rest[:1] == ["install"]:
        _check_extras(rest[1:])
    else:
        raise AssertionError("no command that is known here: <!-- run --> before the block runs it")


def _check_module(name: str, rest: list[str]) -> None:
    if name == "hetero.cli":
        _check_arguments(hetero_main, rest)
        return
    if name == "pytest":
        missing = [word for word in rest if "/" in word and not (ROOT / word).exists()]
        assert not missing, missing
        return
    assert name.split(".")[0] in ("bench", "tests"), f"python -m {name} is not of this project"
    found = importlib.import_module(name)
    if hasattr(found, "__path__"):
        found = importlib.import_module(f"{name}.__main__")
    if rest or hasattr(found, "main"):
        _check_arguments(found.main, rest)


def _check_torchrun(rest: list[str]) -> None:
    given = get_args_parser().parse_args(rest)
    if given.module:
        _check_module(given.training_script, given.training_script_args)


def _check_make(rest: list[str]) -> None:
    for word in rest:
        if "=" not in word and not word.startswith("-"):
            assert re.search(rf"^{re.escape(word)}:", _MAKEFILE, re.MULTILINE), f"make {word}"
        elif word.startswith("ARGS=") and rest[0] == "train":
            _check_arguments(hetero_main, ["train", *shlex.split(word.removeprefix("ARGS="))])


def _check_extras(rest: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for word in rest:
        for extras in re.findall(r"^\.\[([\w,]+)\]$", word):
            for extra in extras.split(","):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"no extra {extra}"


def _check_arguments(main: Callable[[list[str]], object], rest: list[str]) -> None:
    """`main` is called up to where its parser has taken the arguments."""

    def only(parse: Callable[..., object]) -> Callable[..., None]:
        def parse_only(parser: argparse.ArgumentParser, *args: object) -> None:
            parse(parser, *args)
            raise _Parsed

        return parse_only

    said, parser = io.StringIO(), argparse.ArgumentParser
    with (
        mock.patch.object(parser, "parse_args", only(parser.parse_args)),
        # Files of options are the reader's.
        mock.patch("hetero.cli.parser.with_job_files", lambda parser, given: list(given)),
        mock.patch.object(parser, "parse_intermixed_args", only(parser.parse_intermixed_args)),
        contextlib.redirect_stderr(said),
    ):
        try:
            code = main(rest)
            assert code in (0, None), said.getvalue().strip().splitlines()[-1]
        except _Parsed:
            return
        except SystemExit as end:
            if end.code not in (0, None):
                raise AssertionError(said.getvalue().strip().splitlines()[-1]) from None
            return
    raise AssertionError(f"{main.__module__} has parsed no arguments")
