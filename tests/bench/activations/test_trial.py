"""bench/activations/trial.py: how a try ends, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.activations.training import Spec
from bench.activations.trial import try_to_train

SHAPE = {"layers": 2, "width": 64, "heads": 2, "seq_len": 16, "batch_size": 1}
SPEC = Spec("torch-checkpoints", SHAPE, 256)


def fake(folder: Path, body: str) -> str:
    """An "interpreter" that runs `body` in place of the program; it has the path in argv[3]."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
    script.chmod(0o755)
    return str(script)


def run(tmp_path: Path, body: str, budget: int | None = None, timeout_s: float = 600) -> dict:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    found = try_to_train(SPEC, str(nvme), timeout_s, budget, fake(tmp_path, body))
    assert list(nvme.iterdir()) == []
    return found


STAYS = "import signal; print('step 1: 0.5 s', file=sys.stderr, flush=True); signal.pause()"


def test_one_beyond_its_budget_is_ended(tmp_path: Path) -> None:
    found = run(tmp_path, "held = b'1' * (64 << 20); " + STAYS, 32 << 20)
    assert found["status"] == "over"
    assert found["peak_bytes"] > 32 << 20
    assert "resident" in found["error"]


def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    found = run(tmp_path, STAYS, timeout_s=0.0)
    assert found["status"] == "late"
    assert "not done after 0 s" in found["error"]


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("os.kill(os.getpid(), 6)", "failed", "ended by SIGABRT: it printed nothing"),
        ("sys.exit('a bug')", "broken", "exit code 1: a bug"),
    ],
)
def test_how_one_dies(tmp_path: Path, body: str, status: str, error: str) -> None:
    found = run(tmp_path, body)
    assert (found["status"], found["error"]) == (status, error)


def test_the_peak_that_it_says_itself_counts(tmp_path: Path) -> None:
    answer = {"status": "trained", "error": None, "peak_bytes": 2 << 30, "steps_s": [1.0]}
    found = run(tmp_path, f"print(json.dumps({answer!r}))".replace("None", "None"), 1 << 30)
    assert found["status"] == "over"
    assert found["error"] == "2.0 GiB were resident"


def test_what_it_is_told(tmp_path: Path) -> None:
    body = (
        "spec = json.load(open(sys.argv[3]))\n"
        "print(json.dumps({'status': 'trained', 'error': None, 'peak_bytes': 1, 'spec': spec,"
        " 'arenas': os.environ['MALLOC_ARENA_MAX']}))"
    )
    found = run(tmp_path, body, 1 << 30)
    assert found["spec"]["limits"] == {"data": 2 << 30}
    assert os.path.dirname(found["spec"]["options"]["nvme_path"]) == str(tmp_path / "nvme")
    assert found["arenas"] == "1"
    assert json.loads(json.dumps(found["spec"]["shape"])) == SHAPE
