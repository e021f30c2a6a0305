"""bench.activations: what is in a bound, bytes of parameters, and the same losses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.activations import __main__ as program
from bench.activations.__main__ import main
from bench.activations.training import Spec

GB = 10**9
TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--vocabulary", "256"]
STEPS_S = {"in memory": 10.0, "auto": 11.0, "none": 24.0, "all": 14.0}
# Written and read: of activations, and of state.
MOVED = {"in memory": (0, 0), "auto": (4 * GB, 10 * GB), "none": (30 * GB, 10 * GB)}
MOVED["all"] = (2 * GB, 10 * GB)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """Steps as above, and a disk that moves 2 GB/s."""
    made: list[Spec] = []

    def try_to_train(spec: Spec, *_: Any) -> dict[str, Any]:
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
            "before_bytes": 1 << 30,
            "losses": [1.0],
            "bytes_per_step": {} if name == "in memory" and spec.contender == "torch" else moved,
            "peak_bytes": 3 << 30 if name == "none" else 2 << 30,
        }

    def disk(read_share: float) -> dict[str, float]:
        assert read_share == 0.5
        return {"gbps": 2.0}

    monkeypatch.setattr(program, "try_to_train", try_to_train)
    monkeypatch.setattr(program, "disk_alone", lambda *_: nullcontext(disk))
    return made


def medians(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {metric: spread["median"] for metric, spread in figures.items()}
        for name, figures in result["results"].items()
    }


def arguments(path: Path, *more: str) -> list[str]:
    sizes = ["--seq-len", "4096", "--io-size", "32MiB", "--path", str(path)]
    return ["--compare", "recompute", *TINY, *sizes, *more]


def test_json(no_processes: list[Spec], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path, "--json", "--rounds", "2")) == 0
    result = json.loads(capsys.readouterr().out)
    found = medians(result)
    assert [found[name]["bound_s"] for name in STEPS_S] == [10.0, 10.0, 20.0, 10.0]
    assert [found[name]["nvme_s"] for name in STEPS_S] == [0.0, 7.0, 20.0, 6.0]
    assert [found[name]["ratio"] for name in STEPS_S] == [1.0, 1.1, 1.2, 1.4]
    assert found["none"]["activation_bytes"] == 30 * GB
    assert found["none"]["state_bytes"] == 10 * GB
    # In turns, each round beginning with another one.
    order = [spec.options.get("recompute", "in memory") for spec in no_processes]
    assert order == ["in memory", "auto", "none", "all", "auto", "none", "all", "in memory"]
    assert no_processes[0].options == {"placement_policy": "cpu"}
    assert no_processes[1].options["process_memory"] == 2560 << 20
    assert list(tmp_path.iterdir()) == []


def test_some_of_them_beside_pytorch(
    no_processes: list[Spec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, "--compute", "torch", "--contenders", "none")) == 0
    assert [spec.contender for spec in no_processes] == ["torch", "hetero"]
    out = capsys.readouterr().out
    for text in ("in memory", "1.20", "2.0 GiB", "NVMe", "--compute torch"):
        assert text in out
    assert "auto" not in out.partition("--contenders")[2]


def sample(step_s: float, state: float, activations: float) -> dict[str, Any]:
    moved = {
        "activations_read": activations,
        "activations_written": activations,
        "disk_read": activations + state / 2,
        "disk_write": activations + state / 2,
    }
    about = {"status": "trained", "forward_s": 1.0, "before_bytes": 0, "explained": ""}
    about |= {"peak_bytes": 1, "losses": [1.0], "seconds": 1.0}
    return {**about, "step_s": step_s, "bytes_per_step": moved}


def test_parameters_and_gradients_are_what_each_micro_batch_adds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 20 bytes of optimizer state a step, 5 of parameters and gradients a micro-batch.
    samples = iter([sample(1.0, 25, 0), sample(4.0, 20 + 8 * 5, 0), sample(3.0, 25, 7)])
    monkeypatch.setattr(program, "try_to_train", lambda *_: next(samples))
    assert main(["--compare", "batches", *TINY, "--path", str(tmp_path), "--json"]) == 0
    found = medians(json.loads(capsys.readouterr().out))
    assert [each["param_and_grad_bytes"] for each in found.values()] == [5, 40, 5]
    assert found["large batch"]["of_base"] == 0.75
    assert found["large batch"]["activation_bytes"] == 14


def test_losses_that_differ_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([[1.0], [1.0], [1.5]])
    monkeypatch.setattr(
        program, "try_to_train", lambda *_: {**sample(1.0, 1, 1), "losses": next(losses)}
    )
    chosen = "torch,hetero-off,hetero"
    assert main([*TINY, "--contenders", chosen, "--path", str(tmp_path)]) == 2
    assert "contenders of hetero have different losses" in capsys.readouterr().err
