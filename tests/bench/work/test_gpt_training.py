"""bench/work/gpt_training: what each contender does, and how a try in a process ends."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.work import gpt_training
from bench.work.gpt_training import Spec, run, try_to_train

SHAPE = {"layers": 2, "width": 32, "heads": 2, "seq_len": 16, "batch_size": 4}
SPEC = Spec("torch", SHAPE, 128)


def test_ways_of_pytorch_compute_the_same() -> None:
    plain = run(SPEC)
    assert plain["status"] == "trained"
    assert len(plain["steps_s"]) == 2
    assert plain["step_s"] == plain["steps_s"][1]
    assert plain["bytes_per_step"] == {}
    for name in ("torch-oncpu", "torch-checkpoints", "torch-checkpoints-oncpu"):
        assert run(replace(SPEC, contender=name))["losses"] == plain["losses"]


def test_hetero(tmp_path: Path) -> None:
    options = {"placement_policy": "nvme", "nvme_path": str(tmp_path), "host_memory": 4 << 20}
    spec = Spec("hetero", SHAPE, 128, options, steps=3)
    found = run(spec)
    assert found["status"] == "trained"
    assert found["losses"] == pytest.approx(run(replace(SPEC, steps=3))["losses"], rel=1e-2)
    assert {"disk_read", "activations_read"} <= set(found["bytes_per_step"])
    assert found["peak_managed_bytes"]["host"] <= 4 << 20
    assert found["peak_bytes"] > found["before_bytes"] > 0
    whole = replace(spec, contender="hetero-whole")
    checkpoints = replace(spec, contender="hetero-whole-checkpoints")
    assert run(whole)["losses"] == run(checkpoints)["losses"]


def test_bytes_are_of_the_steps_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []

    def traffic() -> dict[str, int]:
        moved.append(100 if not moved else 170)  # before the steps that count, and after them
        return {"h2d": moved[-1]}

    made = gpt_training._make_torch(SPEC)
    monkeypatch.setattr(gpt_training, "_make_torch", lambda spec: replace(made, traffic=traffic))
    found = run(replace(SPEC, steps=9, skip_steps=2))
    assert (len(found["steps_s"]), found["bytes_per_step"]) == (9, {"h2d": 10})
    moved.clear()
    found = run(replace(SPEC, steps=9, skip_steps=2, enough_s=0.0))
    assert (len(found["steps_s"]), found["bytes_per_step"]) == (3, {"h2d": 70})


def test_a_refusal_and_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"placement_policy": "cpu", "host_memory": 4096}
    found = run(Spec("hetero", SHAPE, 128, options))
    assert found["status"] == "refused"
    assert "host_memory" in found["error"]

    def fail(_: Spec) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    monkeypatch.setattr(gpt_training, "_train", fail)
    assert run(SPEC)["status"] == "failed"


def test_an_error_that_is_not_of_memory_is_raised() -> None:
    with pytest.raises(ValueError, match="no multiple of 3 heads"):
        run(replace(SPEC, shape={**SHAPE, "heads": 3}))


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `body` in place of the program; it has the path in argv[3]."""
    (tmp_path / "nvme").mkdir()

    def try_it(body: str, budget: int | None = None, timeout_s: float = 600) -> dict[str, Any]:
        script = tmp_path / "python"
        script.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
        script.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(gpt_training.sys, "executable", str(script))
            spec = replace(SPEC, contender="hetero")
            found = try_to_train(spec, str(tmp_path / "nvme"), timeout_s, budget)
        assert list((tmp_path / "nvme").iterdir()) == []
        return found

    return try_it


STAYS = "import signal; print('step 1: 0.5 s', file=sys.stderr, flush=True); signal.pause()"


def test_one_beyond_its_budget_is_ended(tried: Any) -> None:
    found = tried("held = b'1' * (64 << 20); " + STAYS, 32 << 20)
    assert found["status"] == "over"
    assert found["peak_bytes"] > 32 << 20
    assert "resident" in found["error"]


def test_one_that_takes_too_long_is_ended(tried: Any) -> None:
    found = tried(STAYS, timeout_s=0.0)
    assert found["status"] == "late"
    assert "not done after 0 s" in found["error"]


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("os.kill(os.getpid(), 6)", "failed", "ended by SIGABRT: it printed nothing"),
        ("sys.exit('a bug')", "broken", "exit code 1: a bug"),
    ],
)
def test_how_one_dies(tried: Any, body: str, status: str, error: str) -> None:
    found = tried(body)
    assert (found["status"], found["error"]) == (status, error)


def test_the_peak_that_it_says_itself_counts(tried: Any) -> None:
    answer = {"status": "trained", "error": "", "peak_bytes": 2 << 30, "steps_s": [1.0]}
    found = tried(f"print(json.dumps({answer!r}))", 1 << 30)
    assert found["status"] == "over"
    assert found["error"] == "2.0 GiB were resident"


def test_what_it_is_told(tried: Any, tmp_path: Path) -> None:
    body = (
        "spec = json.load(open(sys.argv[3]))\n"
        "print(json.dumps({'status': 'trained', 'error': None, 'peak_bytes': 1, 'spec': spec,"
        " 'arenas': os.environ['MALLOC_ARENA_MAX']}))"
    )
    found = tried(body, 1 << 30)
    assert found["spec"]["limits"] == {"data": 2 << 30}
    assert os.path.dirname(found["spec"]["options"]["nvme_path"]) == str(tmp_path / "nvme")
    assert found["arenas"] == "1"
    assert found["spec"]["shape"] == SHAPE
