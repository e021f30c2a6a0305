"""bench.largest: which models and lengths are tried, what counts, its JSON, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import largest as program
from bench.largest import main
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


SMALL = ("--shape", "2,64,2", "--vocabulary", "256", "--seq-len", "16")


def test_larger_budgets_train_larger_models(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = [n * MIB for n in (100, 120, 4000)]
    sizes = ("--sizes", "512,64,128,256,1024", "--path", str(tmp_path))
    argv = (*SMALL, *sizes, "--budgets", ",".join(map(str, budgets)))
    none, some, most = run_json(capsys, *argv).values()
    assert [none["what"], none["limited_by"], none["is_lower_bound"]] == ["none", "memory", False]
    assert some["shape"]["width"] < most["shape"]["width"] == 256
    assert (some["limited_by"], most["limited_by"]) == ("memory", "the disk")
    assert some["peak_bytes"] <= 120 * MIB
    assert most["state_bytes"] == 16 * most["params"] <= 16 / 18 * (1 << 30)
    assert most["what"].startswith(">= ")
    assert list(most["tries"].values()) == ["trained"] * 3
    assert list(tmp_path.iterdir()) == []


def test_the_longest_sequence(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contenders = ("--contenders", "torch-checkpoints,hetero", "--budgets", "90MiB,1200MiB,4GiB")
    more = ("--of", "sequence", "--timeout", "10", "--path", str(tmp_path))
    found = list(run_json(capsys, *SMALL, *contenders, *more).values())
    torch, hetero = found[:3], found[3:]
    assert [row.get("tokens") for row in torch] == [None, 1024, 2048]
    assert [row["limited_by"] for row in torch] == ["memory"] * 3
    assert torch[0]["what"] == "none"
    assert torch[1]["step_s"] == pytest.approx(1024 / 500)
    assert [row.get("tokens") for row in hetero] == [None, 4096, 4096]
    assert [row["limited_by"] for row in hetero] == ["memory", "memory", "time"]
    assert hetero[2]["what"] == ">= 4,096 tokens"


def test_batches_are_of_128_tokens(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--of", "batch", "--budgets", "3GiB", "--path", str(tmp_path))
    assert main([*SMALL, *more, "--sizes", "128,2560"]) == 0
    assert ">= 2,560 tokens" in capsys.readouterr().out
    assert [tokens for _, tokens, _ in machine.tries] == [128, 2560]
    assert main([*SMALL, *more, "--sizes", "100"]) == 2
    assert "100 tokens are no multiple of 128" in capsys.readouterr().err


def test_parameters_are_counted_right() -> None:
    shape = Shape(3, 64, 2, 16, 1)
    assert shape.params(256) == sum(p.numel() for p in Gpt(shape, 256).parameters())
    with pytest.raises(ValueError, match="a width of 63 is no multiple of 2 heads"):
        Shape(2, 63, 2, 16, 1)
