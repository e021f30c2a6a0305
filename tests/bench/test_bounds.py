"""What bench.bound holds steps against."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import bound
from bench.bound import ComputeAlone, dram_bytes
from bench.harness.rounds import Rounds
from hetero.chunks.dtypes import Dtypes
from hetero.job.options import TrainOptions
from tests.support.training.loops import SMALLEST_MODEL

BF16 = Dtypes("bf16", "bf16")


def test_the_bound_is_the_largest_part_of_each_round() -> None:
    step = {"forward_s": 1.0, "backward_s": 1.0, "optimizer_s": 1.0}
    step |= {"disk_read": 6e9, "disk_write": 2e9, "h2d": 8e9, "d2h": 4e9}
    rounds = Rounds(
        samples={
            "hetero": [step | {"step_s": s} for s in (6.0, 8.0, 12.0)],
            "compute": [{"compute_s": 3.0}] * 3,
            "NVMe": [{"gbps": g} for g in (4.0, 2.0, 1.0)],
            "DRAM": [{"gbps": 1000.0}] * 3,
        }
    )
    rounds.derive("hetero", partial(bound.of_bound, 1000, BF16, 1, 2.5))
    assert rounds.values("hetero", "NVMe") == [2.0, 4.0, 8.0]
    assert rounds.values("hetero", "link") == [3.2] * 3
    assert rounds.values("hetero", "bound_s") == [3.2, 4.0, 8.0]
    assert rounds.values("hetero", "ratio") == [6.0 / 3.2, 2.0, 1.5]


def test_bytes_of_ram() -> None:
    moved = {"disk_read": 100.0, "disk_write": 10.0}
    # 26 for the update; 2 bytes each: gradient there and back, three more micro-batches.
    expected = 1000 * (26 + 2 * (2 + 3 * 3)) + 110
    assert dram_bytes(1000, BF16, 4, moved) == expected
    assert dram_bytes(1000, Dtypes("fp32", "fp32"), 1, moved) == 1000 * (28 + 8) + 110


def test_compute_is_in_the_dtype_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound, "UPDATE_NUMEL", 1 << 16)
    config = tmp_path / "model.json"
    config.write_text(json.dumps({**SMALLEST_MODEL, "n_layer": 4, "n_embd": 64}))
    (tmp_path / "text").write_bytes(bytes(range(256)))
    data = str(tmp_path / "text")
    options = TrainOptions(model=str(config), data=data, seq_len=8, accumulate=2)
    for dtypes in (BF16, Dtypes("fp32", "fp32")):
        alone = ComputeAlone(options, dtypes)
        assert {p.dtype for p in alone.model.parameters()} == {dtypes.torch_compute}
        monkeypatch.setattr(alone, "_timed_pass", lambda: (1.0, 3.0))
        sample = alone.sample(1)
        assert (sample["forward_s"], sample["backward_s"]) == (2.0, 6.0)
        assert sample["compute_s"] == 8.0 + sample["update_s"] > 8.0
        monkeypatch.undo()
        assert min(alone._timed_pass()) > 0
        assert all(p.grad is None for p in alone.model.parameters())
    assert torch.get_default_dtype() is torch.float32
