"""bench.largest: which models and lengths are tried, what counts, its JSON, and how it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench import largest as program
from bench.largest import climb, main, token_counts
from bench.work.gpt import Gpt, Shape
from bench.work.gpt_training import Spec

MIB = 1 << 20


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["found"]
    return found


class Machine:
    """Instead of processes: a training takes 100 MiB, 2 bytes a parameter, and memory for each
    token, of which hetero takes a quarter; and a second for each 500 tokens."""

    def __init__(self) -> None:
        self.tries: list[tuple[str, int, int]] = []

    def __call__(self, spec: Spec, folder: str, timeout_s: float, budget: int) -> dict[str, Any]:
        shape = Shape(**spec.shape)
        self.tries.append((spec.contender, shape.tokens, budget))
        is_hetero = spec.contender.startswith("hetero")
        assert spec.options.get("process_memory") == (budget if is_hetero else None)
        peak = 100 * MIB + 2 * shape.params(spec.vocabulary)
        peak += shape.tokens * MIB // (4 if is_hetero else 1)
        seconds = shape.tokens / 500
        found = {"seconds": seconds, "peak_bytes": peak, "error": "why", "made_s": 1.0}
        if peak > budget:
            return {**found, "status": "over"}
        if seconds > timeout_s:
            return {**found, "status": "late"}
        trained = {"steps_s": [9.0, seconds], "bytes_per_step": {"disk_read": 5}}
        return {**found, **trained, "status": "trained", "error": None}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """On a disk of 1 GiB."""
    machine = Machine()
    monkeypatch.setattr(program, "try_to_train", machine)
    monkeypatch.setattr(program, "free_bytes", lambda path: 1 << 30)
    return machine


def test_larger_budgets_train_larger_models(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = [n * MIB for n in (110, 130, 4000)]
    small = ("--vocabulary", "256", "--seq-len", "16", "--path", str(tmp_path))
    argv = (*small, "--budgets", ",".join(map(str, budgets)), "--tries", "20")
    found = list(run_json(capsys, *argv).values())
    assert [each["budget_bytes"] for each in found] == budgets
    sizes = [each["params"] for each in found]
    assert sizes[0] < sizes[1] < sizes[2] <= (1 << 30) * 0.95 / 18
    assert [each["limited_by"] for each in found[:2]] == ["memory"] * 2
    assert [each["is_lower_bound"] for each in found] == [False, False, True]
    for each in found:
        assert each["peak_bytes"] <= each["budget_bytes"]
        assert each["state_bytes"] == 16 * each["params"]
        assert each["what"].startswith(">= ") == each["is_lower_bound"]
    assert list(tmp_path.iterdir()) == []
    assert main([*small, "--most", "1"]) == 2
    assert "parameters are within --most and the disk" in capsys.readouterr().err


def test_the_longest_sequence(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contenders = ("--contenders", "torch-checkpoints,hetero", "--budgets", "90MiB,1200MiB,4GiB")
    more = ("--of", "sequence", "--timeout", "20", "--tries", "20", "--path", str(tmp_path))
    shape = ("--shape", "2,64,2", "--vocabulary", "256")
    found = list(run_json(capsys, *shape, *contenders, *more).values())
    torch, hetero = found[:3], found[3:]
    assert [row.get("tokens") for row in torch] == [None, 1024, 3584]
    assert [row["limited_by"] for row in torch] == ["memory"] * 3
    assert torch[0]["what"] == "none"
    assert torch[1]["step_s"] == pytest.approx(1024 / 500)
    assert [row.get("tokens") for row in hetero] == [None, 4096, 8192]
    assert [row["limited_by"] for row in hetero] == ["memory", "memory", "time"]
    assert hetero[2]["what"] == ">= 8,192 tokens"


def test_batches_are_of_128_tokens(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--of", "batch", "--budgets", "3GiB", "--most", "3000", "--path", str(tmp_path))
    assert main(["--shape", "2,64,2", "--vocabulary", "256", *more]) == 0
    assert ">= 2,560 tokens" in capsys.readouterr().out
    assert all(tokens % 128 == 0 for _, tokens, _ in machine.tries)


def test_parameters_are_counted_right() -> None:
    shape = Shape(3, 64, 2, 16, 1)
    assert shape.params(256) == sum(p.numel() for p in Gpt(shape, 256).parameters())
    with pytest.raises(ValueError, match="a width of 63 is no multiple of 2 heads"):
        Shape(2, 63, 2, 16, 1)


def test_climbing_finds_the_border_in_few_tries() -> None:
    for places, at in ((1, 0), (7, 3), (50, 10), (50, 49)):
        for border in range(places + 1):
            asked: list[int] = []

            def works(number: int, asked: list[int] = asked, border: int = border) -> bool:
                asked.append(number)
                return number < border

            assert climb(places, at, works, 100) == (border - 1 if border else None)
            assert len(set(asked)) == len(asked)
            away = abs(border - at) + 1
            assert len(asked) <= 2 * math.log2(away) + 3
    assert climb(50, 10, lambda number: number < 30, 3) == 13  # 10, 11, 13
    assert climb(50, 99, lambda number: False, 2) is None


def test_counts_of_tokens() -> None:
    assert token_counts(64, 1024) == [64, 128, 192, *range(256, 512, 64), *range(512, 1024, 128),
                                      1024]  # fmt: skip
    assert token_counts(128, 300) == [128, 256]
    assert token_counts(128, 1) == [128]
