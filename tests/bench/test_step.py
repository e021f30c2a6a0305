"""bench.step: what it counts, its JSON, the curve, and how it refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.harness.rounds import Rounds
from bench.peers.deepspeed_step import chain_shape
from bench.step import main, of_bound
from bench.work import bandwidths
from bench.work.curve import buffer_counts, draw_curve, measure_curve
from bench.work.step_model import HeteroStep, make_plan, tensor_shape

PARAMS = 300_000
CHUNK = 8192
OPTIM_STATE_BYTES = CHUNK * 10


@pytest.fixture(autouse=True)
def small_yardsticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less disk, memory and time than what a machine needs to be measured."""
    monkeypatch.setattr(bandwidths, "DISK_WINDOW_S", 0.01)
    monkeypatch.setattr(bandwidths, "STREAM_NUMEL", 1 << 16)


def options(path: Path, *more: str) -> list[str]:
    return [
        *(
            "--params",
            str(PARAMS),
            "--host-memory",
            str(4 * OPTIM_STATE_BYTES),
            "--path",
            str(path),
        ),
        *("--rounds", "2", "--steps", "2", "--chunk-numel", str(CHUNK), "--io-size", "16MiB"),
        *more,
    ]


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, *options(tmp_path))
    each, count = tensor_shape(PARAMS)
    assert result["params"] == each * count >= PARAMS
    assert result["chunk_numel"] == CHUNK
    assert result["optim_state_bytes"] == OPTIM_STATE_BYTES
    assert result["buffers"] == 4
    assert result["host_memory"] == 4 * OPTIM_STATE_BYTES == result["peak_managed_bytes"]
    assert result["resident_bytes"] == result["optim_states"] * CHUNK * 4
    moved = (result["optim_states"] - 4) * OPTIM_STATE_BYTES
    assert list(result["contenders"]) == ["hetero", "disk alone", "memory alone"]
    own = result["contenders"]["hetero"]
    for direction in ("read_bytes", "written_bytes"):
        assert own[direction] == {"median": moved, "min": moved, "max": moved}
    assert own["step_s"]["min"] > 0
    assert own["share_of_bound"]["min"] > 0
    assert result["machine"]["cores"] >= 1
    assert "--chunk-numel 8192" in result["command"]
    assert list(tmp_path.iterdir()) == []


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curve.png"
    folder = tmp_path / "nvme"
    folder.mkdir()
    assert main(options(folder, "--curve", "--picture", str(picture))) == 0
    out = capsys.readouterr().out
    for text in ("hetero", "disk alone", "memory alone", "4 buffers of 80.0 KiB", str(picture)):
        assert text in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(folder.iterdir()) == []


def test_traffic_falls_in_a_straight_line_to_nothing(tmp_path: Path) -> None:
    points = measure_curve(PARAMS, str(tmp_path), CHUNK, steps=2)
    optim_states = points[-1]["buffers"]
    assert [point["buffers"] for point in points] == buffer_counts(optim_states)
    for point in points:
        streamed = (optim_states - point["buffers"]) * OPTIM_STATE_BYTES
        assert point["host_memory"] == point["buffers"] * OPTIM_STATE_BYTES
        assert point["read_bytes"] == point["written_bytes"] == streamed
        assert point["theory_bytes"] == 2 * streamed
    assert points[-1]["theory_bytes"] == 0


def test_counts_of_buffers_span_from_few_to_all() -> None:
    assert buffer_counts(63) == [4, 12, 20, 29, 37, 46, 54, 63]
    assert buffer_counts(6) == [4, 5, 6]
    assert buffer_counts(2) == [2]


def test_a_sample_waits_for_the_last_write(tmp_path: Path) -> None:
    plan = make_plan(PARAMS, OPTIM_STATE_BYTES, str(tmp_path), CHUNK)
    assert plan.buffers == 1
    with HeteroStep(PARAMS, plan) as step:
        step.sample(1)
        before = step._engine.chunk_groups[0].disk.io.stats
        sample = step.sample(3)
        after = step._engine.chunk_groups[0].disk.io.stats
    # What the pipeline submitted has been completed by the engine.
    assert after["written_bytes"] - before["written_bytes"] == 3 * sample["written_bytes"]
    assert sample["written_bytes"] == (plan.optim_states - 1) * OPTIM_STATE_BYTES


def test_bound_is_the_larger_one_of_each_round() -> None:
    step = {"read_bytes": 3e9, "written_bytes": 1e9, "compute_s": 0.1, "read_wait_s": 0.0}
    step |= {"write_wait_s": 0.0}
    rounds = Rounds(
        samples={
            "hetero": [step | {"step_s": 4.0}, step | {"step_s": 10.0}, step | {"step_s": 2.0}],
            "disk alone": [{"gbps": 2.0}, {"gbps": 0.5}, {"gbps": 4.0}],
            "memory alone": [{"gbps": 26.0}, {"gbps": 26.0}, {"gbps": 13.0}],
            "deepspeed": [{"step_s": 8.0}, {"step_s": 30.0}, {"step_s": 6.0}],
        }
    )
    rounds.derive("hetero", partial(of_bound, 1_000_000_000))
    rounds.compare("hetero", "step_s", "of_hetero")
    own = rounds.figures()["hetero"]
    # disk: 2, 8, 1 s; memory: 1, 1, 2 s; bound: 2, 8, 2 s
    assert own["disk_s"] == {"median": 2.0, "min": 1.0, "max": 8.0}
    assert own["memory_s"]["median"] == 1.0
    assert own["bound_s"]["median"] == 2.0
    assert own["share_of_bound"]["median"] == 0.8
    assert rounds.median("deepspeed", "of_hetero") == 3.0


def test_a_missing_peer_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(tmp_path / "python")
    more = ("--peers", "deepspeed", "--peer-python", nowhere)
    result = run_json(capsys, *options(tmp_path, *more))
    assert "deepspeed" not in result["contenders"]
    assert any("deepspeed: left out: cannot start" in note for note in result["notes"])
    assert list(tmp_path.iterdir()) == []


def test_picture_of_no_traffic_at_all(tmp_path: Path) -> None:
    point = {"host_memory": 10, "theory_bytes": 0, "read_bytes": 0, "written_bytes": 0}
    draw_curve([point], 1000, str(tmp_path / "curve.png"))
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_shape_of_deepspeeds_model() -> None:
    for params in (10_000, 1_000_000, 500_000_000):
        width, layers = chain_shape(params)
        assert abs(width * width * layers - params) <= width * width / 2
        assert width <= 2048


@pytest.mark.parametrize(
    ("option", "value", "fact"),
    [
        ("--params", "many", "--params: cannot read 'many'"),
        ("--params", "inf", "--params: cannot read 'inf'"),
        ("--params", "0", "--params must be a whole number of 1 or more"),
        ("--peers", "deepsped", "did you mean deepspeed"),
        ("--host-memory", "lots", "--host-memory: cannot read 'lots'"),
        ("--host-memory", "79KiB", "less than one optimizer state of 80.0 KiB"),
        ("--path", "/nonexistent", "does not exist"),
        ("--rounds", "0", "--rounds"),
        ("--chunk-numel", "100", "chunk_numel must be a positive multiple"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, fact: str
) -> None:
    assert main([*options(tmp_path), option, value]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("bench.step: error: ")
    assert fact in error
    assert list(tmp_path.iterdir()) == []
