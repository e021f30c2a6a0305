"""bench.ladder: which models are tried, what counts as proven, its JSON, and how it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import ladder as bench_ladder
from bench.contenders import Outcome
from bench.ladder import Ladder, Shape, fits, main, params_of
from bench.limited_train import Spec, outside_bytes
from hetero.training.models import count_parameters, model_config
from hetero.training.options import TrainOptions

MIB = 1 << 20
FRAMEWORK = 100 * MIB


class Machine:
    """Instead of processes: a training takes the framework and what the engine was given, and
    `more` times what is estimated to be beside it."""

    def __init__(self, more: float = 1.0) -> None:
        self.more = more
        self.specs: list[Spec] = []

    def __call__(self, spec: Spec, *_: object) -> dict[str, Any]:
        self.specs.append(spec)
        outside = outside_bytes(spec)
        host = spec.host_memory or spec.rss_bytes - FRAMEWORK - outside
        if not fits(spec.model_config, host, 1 << 50, spec):
            return {"status": "refused", "error": "too small", "framework_bytes": FRAMEWORK,
                    "peak_rss_bytes": FRAMEWORK}  # fmt: skip
        return {
            "status": "trained",
            "error": None,
            "framework_bytes": FRAMEWORK,
            "host_memory": host,
            "peak_rss_bytes": int(FRAMEWORK + host + outside * self.more),
            "constructed_s": 1.0,
            "step_s": [2.0, 1.0],
            "nvme_bytes_per_step": 5,
        }


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Small shapes on a disk of 1 GiB."""
    machine = Machine()
    monkeypatch.setattr(bench_ladder, "_run_child", machine)
    monkeypatch.setattr(bench_ladder, "WIDTHS", (64, 128, 256, 512))
    monkeypatch.setattr(bench_ladder, "LAYERS", (1, 2, 4, 8))
    monkeypatch.setattr(bench_ladder, "WIDTH_PER_LAYER", (8, 512))
    monkeypatch.setattr(bench_ladder, "free_bytes", lambda path: 1 << 30)
    return machine


def options(tmp_path: Path, *more: str) -> list[str]:
    return ["--nvme-path", str(tmp_path), "--vocab-size", "256", "--seq-len", "16", *more]


def run_json(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result


def test_larger_budgets_train_larger_models(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = [FRAMEWORK + n * MIB // 2 for n in (3, 8, 400, 800)]
    argv = options(tmp_path, "--budgets", ",".join(map(str, budgets)), "--limit", "address")
    result = run_json(capsys, argv)
    rungs = result["rungs"]
    assert [r["budget_bytes"] for r in rungs] == budgets
    assert result["framework_bytes"] == FRAMEWORK
    sizes = [r["params"] for r in rungs]
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3]
    assert [r["limited_by"] for r in rungs] == ["RAM", "RAM", "disk", "disk"]
    assert rungs[3]["proven_at_bytes"] == budgets[2]
    for rung in rungs:
        assert rung["status"] == "trained"
        assert rung["peak_rss_bytes"] <= rung["budget_bytes"]
        assert rung["peer"] is None
    first, *others = machine.specs
    assert first.limits == {}
    assert {tuple(s.limits.items()) for s in others} <= {(("address", 2 * b),) for b in budgets}
    assert list(tmp_path.iterdir()) == []


def test_a_peak_above_the_budget_is_not_proven(machine: Machine, tmp_path: Path) -> None:
    """Each attempt gives the engine less by what was too much."""
    ladder = make(tmp_path, machine)
    config = Shape(8, 256).config(256, 16)
    machine.more = 1.5
    rung = ladder.prove(config, FRAMEWORK + 100 * MIB)
    assert rung["status"] == "trained"
    first, second = machine.specs[-2:]
    assert second.host_memory is not None
    outside = outside_bytes(replace(first))
    assert second.host_memory <= 100 * MIB - outside * 1.5
    assert rung["peak_rss_bytes"] <= FRAMEWORK + 100 * MIB
    machine.more = 100.0
    rung = ladder.prove(config, FRAMEWORK + 100 * MIB)
    assert rung["status"] == "failed"
    assert "above the budget" in rung["error"]


def make(tmp_path: Path, machine: Machine, *more: str) -> Ladder:
    arguments = bench_ladder._parser().parse_args(options(tmp_path, *more))
    return Ladder(arguments, tmp_path, machine)


def test_candidates_are_what_disk_and_ram_hold(machine: Machine, tmp_path: Path) -> None:
    ladder = make(tmp_path, machine)
    disk = (1 << 30) * bench_ladder.DISK_SHARE
    found = list(ladder.candidates(1 << 40))
    sizes = [params_of(c) for c in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len(found) == 16
    assert sizes[0] * 18 <= disk
    few = list(make(tmp_path, machine, "--most-params", "1e6").candidates(1 << 40))
    assert few == [c for c in found if params_of(c) <= 1e6]
    assert list(ladder.candidates(FRAMEWORK)) == []


def test_only_tries_so_many_shapes(machine: Machine, tmp_path: Path) -> None:
    machine.more = 1000.0
    rung = make(tmp_path, machine, "--tries", "2").rung(FRAMEWORK + 200 * MIB)
    assert rung["status"] == "none"
    # Each narrower than the one before.
    assert [r.split(":")[0] for r in rung["refused"]] == ["8 x 512", "8 x 256"]


def test_beyond_ram(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Memory:
        total = 100 * MIB

    monkeypatch.setattr(bench_ladder.psutil, "virtual_memory", Memory)
    argv = options(tmp_path, "--beyond-ram", "3", "--only-rss", str(FRAMEWORK + 200 * MIB))
    (rung,) = run_json(capsys, argv)["rungs"]
    assert rung["state_bytes"] >= 3 * Memory.total
    assert main(argv) == 0
    assert "times the machine's RAM" in capsys.readouterr().out
    argv[argv.index("3")] = "30"
    assert main(argv) == 2
    assert "of disk" in capsys.readouterr().err


def test_a_model_by_name(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (rung,) = run_json(capsys, options(tmp_path, "--only-rss", "3GiB", "--model", "gpt2-1.3b"))[
        "rungs"
    ]
    assert rung["status"] == "trained"
    assert rung["params"] > 1.2e9
    assert main(options(tmp_path, "--only-rss", "3GiB", "--model", "llama-7b")) == 2
    assert "only GPT-2's shapes" in capsys.readouterr().err


def test_peers_are_measured_until_they_take_too_much(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = iter([100 * MIB, 150 * MIB, 300 * MIB, 900 * MIB, 999 * MIB])
    asked: list[tuple[str, ...]] = []

    def run(contender: Any, timeout_s: float, more: dict[str, str]) -> Outcome:
        asked.append(contender.command)
        return Outcome(
            contender.name,
            "finished",
            {"peak_rss_by_rank_bytes": [next(peaks)], "step_s": [1.0]},
        )

    monkeypatch.setattr(bench_ladder, "run_contender", run)
    (tmp_path / "text").write_bytes(bytes(range(256)))
    budgets = f"{200 * MIB},{400 * MIB}"
    argv = options(tmp_path, "--peers", "deepspeed", "--peer-python", "py", "--budgets", budgets)
    result = run_json(capsys, argv)
    assert len(asked) == 4
    assert all(command[0] == "py" and "nvme" in command for command in asked)
    shapes = [f"{layers} x {width}" for layers, width in bench_ladder.PEER_SHAPES]
    assert [r["peer"]["shape"] for r in result["rungs"]] == shapes[1:3]


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium"])
def test_parameters_are_counted_right(name: str) -> None:
    config = model_config(TrainOptions(model=name, vocab_size=50257))
    assert params_of(config.to_diff_dict() | {"n_positions": 1024}) == count_parameters(config)


@pytest.mark.parametrize(
    ("more", "fact"),
    [
        (("--model", "gpt2"), "--model is for --only-rss"),
        (("--only-rss", "3GiB"), "--only-rss needs --model"),
        (("--budgets", "lots"), "--budgets"),
        (("--steps", "0"), "--steps must be 1 or more"),
        (("--nvme-path", "/dev/null/nowhere"), "not a folder"),
        (("--vocab-size", "10"), "at least 256"),
    ],
)
def test_bad_input_is_one_line(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    fact: str,
) -> None:
    assert main(options(tmp_path, *more)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("bench.ladder: error: ")
    assert fact in error


def test_a_process_of_its_own_trains_and_says_what_it_took(tmp_path: Path) -> None:
    arguments = bench_ladder._parser().parse_args(options(tmp_path))
    spec = Spec(
        model_config=Shape(2, 64).config(256, 16),
        rss_bytes=1 << 30,
        nvme_path=str(tmp_path),
        limits={"data": 1 << 30},
        steps=2,
        seq_len=16,
    )
    found = bench_ladder._run_child(spec, arguments, str(tmp_path))
    assert found["status"] == "trained", found["error"]
    assert found["params"] == params_of(spec.model_config)
    assert found["framework_bytes"] < found["peak_rss_bytes"] < 1 << 30
    assert found["all_finite"]
    assert len(found["step_s"]) == 2
    arguments.timeout = 0.01
    late = bench_ladder._run_child(spec, arguments, str(tmp_path))
    assert late == {"status": "failed", "error": "not done after 0 s"}


def test_a_process_that_ends_badly_says_why(tmp_path: Path) -> None:
    arguments = bench_ladder._parser().parse_args(options(tmp_path))
    spec = Spec(model_config={}, rss_bytes=1, nvme_path=str(tmp_path))
    found = bench_ladder._run_child(spec, arguments, str(tmp_path))
    assert found["status"] == "failed"
    assert found["error"].startswith("exit code 1: TypeError")
