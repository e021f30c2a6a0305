"""What bench.bound, bench.step and bench.predict hold steps against."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import bound, step
from bench.bound import dram_bytes
from bench.harness.rounds import Rounds
from bench.peers.deepspeed_step import chain_shape
from bench.predict import errors_of
from bench.work import compute_alone as bench_compute
from bench.work.compute_alone import ComputeAlone
from bench.work.curve import buffer_counts
from bench.work.step_model import HeteroStep, make_plan
from hetero.chunks.dtypes import Dtypes
from hetero.job.options import TrainOptions
from tests.support.training.loops import SMALLEST_MODEL

MODEL = {**SMALLEST_MODEL, "n_layer": 4, "n_embd": 64}
BF16 = Dtypes("bf16", "bf16")


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
    rounds.derive("hetero", partial(bound.of_bound, 1000, BF16, 1))
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


PARAMS, CHUNK = 300_000, 8192
OPTIM_STATE_BYTES = CHUNK * 10


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
    made = {"read_bytes": 3e9, "written_bytes": 1e9, "compute_s": 0.1, "read_wait_s": 0.0}
    made |= {"write_wait_s": 0.0}
    rounds = Rounds(
        samples={
            "hetero": [made | {"step_s": s} for s in (4.0, 10.0, 2.0)],
            "disk alone": [{"gbps": 2.0}, {"gbps": 0.5}, {"gbps": 4.0}],
            "memory alone": [{"gbps": 26.0}, {"gbps": 26.0}, {"gbps": 13.0}],
            "deepspeed": [{"step_s": 8.0}, {"step_s": 30.0}, {"step_s": 6.0}],
        }
    )
    rounds.derive("hetero", partial(step.of_bound, 1_000_000_000))
    rounds.compare("hetero", "step_s", "of_hetero")
    own = rounds.figures()["hetero"]
    # disk: 2, 8, 1 s; memory: 1, 1, 2 s; bound: 2, 8, 2 s
    assert own["disk_s"] == {"median": 2.0, "min": 1.0, "max": 8.0}
    assert own["memory_s"]["median"] == 1.0
    assert own["bound_s"]["median"] == 2.0
    assert own["share_of_bound"]["median"] == 0.8
    assert rounds.median("deepspeed", "of_hetero") == 3.0


def test_shape_of_deepspeeds_model() -> None:
    for params in (10_000, 1_000_000, 500_000_000):
        width, layers = chain_shape(params)
        assert abs(width * width * layers - params) <= width * width / 2
        assert width <= 2048


def test_counts_of_buffers_span_from_few_to_all() -> None:
    assert buffer_counts(63) == [4, 12, 20, 29, 37, 46, 54, 63]
    assert buffer_counts(6) == [4, 5, 6]
    assert buffer_counts(2) == [2]


def test_errors_say_which_are_beyond_the_goal() -> None:
    found = errors_of({"a": {"error": 0.1}, "b": {"error": {"median": -0.3}}})
    assert found["within_goal"] == 1
    assert found["beyond_goal"] == {"b": -0.3}
    assert found["mean_error"] == pytest.approx(0.2)
    assert found["worst_error"] == 0.3
