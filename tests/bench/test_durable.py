"""bench.durable: what it counts, its JSON, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.durable import main
from bench.work import job_steps
from tests.bench.test_checkpoint import MODEL


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(job_steps, "QUIET_S", 0.01)
    monkeypatch.setattr(job_steps, "WARM_UP_STEPS", 2)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "nvme").mkdir()
    model = str(tmp_path / "model.json")
    sizes = ["--seq-len", "16", "--steps", "4", "--rounds", "1", "--every", "1,4"]
    return ["--config", model, *sizes, "--path", str(tmp_path / "nvme")]


@pytest.mark.parametrize("policy", ["nvme", "cpu"])
def test_figures(
    policy: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All state in RAM is written with each commit, once; nothing is left in the end."""
    assert main([*options, "--policy", policy, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plain, every = found["plain"], found["every"]
    assert set(every) == {"1", "4"}
    state_bytes = 12 * found["params"]  # (chunks have some room besides)
    if policy == "cpu":
        assert plain["written_bytes"] == 0
        assert found["plain_bytes"] == 0
        written = every["1"]["written_bytes"]
        assert state_bytes <= written <= 2 * state_bytes
        assert every["4"]["written_bytes"] == pytest.approx(written / 4, rel=0.01)
        assert found["commit_alone"]["written_bytes"] == written
        assert found["durable_bytes"] >= 2 * written
    else:
        assert every["1"]["written_bytes"] >= every["4"]["written_bytes"]
        assert found["durable_bytes"] > found["plain_bytes"] > state_bytes / 2
    assert found["start"]["durable_s"] > 0
    assert not list((tmp_path / "nvme").iterdir())


def test_the_table(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 0
    out = capsys.readouterr().out
    for text in ("a commit every 4 steps", "commit alone", "on NVMe", "torch"):
        assert text in out


def test_refusals(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, why in (
        (["--every", "0"], "--every must be 1 or more"),
        (["--every", "x"], "--every must be a whole number"),
        (["--steps", "0"], "--steps must be 1 or more"),
    ):
        assert main([*options, *wrong]) == 2
        assert why in capsys.readouterr().err
