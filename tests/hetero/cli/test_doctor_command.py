"""`hetero doctor` as its user meets it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from hetero.cli.doctor import findings
from hetero.cli.doctor.findings import Finding, Level
from hetero.cli.main import main

FINDINGS = [
    Finding("versions", "hetero 0.1.0"),
    Finding(
        "io_uring", "refused by the kernel", Level.NOTE, "sudo sysctl kernel.io_uring_disabled=0"
    ),
    Finding(
        "filesystem /x",
        "tmpfs: files there are RAM themselves",
        Level.PROBLEM,
        "name another folder",
    ),
]
TEXT = """\
ok       versions       hetero 0.1.0
note     io_uring       refused by the kernel
                        -> sudo sysctl kernel.io_uring_disabled=0
problem  filesystem /x  tmpfs: files there are RAM themselves
                        -> name another folder

1 ok, 1 note, 1 problem
"""


def test_a_problem_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--no-disk-speed", "--json", "--nvme-path", str(tmp_path / "no")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    (bad,) = (each for each in found["findings"] if each["level"] == "problem")
    assert bad["name"] == f"folder {tmp_path / 'no'}"
    assert bad["fix"].startswith("mkdir -p ")
    assert found["facts"]["memory"]["ram_bytes"] > 0


def test_notes_are_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "examine", lambda facts: FINDINGS[:2])
    assert main(["doctor", "--no-disk-speed"]) == 0
    assert capsys.readouterr().out.endswith("\n1 ok, 1 note, 0 problems\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_text(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on a terminal, but for colours."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    findings.show(FINDINGS)
    out = capsys.readouterr().out
    assert re.sub(r"\033\[[\d;]+m", "", out) == TEXT
    assert ("\033[1;31mproblem" in out) == terminal


def test_long_lines_are_broken_between_words() -> None:
    text = findings.lines(
        [Finding("x", "word " * 40), Finding("y", "z", Level.NOTE, "do " * 40)], 60
    )
    assert max(map(len, text)) <= 60
    assert text[1].startswith(" " * 12 + "word")
