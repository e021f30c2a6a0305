"""bench.activations.longest: the search of each contender, within each budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.activations import longest
from bench.activations.longest import main
from bench.activations.training import Spec

TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--vocabulary", "256"]
FLOOR, PER_TOKEN = 1 << 30, 1 << 20


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Tries that need no process: hetero takes a quarter of the memory for each token, and 2 s of
    a try's time for a thousand; PyTorch does not train below 2 GiB. There is no DeepSpeed."""
    made: list[tuple[str, int, int]] = []

    def run_trial(
        spec: Spec, _: str, timeout_s: float, budget: int = 0, python: str = ""
    ) -> dict[str, Any]:
        made.append((spec.contender, spec.tokens, budget))
        assert ("process_memory" in spec.options) == (spec.contender == "hetero")
        assert python == ("peer" if spec.contender == "deepspeed" else sys.executable)
        peak = 2 * FLOOR + PER_TOKEN * spec.tokens
        if spec.contender == "hetero":
            peak = FLOOR + PER_TOKEN // 4 * spec.tokens
        seconds = spec.tokens / 500
        about = {"seconds": seconds, "peak_bytes": peak, "error": "why"}
        if spec.contender == "deepspeed":
            return {**about, "status": "missing"}
        if peak > budget:
            return {**about, "status": "over"}
        if seconds > timeout_s:
            return {**about, "status": "late"}
        return {**about, "status": "trained", "error": None, "steps_s": [9.0, seconds]}

    monkeypatch.setattr(longest, "run_trial", run_trial)
    return made


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*TINY, "--peer-python", "peer", *argv, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_what_is_found(
    tried: list[tuple[str, int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--budgets", "2GiB,3GiB,4GiB", "--kinds", "sequence", "--seconds", "20")
    result = run_json(capsys, *more, "--path", str(tmp_path), "--bisections", "3")
    found = {(row["contender"], row["budget_bytes"] >> 30): row for row in result["found"]}
    torch = [found["torch-checkpoints", budget] for budget in (2, 3, 4)]
    assert [row["tokens"] for row in torch] == [0, 1024, 2048]
    assert [row["limited_by"] for row in torch] == ["memory"] * 3
    assert torch[1]["step_s"] == pytest.approx(1024 / 500)
    hetero = [found["hetero", budget] for budget in (2, 3, 4)]
    assert [row["tokens"] for row in hetero] == [4096, 8192, 9216]
    assert [row["limited_by"] for row in hetero] == ["memory", "memory", "time"]
    assert [row["is_lower_bound"] for row in hetero] == [False, False, True]
    assert [row["of_checkpoints"] for row in hetero] == [None, 8.0, 9216 / 2048]
    peers = [found["deepspeed", budget] for budget in (2, 3, 4)]
    assert [row["limited_by"] for row in peers] == ["not installed"] * 3
    # Once is enough for what is not installed, and for what no budget changes.
    assert [name for name, *_ in tried].count("deepspeed") == 1
    assert ("torch-checkpoints", 1024, 3 << 30) in tried
    assert ("torch-checkpoints", 1024, 4 << 30) not in tried
    # Each is ended where it is decided, so the least is tried where the first is too much.
    assert ("torch-checkpoints", 64, 2 << 30) in tried
    assert list(tmp_path.iterdir()) == []


def test_batches_are_of_128_tokens(
    tried: list[tuple[str, int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--budgets", "3GiB", "--kinds", "batch", "--contenders", "torch-checkpoints,hetero")
    result = run_json(capsys, *more, "--path", str(tmp_path), "--most-tokens", "3000")
    torch, hetero = result["found"]
    assert torch["tokens"] == 1024
    assert (hetero["tokens"], hetero["limited_by"]) == (2944, "--most-tokens")
    assert all(tokens % 128 == 0 for _, tokens, _ in tried)


def test_table(
    tried: list[tuple[str, int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--budgets", "2GiB", "--kinds", "sequence", "--seconds", "3", "--path", str(tmp_path))
    assert main([*TINY, "--peer-python", "peer", *more]) == 0
    out = capsys.readouterr().out
    for text in ("hetero", ">= 1,280", "not installed", "time", "2.0 GiB", "--seconds 3"):
        assert text in out


@pytest.mark.extra
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contenders = "torch-checkpoints,torch-checkpoints-tiled-loss,torch-checkpoints-on-cpu,hetero"
    more = ("--budgets", "800MiB", "--kinds", "batch", "--contenders", contenders)
    sizes = ("--first-tokens", "128", "--most-tokens", "128", "--path", str(tmp_path))
    result = run_json(capsys, *more, *sizes)
    for row in result["found"]:
        assert (row["tokens"], row["limited_by"]) == (128, "--most-tokens")
        assert 0 < row["peak_bytes"] <= 800 << 20
        assert row["step_s"] > 0


@pytest.mark.parametrize(
    ("option", "value", "fact"),
    [
        ("--contenders", "torsh", "unknown name 'torsh' in --contenders"),
        ("--kinds", "sentence", "unknown name 'sentence' in --kinds"),
        ("--budgets", "lots", "--budgets: cannot read 'lots'"),
        ("--steps", "0", "--steps must be 1 or more"),
        ("--width", "63", "--width 63 is no multiple of --heads 2"),
    ],
)
def test_bad_input_is_one_line(
    tried: list[tuple[str, int, int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    value: str,
    fact: str,
) -> None:
    assert main([*TINY, "--path", str(tmp_path), option, value]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("bench.activations.longest: error: ")
    assert fact in error
    assert tried == []


def search(border: int, first: int, most: int, bisections: int = 2) -> tuple[int, list[int]]:
    tried: list[int] = []

    def works(number: int) -> bool:
        tried.append(number)
        return number <= border

    return longest.longest(works, first, 64, most, bisections), tried


@pytest.mark.parametrize(
    ("border", "first", "most", "found", "tried"),
    [
        (5000, 1024, 1 << 17, 4096, [1024, 2048, 4096, 8192, 6144, 5120]),
        (6000, 1024, 1 << 17, 5120, [1024, 2048, 4096, 8192, 6144, 5120]),
        (300, 1024, 1 << 17, 256, [1024, 64, 512, 256, 384, 320]),
        (900, 1024, 1 << 17, 896, [1024, 64, 512, 768, 896]),
        (70, 1024, 1 << 17, 64, [1024, 64, 512, 256, 128]),
        (10, 1024, 1 << 17, 0, [1024, 64]),
        (10, 64, 1 << 17, 0, [64]),
        (9999, 1024, 3072, 3072, [1024, 2048, 3072]),
        (2500, 1024, 3072, 2304, [1024, 2048, 3072, 2560, 2304]),
        (64, 64, 64, 64, [64]),
        (100, 64, 1 << 17, 64, [64, 128]),
    ],
)
def test_what_is_tried(border: int, first: int, most: int, found: int, tried: list[int]) -> None:
    assert search(border, first, most) == (found, tried)


def test_no_bisection() -> None:
    assert search(5000, 1024, 1 << 17, 0) == (4096, [1024, 2048, 4096, 8192])
