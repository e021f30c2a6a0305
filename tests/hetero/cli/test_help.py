"""`hetero --help`, examples, and errors that are one line."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hetero
from hetero.cli import bench
from hetero.cli.main import main, make_parser


def commands() -> dict[str, argparse.ArgumentParser]:
    (added,) = (each for each in make_parser()._actions if each.dest == "command")
    assert isinstance(added, argparse._SubParsersAction)
    return dict(added.choices)


def examples() -> Iterator[tuple[str, list[str]]]:
    """The examples of all commands, as (command, words)."""
    for name, parser in commands().items():
        for line in (parser.epilog or "").splitlines():
            words = line.strip().split("  ")[0]
            if words.startswith(("hetero ", "torchrun ")):
                yield name, shlex.split(words.partition(" > ")[0])


def test_the_help_fits_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for name in commands():  # a line each
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    """Importing torch takes seconds."""
    program = """
import sys
from hetero.cli.main import main
for given in ("--version", "--help", "train --help-all", "plan --help", "trian",
              "train --config none.json"):
    try:
        main(given.split())
    except SystemExit:
        pass
    print([given for name in ("torch", "numpy", "transformers") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    found = [line for line in out.stdout.splitlines() if line.startswith("[")]
    assert found == ["[]"] * 6, out.stderr


def test_all_public_names_are_there() -> None:
    assert set(hetero.__all__) <= set(dir(hetero))
    for name in hetero.__all__:
        assert getattr(hetero, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'hetero' has no attribute 'initialise'"):
        hetero.initialise  # noqa: B018


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"hetero {hetero.__version__}\n"


def test_every_command_has_help_and_examples() -> None:
    shown = {name for name, _ in examples()}
    assert set(commands()) == shown
    for name, parser in commands().items():
        assert parser.format_help().startswith(f"usage: hetero {name}")


def test_examples_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.cli.parser.with_job_files", lambda parser, given: list(given))
    parser = make_parser()
    for name, words in examples():
        if words[0] == "torchrun":
            words = words[words.index("hetero.cli") :]
        assert words[1] == name
        arguments = parser.parse_args(words[1:])
        if name == "bench" and arguments.name is not None:
            assert arguments.name in bench.programs(bench.benchmarks_folder() / "bench")


def test_an_unknown_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in (
        (["trian"], "did you mean train?"),
        (
            ["train", "--stesp", "3"],
            "train: error: there is no --stesp; did you mean --max-steps?",
        ),
        (["train", "--step", "3"], "there is no --step; did you mean --max-steps?"),  # a prefix
        (["doctor", "--zzz"], "there is no --zzz; hetero doctor --help says what there is"),
        (["inspect"], "required: path; hetero inspect --help says what there is"),
        ([], "required: COMMAND; hetero --help says what there is"),
    ):
        with pytest.raises(SystemExit) as raised:
            main(given)
        assert raised.value.code == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_what_was_not_foreseen_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path) -> dict[str, bench.Benchmark]:
        raise LookupError("no such thing")

    monkeypatch.delenv("HETERO_DEBUG", raising=False)
    monkeypatch.setattr(bench, "programs", fail)
    assert main(["bench"]) == 1
    assert capsys.readouterr().err == (
        "hetero bench: error: LookupError: no such thing; this was not foreseen, HETERO_DEBUG=1"
        " shows where it came from\n"
    )
    monkeypatch.setenv("HETERO_DEBUG", "1")
    assert main(["bench"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "in fail" in err


def test_a_profile_that_cannot_be_saved_is_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["profile", "--output", "/proc/self/x"]) == 2
    err = capsys.readouterr().err
    assert "--output /proc/self/x cannot be written" in err
    assert err.count("\n") == 1


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "hetero.cli", "bench"],
        cwd=Path(__file__).parents[3],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_a_name_that_the_encoding_of_the_output_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "\u00fc.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main(["inspect", str(path)]) == 0
    assert rb"\xfc.safetensors" in printed.getvalue()


DRAWING = ("hetero.reporting.charts", "hetero.reporting.drawing")


@pytest.mark.parametrize(
    ("words", "missing", "extra", "imported_again"),
    [
        ("train --data none", "matplotlib", "train", ("hetero.cli.train", *DRAWING)),
        ("plan --machine laptop", "transformers", "train", ()),
        ("bench peers_tests", "rich", "train", ("bench",)),
        ("finetune --model none", "trl", "finetune", ("hetero.cli.finetune",)),
    ],
)
def test_an_extra_that_is_missing_is_named(
    words: str,
    missing: str,
    extra: str,
    imported_again: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [each for each in sys.modules if f"{each}.".startswith(f"{missing}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    again = tuple(f"{each}." for each in imported_again)
    for name in [each for each in sys.modules if again and f"{each}.".startswith(again)]:
        parent, _, leaf = name.rpartition(".")
        if parent in sys.modules:
            monkeypatch.delattr(sys.modules[parent], leaf, raising=False)
        monkeypatch.delitem(sys.modules, name)
    assert main(words.split()) == 2
    assert capsys.readouterr().err == (
        f"hetero {words.split()[0]}: error: {missing} is missing; install it: pip install"
        f' "hetero[{extra}]"\n'
    )
