"""bench/activations/training.py: what each contender does, without a process of its own."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from bench.activations import training
from bench.activations.training import Spec, run

SHAPE = {"layers": 2, "width": 32, "heads": 2, "seq_len": 16, "batch_size": 4}
SPEC = Spec("torch", SHAPE, 128)


def test_ways_of_pytorch_compute_the_same() -> None:
    plain = run(SPEC)
    assert plain["status"] == "trained"
    assert len(plain["steps_s"]) == 2
    assert plain["step_s"] == plain["steps_s"][1]
    assert plain["bytes_per_step"] == {}
    for name in ("torch-on-cpu", "torch-checkpoints", "torch-checkpoints-on-cpu"):
        assert run(replace(SPEC, contender=name))["losses"] == plain["losses"]
    tiled = run(replace(SPEC, contender="torch-checkpoints-tiled-loss"))
    assert tiled["losses"] == pytest.approx(plain["losses"], rel=1e-2)


def test_micro_batches_are_the_batch_in_parts() -> None:
    parts = run(replace(SPEC, micro_batches=4))
    assert parts["losses"] == pytest.approx(run(SPEC)["losses"], rel=1e-2)


def test_hetero(tmp_path: Path) -> None:
    options = {"placement_policy": "nvme", "nvme_path": str(tmp_path), "host_memory": 4 << 20}
    spec = Spec("hetero", SHAPE, 128, options, steps=3)
    found = run(spec)
    assert found["status"] == "trained"
    assert found["losses"] == pytest.approx(run(replace(SPEC, steps=3))["losses"], rel=1e-2)
    assert {"disk_read", "activations_read"} <= set(found["bytes_per_step"])
    assert found["peak_managed_bytes"]["host"] <= 4 << 20
    assert found["peak_bytes"] == found["memory"]["VmHWM"] > found["before_bytes"] > 0
    whole = replace(spec, contender="hetero-whole-loss")
    checkpoints = replace(spec, contender="hetero-whole-loss-checkpoints")
    assert run(whole)["losses"] == run(checkpoints)["losses"]


def test_a_refusal_and_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = {"placement_policy": "cpu", "host_memory": 4096}
    found = run(Spec("hetero", SHAPE, 128, options))
    assert found["status"] == "refused"
    assert "host_memory" in found["error"]

    def fail(_: Spec) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    monkeypatch.setattr(training, "_train", fail)
    assert run(SPEC)["status"] == "failed"


def test_an_error_that_is_not_of_memory_is_raised() -> None:
    with pytest.raises(ValueError, match="takes the batch whole"):
        run(replace(SPEC, contender="deepspeed", micro_batches=2))


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="it is installed")
def test_deepspeed_is_missing(tmp_path: Path) -> None:
    found = run(replace(SPEC, contender="deepspeed", options={"nvme_path": str(tmp_path)}))
    assert found["status"] == "missing"
    assert "deepspeed" in found["error"]
