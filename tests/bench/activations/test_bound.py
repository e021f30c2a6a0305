"""bench.activations.bound: what is in a bound, and what recomputing is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.activations import bound
from bench.activations.bound import main
from bench.activations.training import Spec

GB = 10**9
TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--vocabulary", "256"]
STEPS_S = {"in memory": 10.0, "auto": 11.0, "none": 24.0, "all": 14.0}
# Written and read: of activations, and of state.
MOVED = {"in memory": (0, 0), "auto": (4 * GB, 10 * GB), "none": (30 * GB, 10 * GB)}
BLOCKS = {"forward_s": 4.0, "saved_bytes": 15 * GB, "input_bytes": 1 * GB}
MOVED["all"] = (2 * GB, 10 * GB)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """Steps as above, and a disk that moves 2 GB/s."""
    made: list[Spec] = []

    def run_trial(spec: Spec, *_: Any) -> dict[str, Any]:
        made.append(spec)
        name = spec.options.get("recompute", "in memory")
        activations, state = MOVED[name]
        moved = {
            "activations_read": activations / 2,
            "activations_written": activations / 2,
            "disk_read": (activations + state) / 2,
            "disk_write": (activations + state) / 2,
        }
        return {
            "status": "trained",
            "error": None,
            "seconds": 1.0,
            "forward_s": 3.0,
            "step_s": STEPS_S[name],
            "explained": "",
            "blocks": BLOCKS if spec.measure_blocks else None,
            "bytes_per_step": {} if name == "in memory" and spec.contender == "torch" else moved,
            "peak_bytes": 3 << 30 if name == "none" else 2 << 30,
            "io_engine": None if name == "in memory" else "threads",
        }

    class Disk:
        def __init__(self, *_: Any) -> None:
            pass

        def __enter__(self) -> Disk:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def sample_share(self, read_share: float) -> dict[str, float]:
            assert read_share == 0.5
            return {"gbps": 2.0}

    monkeypatch.setattr(bound, "run_trial", run_trial)
    monkeypatch.setattr(bound, "HeteroTransfers", Disk)
    monkeypatch.setattr(bound, "DEPTH", 2)
    return made


def arguments(path: Path, *more: str) -> list[str]:
    return [*TINY, "--seq-len", "4096", "--io-size", "32MiB", "--path", str(path), *more]


def test_json(no_processes: list[Spec], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path, "--json", "--rounds", "2")) == 0
    result = json.loads(capsys.readouterr().out)
    found = result["results"]
    assert [found[name]["bound_s"] for name in STEPS_S] == [10.0, 10.0, 20.0, 10.0]
    assert [found[name]["bound"] for name in STEPS_S] == ["compute", "compute", "NVMe", "compute"]
    assert [found[name]["ratio"] for name in STEPS_S] == [1.0, 1.1, 1.2, 1.4]
    assert [found[name]["is_within"] for name in STEPS_S] == [None, True, False, True]
    assert found["none"]["activation_bytes"] == 30 * GB
    assert found["none"]["state_bytes"] == 10 * GB
    crossing = result["crossing"]
    assert crossing["block_forward_s"] == 2.0
    assert crossing["block_bytes"] == 2 * (15 - 1) * GB / 2
    assert crossing["block_gbps"] == 7.0
    assert crossing["step_gbps"] == pytest.approx((10 + 28) / 14)
    assert crossing["seq_len"] == pytest.approx(3.5 * (12 * 64 + 4096) - 12 * 64)
    assert (crossing["offloading_s"], crossing["recomputing_s"]) == (14.0, 4.0)
    # In turns, each round beginning with another one.
    order = [spec.options.get("recompute", "in memory") for spec in no_processes]
    assert order == ["in memory", "auto", "none", "all", "auto", "none", "all", "in memory"]
    assert no_processes[0].options == {"placement_policy": "cpu"}
    assert no_processes[1].options["process_memory"] == 2560 << 20
    assert list(tmp_path.iterdir()) == []


def test_table(
    no_processes: list[Spec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, "--compute", "torch")) == 0
    assert no_processes[0].contender == "torch"
    out = capsys.readouterr().out
    for text in ("in memory", "1.20", "(beyond)", "7.00 GB/s", "--compute torch"):
        assert text in out


def test_only_some_of_recompute(
    no_processes: list[Spec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, "--recompute", "auto")) == 0
    assert len(no_processes) == 2
    out = capsys.readouterr().out
    assert "7.00 GB/s" in out
    assert "recomputing all" not in out


@pytest.mark.extra
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--seq-len", "128", "--steps", "1", "--recompute", "none", "--json")
    memory = ("--process-memory", "800MiB", "--io-size", "512MiB")
    assert main(arguments(tmp_path, *more, *memory)) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert found["in memory"]["blocks"]["forward_s"] > 0
    assert found["none"]["nvme_gbps"] > 0
    assert found["none"]["state_bytes"] >= 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "fact"),
    [
        ("--recompute", "some", "unknown 'some' in --recompute"),
        ("--steps", "0", "--steps must be 1 or more"),
        ("--process-memory", "lots", "--process-memory: cannot read 'lots'"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, fact: str
) -> None:
    assert main(arguments(tmp_path, option, value)) == 2
    assert fact in capsys.readouterr().err.splitlines()[-1]
