"""bench.activations: what is in a bound, and the same losses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench import activations as program
from bench.activations import main
from bench.work.gpt_training import Spec

GB = 10**9
STEPS_S = {"in memory": 10.0, "auto": 11.0, "none": 24.0, "all": 14.0}
# Written and read: of activations, and of state.
MOVED = {"in memory": (0, 0), "auto": (4 * GB, 10 * GB), "none": (30 * GB, 10 * GB)}
MOVED["all"] = (2 * GB, 10 * GB)


def trained(name: str, losses: list[float]) -> dict[str, Any]:
    activations, state = MOVED[name]
    return {
        "status": "trained",
        "error": None,
        "seconds": 1.0,
        "step_s": STEPS_S[name],
        "explained": "",
        "before_bytes": 1 << 30,
        "losses": losses,
        "bytes_per_step": {
            "activations_read": activations / 2,
            "activations_written": activations / 2,
            "disk_read": (activations + state) / 2,
            "disk_write": (activations + state) / 2,
        },
        "peak_bytes": 3 << 30 if name == "none" else 2 << 30,
    }


def test_the_bound_of_each_way_to_recompute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps as above, and a disk that moves 2 GB/s."""
    made: list[Spec] = []

    def try_to_train(spec: Spec, *_: Any) -> dict[str, Any]:
        made.append(spec)
        return trained(spec.options.get("recompute", "in memory"), [1.0])

    def disk(read_share: float) -> dict[str, float]:
        assert read_share == 0.5
        return {"gbps": 2.0}

    monkeypatch.setattr(program, "try_to_train", try_to_train)
    monkeypatch.setattr(program, "disk_alone", lambda *_: nullcontext(disk))
    words = ["--compare", "recompute", "--model", "2,64,2", "--path", str(tmp_path)]
    assert main([*words, "--json", "--rounds", "2"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    found = {
        name: {metric: spread["median"] for metric, spread in figures.items()}
        for name, figures in results.items()
    }
    assert [found[name]["bound_s"] for name in STEPS_S] == [10.0, 10.0, 20.0, 10.0]
    assert [found[name]["nvme_s"] for name in STEPS_S] == [0.0, 7.0, 20.0, 6.0]
    assert [found[name]["ratio"] for name in STEPS_S] == [1.0, 1.1, 1.2, 1.4]
    assert found["none"]["activation_bytes"] == 30 * GB
    assert found["none"]["state_bytes"] == 10 * GB
    # In turns, each round beginning with another one.
    order = [spec.options.get("recompute", "in memory") for spec in made]
    assert order == ["in memory", "auto", "none", "all", "auto", "none", "all", "in memory"]
    assert made[0].options == {"placement_policy": "cpu"}
    assert made[1].options["process_memory"] == 2560 << 20
    assert list(tmp_path.iterdir()) == []
    assert main([*words, "--contenders", "none"]) == 0
    out = capsys.readouterr().out
    for text in ("in memory", "1.20", "2.0 GiB", "NVMe"):
        assert text in out
    assert "auto" not in out.partition("--contenders")[2]


def test_losses_that_differ_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([[1.0], [1.0], [1.5]])
    monkeypatch.setattr(program, "try_to_train", lambda *_: trained("in memory", next(losses)))
    chosen = "torch,hetero-off,hetero"
    assert main(["--contenders", chosen, "--path", str(tmp_path)]) == 2
    assert "contenders of hetero have different losses" in capsys.readouterr().err
