"""Placement, I/O engine, chunk size and budget never change a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.training.emulated import reference, trained
from tests.support.training.loops import build

NVME = {"placement_policy": "nvme"}
AUTO = {"placement_policy": "auto"}
SETTINGS: dict[str, dict[str, Any]] = {
    "nvme": NVME,
    "nvme-threads": NVME | {"debug": {"io_engine": "threads"}},
    "nvme-grads-on-disk": NVME | {"host_memory": "1400KiB"},
    "nvme-all-on-disk": NVME | {"host_memory": "400KiB"},
    "no-prefetch": NVME | {"host_memory": "400KiB", "debug": {"prefetch": False}},
    "nvme-large-chunks": NVME | {"host_memory": "1200KiB", "chunk_numel": 32768},
    "auto-part-on-disk": AUTO | {"host_memory": "2MiB"},
    "auto-all-in-ram": AUTO | {"host_memory": "64MiB"},
    "auto-one-chunk": AUTO | {"chunk_numel": 4096 * 40},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_same_bits_as_cpu(settings: str, dtype: str, tmp_path: Path, nothing_left: None) -> None:
    given = {"dtype": dtype, "nvme_path": str(tmp_path), "initial_loss_scale": 256.0}
    model, optimizer = build(**given, **SETTINGS[settings])
    on_disk = optimizer.engine.io_engine is not None
    run = trained(model, optimizer, 3)
    assert run.same_bits(reference(dtype, 3))
    assert len(set(run.losses)) == len(run.losses), "training moved"
    traffic = optimizer.engine.traffic
    assert (traffic.disk_read > 0) == on_disk == (traffic.disk_write > 0)


def test_fp32_gradients_accumulate_in_fp32(tmp_path: Path) -> None:
    device = {"backend": "emulated", "device_memory": "300KiB", "chunk_numel": 4096}
    runs = []
    for options in ({"placement_policy": "cpu"}, NVME, NVME | device):
        model, optimizer = build(
            **options, dtype="bf16", grad_dtype="fp32", nvme_path=str(tmp_path)
        )
        runs.append(trained(model, optimizer, 3))
    assert runs[0].same_bits(runs[1])
    assert runs[0].same_bits(runs[2])
    assert not runs[0].same_bits(reference("bf16", 3))
