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
            "before_bytes": 1 << 30,
            "losses": [1.0],
            "bytes_per_step": {} if name == "in memory" and spec.contender == "torch" else moved,
            "peak_bytes": 3 << 30 if name == "none" else 2 << 30,
        }

    def disk(read_share: float) -> dict[str, float]:
        assert read_share == 0.5
        return {"gbps": 2.0}

    monkeypatch.setattr(program, "run_trial", run_trial)
    monkeypatch.setattr(program, "disk_alone", lambda *_: nullcontext(disk))
    return made


def medians(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {metric: spread["median"] for metric, spread in figures.items()}
        for name, figures in result["results"].items()
    }


def arguments(path: Path, *more: str) -> list[str]:
    return [
        "--compare",
        "recompute",
        *TINY,
        "--seq-len",
        "4096",
        "--io-size",
        "32MiB",
        "--path",
        str(path),
        *more,
    ]


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


def test_table(
    no_processes: list[Spec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, "--compute", "torch")) == 0
    assert no_processes[0].contender == "torch"
    out = capsys.readouterr().out
    for text in ("in memory", "1.20", "2.0 GiB", "NVMe", "--compute torch"):
        assert text in out


def test_only_some_of_them(
    no_processes: list[Spec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, "--contenders", "auto")) == 0
    assert len(no_processes) == 2
    assert "none" not in capsys.readouterr().out.partition("recompute")[2]


@pytest.mark.extra
def test_recomputing_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--seq-len", "128", "--steps", "1", "--contenders", "none", "--json")
    memory = ("--process-memory", "800MiB", "--io-size", "512MiB")
    assert main(arguments(tmp_path, *more, *memory)) == 0
    found = medians(json.loads(capsys.readouterr().out))
    assert found["none"]["nvme_gbps"] > 0
    assert found["none"]["state_bytes"] >= 0
    assert list(tmp_path.iterdir()) == []


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
    monkeypatch.setattr(program, "run_trial", lambda *_: next(samples))
    assert main(["--compare", "batches", *TINY, "--path", str(tmp_path), "--json"]) == 0
    found = medians(json.loads(capsys.readouterr().out))
    assert [each["param_and_grad_bytes"] for each in found.values()] == [5, 40, 5]
    assert found["large batch"]["of_base"] == 0.75
    assert found["large batch"]["activation_bytes"] == 14


@pytest.mark.extra
def test_batches_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--host-memory", "16MiB", "--activation-memory", "12MiB", "--seq-len", "64")
    more = ("--steps", "1", "--path", str(tmp_path), "--json")
    assert main(["--compare", "batches", *TINY, *memory, *more]) == 0
    result = json.loads(capsys.readouterr().out)
    found, losses = medians(result), result["losses"]
    assert list(found) == ["one micro-batch", "micro-batches", "large batch"]
    # The same tokens, in parts and at once; activations in bf16.
    assert losses["large batch"] == pytest.approx(losses["micro-batches"], rel=0.01)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extra
def test_ways_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--seq-len", "32", "--steps", "1", "--host-memory", "256MiB"]
    memory = ["--activation-memory", "48MiB", "--path", str(tmp_path)]
    assert main([*TINY, *sizes, *memory, "--json"]) == 0
    found = medians(json.loads(capsys.readouterr().out))
    assert len(found) == 6
    assert all(each["step_s"] > 0 for each in found.values())


def test_losses_that_differ_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([[1.0], [1.0], [1.5]])
    monkeypatch.setattr(
        program, "run_trial", lambda *_: {**sample(1.0, 1, 1), "losses": next(losses)}
    )
    chosen = "torch,hetero-off,hetero"
    assert main([*TINY, "--contenders", chosen, "--path", str(tmp_path)]) == 2
    assert "contenders of hetero have different losses" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "fact"),
    [
        ("--contenders", "some", "unknown contender 'some'"),
        ("--steps", "0", "--steps must be 1 or more"),
        ("--factor", "1", "--factor must be 2 or more"),
        ("--process-memory", "lots", "--process-memory: cannot read 'lots'"),
        ("--width", "63", "a width of 63 is no multiple of 2 heads"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, fact: str
) -> None:
    assert main(arguments(tmp_path, option, value)) == 2
    assert fact in capsys.readouterr().err.splitlines()[-1]
