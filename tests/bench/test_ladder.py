"""bench.ladder: which models are tried, what counts as proven, its JSON, and how it refuses."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import ladder as bench_ladder
from bench.harness.contenders import Outcome
from bench.ladder import main
from bench.largest_model import peer_rungs, rungs, shapes
from bench.largest_model.climb import climb
from bench.largest_model.limited_train import MARGIN_BYTES, Spec, outside_bytes
from bench.largest_model.rungs import Rungs, fits
from bench.largest_model.shapes import Shape, family, params_of
from hetero.cli.job.models import count_parameters, model_config
from hetero.cli.job.options import TrainOptions

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
        host = spec.host_memory or spec.rss_bytes - FRAMEWORK - outside - MARGIN_BYTES
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
    monkeypatch.setattr(bench_ladder, "run_child", machine)
    monkeypatch.setattr(shapes, "MOST_WIDTH", 512)
    monkeypatch.setattr(shapes, "MOST_LAYERS", 8)
    monkeypatch.setattr(shapes, "LEAST_GROWTH", 1.1)
    monkeypatch.setattr(rungs, "free_bytes", lambda path: 1 << 30)
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
    budgets = [FRAMEWORK + MARGIN_BYTES + n * MIB // 2 for n in (3, 8, 400, 800)]
    argv = options(tmp_path, "--budgets", ",".join(map(str, budgets)), "--limit", "address")
    result = run_json(capsys, argv)
    found = result["rungs"]
    assert [r["budget_bytes"] for r in found] == budgets
    assert result["framework_bytes"] == FRAMEWORK
    sizes = [r["params"] for r in found]
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3]
    assert [r["limited_by"] for r in found] == ["RAM", "RAM", *["the widest of shapes"] * 2]
    assert found[3]["proven_at_bytes"] == budgets[2]
    assert found[3]["tries"] == []
    for rung in found:
        assert rung["status"] == "trained"
        assert rung["peak_rss_bytes"] <= rung["budget_bytes"]
        assert rung["peer"] is None
    for rung in found[:2]:  # the plan knows the engine's part, so its guess is near
        assert 2 <= len(rung["tries"]) <= 4
        worked = [t["params"] for t in rung["tries"] if t["status"] == "trained"]
        others = [t["params"] for t in rung["tries"] if t["status"] != "trained"]
        everything = [params_of(c) for c in family(256, 16)]
        assert rung["params"] == max(worked)
        assert min(others) == everything[everything.index(max(worked)) + 1]
    first, *others = machine.specs
    assert first.limits == {}
    assert {tuple(s.limits.items()) for s in others} <= {(("address", 2 * b),) for b in budgets}
    assert list(tmp_path.iterdir()) == []


def test_a_peak_above_the_budget_is_not_proven(machine: Machine, tmp_path: Path) -> None:
    """Each attempt gives the engine less by what was too much, and the next model begins so."""
    ladder = make(tmp_path, machine)
    budget = FRAMEWORK + 300 * MIB
    config = Shape(2, 256).config(256, 16)
    outside = outside_bytes(replace(machine.specs[0], model_config=config))
    machine.more = 1 + 2 * MARGIN_BYTES / outside
    rung = ladder.prove(config, budget)
    assert rung["status"] == "trained"
    assert rung["peak_rss_bytes"] <= budget
    first, second = machine.specs[-2:]
    assert first.host_memory is None
    assert second.host_memory is not None
    assert second.host_memory <= budget - FRAMEWORK - outside * machine.more
    rung = ladder.prove(config, budget)
    assert rung["status"] == "trained"
    assert len(machine.specs) == 4  # the framework's, two, one
    machine.more = 1e4
    rung = ladder.prove(config, budget)
    assert rung["status"] == "failed"
    assert "above the budget" in rung["error"]


def make(tmp_path: Path, machine: Machine, *more: str) -> Rungs:
    arguments = bench_ladder.PROGRAM.parse(options(tmp_path, *more))
    return Rungs(arguments, tmp_path, machine)


def test_shapes_are_what_the_disk_holds(machine: Machine, tmp_path: Path) -> None:
    found = make(tmp_path, machine).shapes
    assert found == family(256, 16)
    few = make(tmp_path, machine, "--most-params", "1e6")
    assert few.shapes == [c for c in found if params_of(c) <= 1e6]
    assert few.rung(1 << 40)["limited_by"] == "--most-params"
    with pytest.raises(ValueError, match="not even .* parameters: --most-params"):
        make(tmp_path, machine, "--most-params", "1")


def test_the_disk_is_the_limit(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rungs, "free_bytes", lambda path: 100 * MIB)
    ladder = make(tmp_path, machine)
    assert params_of(ladder.shapes[-1]) * 18 <= 95 * MIB
    assert ladder.rung(1 << 40)["limited_by"] == "disk"


def test_only_tries_so_many_shapes(machine: Machine, tmp_path: Path) -> None:
    machine.more = 1000.0
    rung = make(tmp_path, machine, "--tries", "2").rung(FRAMEWORK + 200 * MIB)
    assert rung["status"] == "none"
    sizes = [one["params"] for one in rung["tries"]]
    assert len(sizes) == 2
    assert sizes[1] < sizes[0]
    assert all("above the budget" in one["error"] for one in rung["tries"])


def test_what_takes_too_long_does_not_fit_in_time(machine: Machine, tmp_path: Path) -> None:
    slow = 3_000_000

    def run(spec: Spec) -> dict[str, Any]:
        if params_of(spec.model_config) > slow:
            return {"status": "late", "error": "not done after 9 s: it does not fit in time"}
        return machine(spec)

    arguments = bench_ladder.PROGRAM.parse(options(tmp_path, "--tries", "20"))
    ladder = Rungs(arguments, tmp_path, run)
    rung = ladder.rung(1 << 40)
    assert (rung["status"], rung["limited_by"]) == ("trained", "time")
    assert rung["config"] == max((c for c in ladder.shapes if params_of(c) <= slow), key=params_of)


@pytest.mark.parametrize(("vocab_size", "seq_len"), [(50257, 128), (50257, 1024), (32000, 128)])
def test_neighbouring_shapes_are_of_nearly_the_same_size(vocab_size: int, seq_len: int) -> None:
    found = family(vocab_size, seq_len)
    sizes = [params_of(c) for c in found]
    for before, after in itertools.pairwise(sizes):
        assert 1.06 <= after / before <= 1.15
    assert sizes[0] < 5e6
    assert sizes[-1] > 25e9
    # Memory is a matter of width first.
    widths = [c["n_embd"] for c in found]
    assert widths == sorted(widths)
    for config in found:
        assert config["n_embd"] % config["n_head"] == 0
        assert config["n_embd"] < 512 or config["n_embd"] == 64 * config["n_head"]


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
    assert climb(50, 99, lambda number: False, 2) is None


def test_beyond_ram(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Memory:
        total = 100 * MIB

    monkeypatch.setattr(rungs.psutil, "virtual_memory", Memory)
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


class Peer:
    """Instead of DeepSpeed: takes 300 MiB and 20 bytes a parameter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.commands: list[tuple[str, ...]] = []
        self.late_params = 1e12
        self.status = "finished"
        monkeypatch.setattr(peer_rungs, "run_contender", self)
        monkeypatch.setattr(peer_rungs, "FLOOR_BYTES", 200 * MIB)
        # What hetero trains is no matter here.
        monkeypatch.setattr(Rungs, "all", lambda _, budgets: map(self.rung, budgets))

    @staticmethod
    def rung(budget: int) -> dict[str, Any]:
        return {"budget_bytes": budget, "status": "none", "tries": []}

    def __call__(self, contender: Any, timeout_s: float, more: dict[str, str]) -> Outcome:
        self.commands.append(contender.command)
        workload = json.loads(Path(contender.command[3]).read_text())
        params = params_of(workload["model_config"])
        if self.status == "missing":
            return Outcome(contender.name, "missing", {}, "no deepspeed")
        if params > self.late_params:
            return Outcome(contender.name, "failed", {}, "not done after 9 s", late=True)
        peak = 300 * MIB + 20 * params
        return Outcome(
            contender.name, "finished", {"peak_rss_by_rank_bytes": [peak], "step_s": [1.0]}
        )


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Peer:
    return Peer(monkeypatch, tmp_path)


PEER_BUDGETS = (301 * MIB, 320 * MIB, 400 * MIB)


def peer_argv(tmp_path: Path) -> list[str]:
    budgets = ",".join(map(str, PEER_BUDGETS))
    peers = ("--peers", "deepspeed", "--peer-python", "py")
    return options(tmp_path, *peers, "--budgets", budgets, "--tries", "12")


@pytest.fixture
def short_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a corpus, which takes its time each time."""

    def write(options: TrainOptions, path: Path, lean: bool) -> None:
        assert options.config is not None
        path.write_text(json.dumps({"model_config": json.loads(Path(options.config).read_text())}))

    monkeypatch.setattr(peer_rungs, "write_workload", write)


@pytest.mark.usefixtures("short_workload")
def test_peers_are_searched_for_in_the_same_way(
    machine: Machine, peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_json(capsys, peer_argv(tmp_path))
    assert all(command[0] == "py" and "nvme" in command for command in peer.commands)
    sizes = [params_of(c) for c in family(256, 16)]
    for rung in result["rungs"]:
        most = (rung["budget_bytes"] - 300 * MIB) // 20
        within = [n for n in sizes if n <= most]
        assert (rung["peer"] or {}).get("params") == (max(within) if within else None)
    assert result["rungs"][0]["peer"] is None
    # No shape is trained twice.
    assert len(peer.commands) == len(result["peer_runs"]) < len(sizes)


@pytest.mark.usefixtures("short_workload")
def test_peers_that_take_too_long_do_not_fit_in_time(
    machine: Machine, peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.late_params = 1e6
    result = run_json(capsys, peer_argv(tmp_path))
    (largest,) = {r["peer"]["params"] for r in result["rungs"][1:]}
    assert largest == max(n for n in map(params_of, family(256, 16)) if n <= 1e6)
    late = [run for run in result["peer_runs"] if run["status"] == "late"]
    assert late[0]["error"] == "not done after 9 s: it does not fit in time"


def test_a_missing_peer_is_said(
    machine: Machine, peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.status = "missing"
    assert main(peer_argv(tmp_path)) == 0
    assert "no DeepSpeed: no deepspeed" in capsys.readouterr().out
    assert len(peer.commands) == 1


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
    arguments = bench_ladder.PROGRAM.parse(options(tmp_path))
    spec = Spec(
        model_config=Shape(2, 64).config(256, 16),
        rss_bytes=1 << 30,
        nvme_path=str(tmp_path),
        limits={"data": 1 << 30},
        steps=2,
        seq_len=16,
    )
    found = rungs.run_child(spec, arguments, str(tmp_path))
    assert found["status"] == "trained", found["error"]
    assert found["params"] == params_of(spec.model_config)
    assert found["framework_bytes"] < found["peak_rss_bytes"] < 1 << 30
    assert found["all_finite"]
    assert len(found["step_s"]) == 2
    arguments.timeout = 0.01
    late = rungs.run_child(spec, arguments, str(tmp_path))
    assert late == {"status": "late", "error": "not done after 0 s: it does not fit in time"}


def test_a_process_that_ends_badly_says_why(tmp_path: Path) -> None:
    arguments = bench_ladder.PROGRAM.parse(options(tmp_path))
    spec = Spec(model_config={}, rss_bytes=1, nvme_path=str(tmp_path))
    found = rungs.run_child(spec, arguments, str(tmp_path))
    assert found["status"] == "failed"
    assert found["error"].startswith("exit code 1: TypeError")
