"""bench.largest: which models and lengths are tried, what counts, its JSON, and how it refuses."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import largest as program
from bench.activations.training import Spec
from bench.largest import (
    MARGIN_BYTES,
    climb,
    family,
    fits,
    main,
    outside_bytes,
    token_counts,
)
from bench.work.gpt import Gpt, Shape

MIB = 1 << 20
FRAMEWORK = 100 * MIB
TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--vocabulary", "256"]
FLOOR, PER_TOKEN = 1 << 30, 1 << 20


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)["found"]
    return found


class Machine:
    """Instead of processes: a training takes the framework and what the engine was given, and
    `more` times what is estimated to be beside it; a peer 300 MiB and 20 bytes a parameter."""

    def __init__(self) -> None:
        self.more = 1.0
        self.late_params = 1e12
        self.status = "trained"
        self.specs: list[Spec] = []

    def __call__(
        self, spec: Spec, folder: str, timeout_s: float, budget: int | None, python: str
    ) -> dict[str, Any]:
        self.specs.append(spec)
        shape = Shape(**spec.shape)
        is_peer = spec.contender == "deepspeed"
        assert python == ("py" if is_peer else sys.executable)
        found = {"error": "why", "peak_bytes": FRAMEWORK, "seconds": 1.0}
        if is_peer and self.status != "trained":
            return {**found, "status": self.status}
        peak = FRAMEWORK
        if is_peer:
            peak = 300 * MIB + 20 * shape.params(spec.vocabulary)
        elif budget is not None:
            host = spec.options["host_memory"]
            if not fits(shape, spec.vocabulary, host, folder):
                return {**found, "status": "refused"}
            peak = int(FRAMEWORK + host + outside_bytes(shape, spec.vocabulary) * self.more)
        if shape.params(spec.vocabulary) > self.late_params:
            return {**found, "status": "late", "error": "not done after 9 s"}
        found["peak_bytes"] = peak
        if budget is not None and peak > budget:
            return {**found, "status": "over", "error": f"{peak} were resident"}
        trained = {"steps_s": [2.0, 1.0], "made_s": 1.0, "bytes_per_step": {"disk_read": 5}}
        return {**found, **trained, "status": "trained", "error": None}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Small shapes on a disk of 1 GiB."""
    machine = Machine()
    monkeypatch.setattr(program, "try_to_train", machine)
    monkeypatch.setattr(program, "MOST_WIDTH", 512)
    monkeypatch.setattr(program, "MOST_LAYERS", 8)
    monkeypatch.setattr(program, "LEAST_GROWTH", 1.1)
    monkeypatch.setattr(program, "free_bytes", lambda path: 1 << 30)
    return machine


def models(tmp_path: Path, *more: str) -> list[str]:
    return ["--path", str(tmp_path), "--vocabulary", "256", "--seq-len", "16", *more]


def params() -> list[int]:
    return [shape.params(256) for shape in family(256, 16, 1)]


def test_larger_budgets_train_larger_models(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = [FRAMEWORK + MARGIN_BYTES + n * MIB // 2 for n in (3, 8, 400)]
    argv = models(tmp_path, "--budgets", ",".join(map(str, budgets)))
    found = list(run_json(capsys, *argv).values())
    assert [each["budget_bytes"] for each in found] == budgets
    sizes = [each["params"] for each in found]
    assert sizes[0] < sizes[1] < sizes[2] == params()[-1]
    assert [each["limited_by"] for each in found] == ["memory", "memory", "the widest of shapes"]
    assert [each["is_lower_bound"] for each in found] == [False, False, True]
    for each in found:
        assert each["peak_bytes"] <= each["budget_bytes"]
        assert each["step_s"] == 1.0
        assert each["state_bytes"] == 16 * each["params"]
    for each in found[:2]:  # the plan knows the engine's part, so its guess is near
        assert 2 <= len(each["tries"]) <= 4
        assert list(each["tries"].values())[-2:] == ["trained", "refused"]
        assert len(each["not"]) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_peak_above_the_budget_is_not_proven(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each attempt gives the engine less by what was too much, and the next model begins so."""
    machine.more = 60.0
    budget = FRAMEWORK + 300 * MIB
    argv = models(tmp_path, "--budgets", str(budget), "--most", "3e6", "--tries", "2")
    (found,) = run_json(capsys, *argv).values()
    assert found["peak_bytes"] <= budget
    hosts = [spec.options["host_memory"] for spec in machine.specs[1:]]
    assert hosts == sorted(hosts, reverse=True)
    assert len(set(hosts)) > 1
    machine.more = 1e4
    (found,) = run_json(capsys, *argv).values()
    assert found["what"] == "none"
    assert len(found["tries"]) == 2
    assert "too small" in found["not"][0]


def test_models_are_what_disk_and_option_hold(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = ("--budgets", "1GiB")
    (found,) = run_json(capsys, *models(tmp_path, *large, "--most", "1e6")).values()
    assert found["params"] == max(n for n in params() if n <= 1e6)
    assert found["limited_by"] == "--most"
    monkeypatch.setattr(program, "free_bytes", lambda path: 100 * MIB)
    (found,) = run_json(capsys, *models(tmp_path, *large)).values()
    assert found["params"] == max(n for n in params() if n * 18 <= 95 * MIB)
    assert found["limited_by"] == "disk"
    assert main(models(tmp_path, "--most", "1")) == 2
    assert "parameters are within --most and the disk" in capsys.readouterr().err


def test_what_takes_too_long_does_not_fit_in_time(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.late_params = 3e6
    argv = models(tmp_path, "--budgets", "1GiB", "--tries", "20")
    (found,) = run_json(capsys, *argv).values()
    assert (found["limited_by"], found["is_lower_bound"]) == ("time", True)
    assert found["params"] == max(n for n in params() if n <= 3e6)


def test_peers_are_searched_for_in_the_same_way(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "FLOOR_BYTES", 200 * MIB)
    budgets = (301 * MIB, 320 * MIB, 400 * MIB)
    peers = ("--contenders", "deepspeed", "--peer-python", "py", "--tries", "12")
    argv = models(tmp_path, *peers, "--budgets", ",".join(map(str, budgets)))
    for budget, found in zip(budgets, run_json(capsys, *argv).values(), strict=True):
        within = [n for n in params() if n <= (budget - 300 * MIB) // 20]
        assert found.get("params") == (max(within) if within else None)
    machine.status = "missing"
    machine.specs.clear()
    found = run_json(capsys, *argv)
    assert [each["limited_by"] for each in found.values()] == ["not installed"] * 3
    assert len(machine.specs) == 1


@pytest.mark.parametrize(("vocabulary", "seq_len"), [(50257, 128), (50257, 1024), (32000, 128)])
def test_neighbouring_models_are_of_nearly_the_same_size(vocabulary: int, seq_len: int) -> None:
    found = family(vocabulary, seq_len, 1)
    sizes = [shape.params(vocabulary) for shape in found]
    for before, after in itertools.pairwise(sizes):
        assert 1.06 <= after / before <= 1.15
    assert sizes[0] < 5e6
    assert sizes[-1] > 25e9
    # Memory is a matter of width first.
    widths = [shape.width for shape in found]
    assert widths == sorted(widths)
    for shape in found:
        assert shape.width < 512 or shape.width == 64 * shape.heads


def test_parameters_are_counted_right() -> None:
    shape = Shape(3, 64, 2, 16, 1)
    assert shape.params(256) == sum(p.numel() for p in Gpt(shape, 256).parameters())
    with pytest.raises(ValueError, match="a width of 63 is no multiple of 2 heads"):
        Shape(2, 63, 2, 16, 1)


def test_climbing_finds_the_border_in_few_tries() -> None:
    for count, at in ((1, 0), (7, 3), (50, 10), (50, 49)):
        for border in range(count + 1):
            asked: list[int] = []

            def works(number: int, asked: list[int] = asked, border: int = border) -> bool:
                asked.append(number)
                return number < border

            assert climb(count, at, works, 100) == (border - 1 if border else None)
            assert len(set(asked)) == len(asked)
            away = abs(border - at) + 1
            assert len(asked) <= 2 * math.log2(away) + 3
    assert climb(50, 10, lambda number: number < 30, 3) == 13  # 10, 11, 13
    assert climb(50, 10, lambda number: number < 30, 3, 4) == 22  # 10, 14, 22
    assert climb(50, 99, lambda number: False, 2) is None


def test_counts_of_tokens() -> None:
    assert token_counts(64, 1024) == [64, 128, 192, *range(256, 512, 64), *range(512, 1024, 128),
                                      1024]  # fmt: skip
    assert token_counts(128, 300) == [128, 256]
    assert token_counts(128, 1) == [128]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Tries of tokens: hetero takes a quarter of the memory for each token, and 2 s of a try's time
    for a thousand; PyTorch does not train below 2 GiB."""
    made: list[tuple[str, int, int]] = []

    def try_to_train(
        spec: Spec, _: str, timeout_s: float, budget: int, python: str
    ) -> dict[str, Any]:
        made.append((spec.contender, spec.tokens, budget))
        assert ("process_memory" in spec.options) == (spec.contender == "hetero")
        peak = 2 * FLOOR + PER_TOKEN * spec.tokens
        if spec.contender == "hetero":
            peak = FLOOR + PER_TOKEN // 4 * spec.tokens
        seconds = spec.tokens / 500
        about = {"seconds": seconds, "peak_bytes": peak, "error": "why", "made_s": 1.0}
        if peak > budget:
            return {**about, "status": "over"}
        if seconds > timeout_s:
            return {**about, "status": "late"}
        trained = {"steps_s": [9.0, seconds], "bytes_per_step": {}}
        return {**about, **trained, "status": "trained", "error": None}

    monkeypatch.setattr(program, "try_to_train", try_to_train)
    return made


def test_the_longest_sequence(
    tried: list[tuple[str, int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contenders = ("--contenders", "torch-checkpoints,hetero", "--budgets", "2GiB,3GiB,4GiB")
    more = ("--of", "sequence", "--timeout", "20", "--tries", "20", "--path", str(tmp_path))
    found = list(run_json(capsys, *TINY, *contenders, *more).values())
    torch, hetero = found[:3], found[3:]
    assert [row.get("tokens") for row in torch] == [None, 1024, 2048]
    assert [row["limited_by"] for row in torch] == ["memory"] * 3
    assert torch[1]["step_s"] == pytest.approx(1024 / 500)
    assert [row["tokens"] for row in hetero] == [4096, 8192, 8192]
    assert [row["limited_by"] for row in hetero] == ["memory", "memory", "time"]
    assert hetero[2]["what"] == ">= 8,192 tokens"
    # Once is enough for what no budget changes.
    assert ("torch-checkpoints", 1024, 3 << 30) in tried
    assert ("torch-checkpoints", 1024, 4 << 30) not in tried
    assert list(tmp_path.iterdir()) == []


def test_batches_are_of_128_tokens(
    tried: list[tuple[str, int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--of", "batch", "--budgets", "3GiB", "--most", "3000", "--path", str(tmp_path))
    assert main([*TINY, *more]) == 0
    assert ">= 2,560 tokens" in capsys.readouterr().out
    assert all(tokens % 128 == 0 for _, tokens, _ in tried)
