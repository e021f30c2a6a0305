"""bench.bound: what it counts, its JSON and pictures, and how it refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.bound import RESOURCES, dram_bytes, main, of_bound
from bench.harness.rounds import Rounds
from bench.work import bandwidths
from bench.work import compute_alone as bench_compute
from bench.work.compute_alone import ComputeAlone
from bench.work.job_steps import overlap
from hetero.chunks.dtypes import Dtypes
from hetero.job.options import TrainOptions
from offload.timeline import Interval, Timeline

MODEL = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 16,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
BF16 = Dtypes("bf16", "bf16")


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small model, and yardsticks smaller than what a machine needs to be measured."""
    monkeypatch.setattr(bandwidths, "DISK_WINDOW_S", 0.01)
    monkeypatch.setattr(bandwidths, "LINK_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidths, "STREAM_NUMEL", 1 << 16)
    monkeypatch.setattr(bench_compute, "UPDATE_NUMEL", 1 << 16)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 50)
    (tmp_path / "nvme").mkdir()
    return [
        *("--config", str(tmp_path / "model.json"), "--data", str(tmp_path / "text")),
        *("--seq-len", "16", "--steps", "2", "--rounds", "1", "--io-size", "32MiB"),
        *("--host-memory", "1200KiB", "--device-memory", "600KiB", "--link-gbps", "1"),
        *("--dtype", "bf16", "--nvme-path", str(tmp_path / "nvme"), "--clipped", "50"),
    ]


def test_json(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--json", "--picture", str(tmp_path / "steps.png")]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    nvme, emulated = result["cases"]
    assert nvme["name"] == "model nvme, 50 % clipped"
    assert emulated["name"] == "model emulated, 50 % clipped"
    for case in (nvme, emulated):
        assert case["status"] == "measured"
        found = {
            name: {metric: spread["median"] for metric, spread in figures.items()}
            for name, figures in case["contenders"].items()
        }
        own, compute = found["hetero"], found["compute"]
        assert own["disk_read"] > 0
        parts = {part: own[part] for part in RESOURCES}
        assert case["bound"] == max(parts, key=parts.get)
        assert own["bound_s"] == max(parts.values())
        assert own["ratio"] == pytest.approx(own["step_s"] / own["bound_s"])
        assert case["compute_from"] == "the whole model"
        assert compute.pop("compute_s") == pytest.approx(sum(compute.values())) == parts["compute"]
        disk = own["disk_read"] + own["disk_write"]
        assert parts["NVMe"] == pytest.approx(disk / found["NVMe"]["gbps"] / 1e9)
        link = 2 * (own["h2d"] + own["d2h"])
        assert own["dram"] == case["params"] * (26 + 2 * 2) + disk + link
        if case is nvme:
            assert own["h2d"] == 0 == own["link"]
        else:
            assert min(own["h2d"], own["d2h"]) > 0
            most = max(own["h2d"], own["d2h"])
            assert own["link"] == pytest.approx(most / found["link"]["gbps"] / 1e9)
        drawn = case["timeline"]
        assert Path(drawn["picture"]).read_bytes().startswith(b"\x89PNG")
        trace = json.loads(Path(drawn["trace"]).read_text())["traceEvents"]
        steps = [e["name"] for e in trace if e["name"] in ("forward", "backward", "optimizer")]
        assert sorted(steps) == ["backward"] * 2 + ["forward"] * 2 + ["optimizer"] * 2
        assert drawn["nvme_busy_s"] > 0
    assert emulated["homes"]["optim_state"]["device"] > 0
    assert list((tmp_path / "nvme").iterdir()) == []


def test_table(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--settings", "nvme", "--compute", "layers", "--clipped", "0,100")
    assert main([*options, *more]) == 0
    out = capsys.readouterr().out
    for text in (
        "model nvme, 0 % clipped",
        "model nvme, 100 % clipped",
        "compute",
        "link",
        "NVMe",
        "DRAM",
        "goal 1.15",
    ):
        assert text in out


def test_a_refused_case_does_not_end_the_others(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--device-memory", "1KiB"]) == 0
    out = capsys.readouterr().out
    assert "model emulated, 50 % clipped: refused:" in out
    assert "goal 1.15" in out


@pytest.mark.parametrize(
    ("more", "fact"),
    [
        (("--settings", "nvm"), "unknown name 'nvm' in --settings"),
        (("--steps", "0"), "--max-steps must be at least 1"),
        (("--rounds", "0"), "--rounds must be 1 or more"),
        (("--backend", "emulated"), "--backend follows from --settings"),
        (("--host-memory", "lots"), "lots"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], capsys: pytest.CaptureFixture[str], more: tuple[str, ...], fact: str
) -> None:
    assert main([*options, *more]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("bench.bound: error: ")
    assert fact in error


def test_the_bound_is_the_largest_part_of_each_round() -> None:
    step = {"forward_s": 1.0, "backward_s": 1.0, "optimizer_s": 1.0}
    step |= {"h2d": 4e9, "d2h": 2e9, "disk_read": 6e9, "disk_write": 2e9}
    compute = {"forward_s": 1.0, "backward_s": 1.0, "update_s": 1.0}
    rounds = Rounds(
        samples={
            "hetero": [step | {"step_s": s} for s in (6.0, 8.0, 12.0)],
            "compute": [compute | {"compute_s": 3.0}] * 3,
            "NVMe": [{"gbps": g} for g in (4.0, 2.0, 8.0)],
            "DRAM": [{"gbps": 1000.0}] * 3,
            "link": [{"gbps": g} for g in (4.0, 2.0, 0.5)],
        }
    )
    rounds.derive("hetero", partial(of_bound, 1000, BF16, 1))
    # compute: 3, 3, 3; NVMe: 2, 4, 1; link: 1, 2, 8; bound: 3, 4, 8; ratio: 2, 2, 1.5
    assert rounds.values("hetero", "NVMe") == [2.0, 4.0, 1.0]
    assert rounds.values("hetero", "link") == [1.0, 2.0, 8.0]
    assert rounds.values("hetero", "bound_s") == [3.0, 4.0, 8.0]
    assert rounds.values("hetero", "ratio") == [2.0, 2.0, 1.5]


def test_bytes_of_ram() -> None:
    moved = {"disk_read": 100.0, "disk_write": 10.0, "h2d": 7.0, "d2h": 3.0}
    # 26 for the update; 2 bytes each: gradient there and back, three more micro-batches.
    expected = 1000 * (26 + 2 * (2 + 3 * 3)) + 110 + 20
    assert dram_bytes(1000, BF16, 4, moved) == expected
    assert dram_bytes(1000, Dtypes("fp32", "fp32"), 1, moved) == 1000 * (28 + 8) + 130


def test_overlap_leaves_out_what_the_optimizer_waits_for() -> None:
    timeline = Timeline(
        0,
        10,
        (
            Interval("compute", 0, 5, name="forward"),
            Interval("compute", 5, 10, name="optimizer"),
            Interval("update", 6, 7),
            Interval("nvme_read", 4, 9),
            Interval("h2d", 1, 2),
        ),
    )
    found = overlap(timeline)
    assert found["nvme_busy_s"] == 5
    assert found["nvme_beside_compute_s"] == 2
    assert found["link_beside_compute_s"] == found["link_busy_s"] == 1
    assert found["busy_s"]["compute"] == 10


def test_layers_are_extrapolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 layers from models of 2 and 6: twice their difference is added to the larger one."""
    monkeypatch.setattr(bench_compute, "UPDATE_NUMEL", 1 << 16)
    seconds = {2: (1.0, 3.0), 6: (2.0, 5.0)}

    def timed(model: torch.nn.Module, *_: object) -> tuple[float, float]:
        return seconds[model.config.n_layer]

    monkeypatch.setattr(bench_compute, "_timed_pass", timed)
    config = tmp_path / "model.json"
    config.write_text(json.dumps(MODEL | {"n_layer": 10}))
    (tmp_path / "text").write_bytes(bytes(range(256)))
    options = TrainOptions(
        config=str(config), data=str(tmp_path / "text"), seq_len=8, accumulate=2, clip=0
    )
    alone = ComputeAlone(options, BF16, whole=False)
    sample = alone.sample(2)
    assert alone.method == "10 layers, from models of 2 and 6"
    assert sample["forward_s"] == pytest.approx(2 * 3.0)
    assert sample["backward_s"] == pytest.approx(2 * 7.0)
    assert sample["update_s"] > 0
    alone.close()


def test_models_are_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    config = tmp_path / "model.json"
    config.write_text(json.dumps(MODEL))
    (tmp_path / "text").write_bytes(bytes(range(256)))
    options = TrainOptions(config=str(config), data=str(tmp_path / "text"), seq_len=8)
    for dtypes in (BF16, Dtypes("fp32", "fp32")):
        alone = ComputeAlone(options, dtypes, whole=True)
        (model,) = alone._models
        assert {p.dtype for p in model.parameters()} == {dtypes.torch_compute}
        assert alone.sample(1)["update_s"] > 0
        assert all(p.grad is None for p in model.parameters())
        alone.close()
    assert torch.get_default_dtype() is torch.float32
