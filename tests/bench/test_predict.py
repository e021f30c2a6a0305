"""bench.predict: every configuration is predicted and measured; bytes are predicted exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import predict as bench_predict
from bench.predict import errors_of, main
from tests.support.training.planning import make_profile

MODEL = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 32,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
RATES = {"bf16": 1e9, "fp16": 1e9, "fp32": 1e9}


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(
        bench_predict,
        "CONFIGURATIONS",
        (("cpu", None, 2), ("auto", 0.5, 1), ("nvme", 0.4, 1), ("nvme", 0.4, 3), ("auto", 0.01, 1)),
    )
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 50)
    make_profile(
        nvme_read_bytes_per_s=2e9,
        nvme_write_bytes_per_s=1e9,
        nvme_mixed_bytes_per_s=1.5e9,
        dram_bytes_per_s=5e9,
        update_bytes_per_s=RATES,
        matmul_flop_per_s=RATES,
    ).save(tmp_path / "profile.json")
    return [
        *("--config", str(tmp_path / "model.json"), "--data", str(tmp_path / "text")),
        *("--seq-len", "16", "--steps", "4", "--rounds", "1", "--nvme-path", str(tmp_path)),
        *("--profile", str(tmp_path / "profile.json")),
    ]


def test_json(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--json", "--rounds", "2", "--overlap-updates", "none"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    rows = result["configurations"]
    assert len(rows) == 4
    assert "smallest that works" in result["refused"]["auto, 1% in RAM"]
    for row in rows.values():
        # Seconds are the machine's; bytes are ours.
        assert row["predicted_nvme_read_bytes"] == row["nvme_read_bytes"]
        assert row["predicted_nvme_written_bytes"] == row["nvme_written_bytes"]
    assert rows["auto, 50% in RAM"]["nvme_read_bytes"]["min"] > 0
    cpu = rows["cpu, all in RAM, 2 micro-batches"]
    for end in ("min", "max"):
        traced = 2 * result["traced"]["forward_s"][end]
        assert cpu["predicted_forward_s"][end] == pytest.approx(traced)
    assert cpu["error"]["min"] <= cpu["error"]["median"] <= cpu["error"]["max"]
    errors = [abs(row["error"]["median"]) for row in rows.values()]
    assert result["within_goal"] == sum(error <= result["goal"] for error in errors)
    assert result["worst_error"] == max(errors)
    assert result["mean_error"] == pytest.approx(sum(errors) / len(errors))


def test_errors_say_which_are_beyond_the_goal() -> None:
    found = errors_of({"a": {"error": 0.1}, "b": {"error": {"median": -0.3}}})
    assert found["within_goal"] == 1
    assert found["beyond_goal"] == {"b": -0.3}
    assert found["mean_error"] == pytest.approx(0.2)
    assert found["worst_error"] == 0.3


def test_table(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "nvme, 40% in RAM" in out
    assert "auto, 1% in RAM: left out: " in out
    assert "within 15%:" in out
    assert "error: mean" in out


def test_too_few_steps_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--steps", "2"]) == 2
    assert "--steps must be more than 2" in capsys.readouterr().err
