"""Rounds, machine and tables of bench/harness/: turns, medians, headers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.harness.machine import commit, cpu_model, describe_machine, header
from bench.harness.rounds import ContenderError, Rounds, run_rounds
from bench.harness.tables import number, of_figures, ranged, size


def quiet(_: str) -> None: ...


def test_the_warm_up_is_left_out_and_rounds_line_up() -> None:
    fast, slow = iter([100.0, 2.0, 6.0, 4.0]), iter([1.0, 1.0, 2.0, 4.0])
    rounds = run_rounds(
        {"fast": lambda: {"x": next(fast)}, "slow": lambda: {"x": next(slow)}}, 3, quiet
    )
    assert rounds.values("fast", "x") == [2.0, 6.0, 4.0]
    assert rounds.spread("fast", "x") == {"median": 4.0, "min": 2.0, "max": 6.0}
    # 2/1, 6/2, 4/4: the median of ratios, not the ratio of medians (4/2).
    rounds.compare("slow", "x", "of_slow")
    assert rounds.figures()["fast"]["of_slow"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert rounds.median("slow", "of_slow") == 1.0
    skewed = Rounds({"a": [{"x": 1}, {"x": 2}, {"x": 9}], "b": [{"x": 1}, {"x": 4}, {"x": 3}]})
    skewed.compare("b", "x", "of_b")
    assert skewed.median("a", "of_b") == 1.0
    assert skewed.median("a", "x") / skewed.median("b", "x") != 1.0


@pytest.mark.parametrize("warm_up", [True, False])
def test_every_round_begins_one_contender_later(warm_up: bool) -> None:
    turns: list[str] = []
    contenders = {name: (lambda name=name: turns.append(name) or {"x": 1.0}) for name in "abc"}
    rounds = run_rounds(contenders, 3, quiet, warm_up=warm_up)
    order = ["abc", "bca", "cab", "abc"] if warm_up else ["abc", "bca", "cab"]
    assert "".join(turns) == "".join(order)
    assert rounds.values("a", "x") == [1.0] * 3


def test_what_is_derived_is_of_samples_of_the_same_round() -> None:
    rounds = Rounds({"a": [{"x": 1.0}, {"x": 2.0}], "b": [{"y": 10.0}, {"y": 30.0}]})
    rounds.derive("a", lambda made: {"z": made["a"]["x"] * made["b"]["y"]})
    assert rounds.values("a", "z") == [10.0, 60.0]
    rounds.compare("none", "x", "of_none")  # was left out
    rounds.compare("a", "x", "of_a")
    assert set(rounds.figures()["a"]) == {"x", "z", "of_a"}
    assert set(rounds.figures()["b"]) == {"y"}


def test_a_table_has_the_columns_that_have_figures() -> None:
    columns = (
        ("s", "s", ranged()),
        ("ms", "s", number(0, 1e3)),
        ("bytes", "bytes", size),
        ("none", "none", str),
        ("why", "why", str),
    )
    bytes_ = {"median": 1024, "min": 1, "max": 2048}
    rows = {
        "one": {"s": {"median": 1.0, "min": 0.5, "max": 2.0}, "bytes": bytes_, "none": None},
        "two": {"s": 3.0, "why": "so"},
    }
    text = of_figures("about 7", rows, columns)
    title, head, line, *cells, end = [each for each in text.splitlines() if each]
    assert title == "about 7"
    assert head.split() == ["s", "ms", "bytes", "why"]
    assert set(line) == {"-"}
    for cell in ("1.00 (0.50-2.00)", "1,000", "1.0 KiB"):
        assert cell in cells[0]
    assert end.split() == ["two", "3.00", "3,000", "so"]
    assert of_figures("about 7", {}, columns) == ""


def test_a_contender_that_fails_is_left_out_and_the_others_go_on() -> None:
    calls: list[int] = []

    def broken() -> dict[str, float]:
        calls.append(1)
        if len(calls) > 2:
            raise ContenderError("no such device")
        return {"x": 1.0}

    told: list[str] = []
    rounds = run_rounds({"broken": broken, "good": lambda: {"x": 1.0}}, 4, told.append)
    assert rounds.failed == {"broken": "no such device"}
    assert len(calls) == 3
    assert "broken" not in rounds.samples
    assert rounds.values("good", "x") == [1.0] * 4
    assert any("left out: no such device" in line for line in told)


def test_other_exceptions_end_the_run() -> None:
    def broken() -> dict[str, float]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_rounds({"broken": broken}, 1, quiet)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds must be 1 or more, got 0"):
        run_rounds({"a": dict}, 0)
    with pytest.raises(ValueError, match="no contender"):
        run_rounds({}, 1)


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    run_rounds({"a": lambda: {"gbps": 1.23456}}, 1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "warm-up  a: gbps 1.235\nround 1/1  a: gbps 1.235\n"


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    json.dumps(machine)
    for key in ("date", "cpu", "cores", "isa", "ram_bytes", "kernel", "python", "torch", "commit"):
        assert key in machine
    text = header(machine, "python -m bench.x --y")
    assert text.endswith("\npython -m bench.x --y")
    assert machine["cpu"] in text
    assert machine["torch"] in text


def test_cpu_model_and_where_there_is_none(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3: GHz\n")
    assert cpu_model(cpuinfo) == "Some CPU @ 3: GHz"
    cpuinfo.write_text("processor\t: 0\nCPU part\t: 0xd0c\n")
    assert cpu_model(cpuinfo)
    assert cpu_model(tmp_path / "none") == cpu_model(cpuinfo)


def test_commit_says_when_the_tree_has_changes(tmp_path: Path) -> None:
    assert commit(tmp_path / "none") is None

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(("git", "-C", str(tmp_path), *identity, *arguments), check=True)

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    assert commit(tmp_path) is None, "it is somebody else's repository"
    (tmp_path / "pyproject.toml").write_text("")
    git("add", "pyproject.toml")
    git("commit", "-qm", "second")
    clean = commit(tmp_path)
    assert clean is not None
    assert not clean.endswith("+")
    git("tag", "-am", "x", "v1")
    assert commit(tmp_path) == clean
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{clean}+"
