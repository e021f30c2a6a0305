"""Placement, I/O engine, chunk size and budget never change a bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import hetero
from tests.support.training.loops import Run, batches, build, train

SETTINGS = [
    pytest.param({"placement_policy": "nvme"}, id="nvme"),
    pytest.param({"placement_policy": "nvme", "io_engine": "threads"}, id="nvme-threads"),
    pytest.param({"placement_policy": "nvme", "host_memory": "1400KiB"}, id="nvme-grads-on-disk"),
    pytest.param({"placement_policy": "nvme", "host_memory": "400KiB"}, id="nvme-all-on-disk"),
    pytest.param(
        {"placement_policy": "nvme", "host_memory": "400KiB", "prefetch": False}, id="no-prefetch"
    ),
    pytest.param(
        {"placement_policy": "nvme", "host_memory": "1200KiB", "chunk_numel": 32768},
        id="nvme-large-chunks",
    ),
    pytest.param({"placement_policy": "auto", "host_memory": "2MiB"}, id="auto-part-on-disk"),
    pytest.param({"placement_policy": "auto", "host_memory": "64MiB"}, id="auto-all-in-ram"),
    pytest.param({"placement_policy": "auto", "chunk_numel": 4096 * 40}, id="auto-one-chunk"),
]
REFERENCES: dict[str, Run] = {}


def reference(dtype: str) -> Run:
    """The same training under policy cpu."""
    if dtype not in REFERENCES:
        model, optimizer = build(
            placement_policy="cpu", dtype=dtype, host_memory="64MiB", initial_loss_scale=256.0
        )
        REFERENCES[dtype] = train(model, optimizer, batches(9), accumulate=3, clip=1.0)
    return REFERENCES[dtype]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_same_bits_as_cpu(
    settings: dict[str, object], dtype: str, tmp_path: Path, nothing_left: None
) -> None:
    model, optimizer = build(
        dtype=dtype, nvme_path=str(tmp_path), initial_loss_scale=256.0, **settings
    )
    on_disk = optimizer.engine.io_engine is not None
    run = train(model, optimizer, batches(9), accumulate=3, clip=1.0)
    assert run.same_bits(reference(dtype))
    assert len(set(run.losses)) == len(run.losses), "training moved"
    traffic = optimizer.engine.traffic
    assert (traffic.disk_read > 0) == on_disk == (traffic.disk_write > 0)


def test_fp32_gradients_accumulate_in_fp32(tmp_path: Path) -> None:
    runs = []
    for policy in ("cpu", "nvme"):
        model, optimizer = build(
            placement_policy=policy, dtype="bf16", grad_dtype="fp32", nvme_path=str(tmp_path)
        )
        runs.append(train(model, optimizer, batches(6), accumulate=3, clip=1.0))
    assert runs[0].same_bits(runs[1])
    assert not runs[0].same_bits(reference("bf16"))


def test_norm_does_not_depend_on_the_layout() -> None:
    norms = set()
    for chunk_numel in (4096, 16384, 4096 * 40):
        model, optimizer = build(placement_policy="cpu", dtype="fp32", chunk_numel=chunk_numel)
        tokens = batches(1)[0]
        model(input_ids=tokens, labels=tokens).loss.backward()
        norms.add(hetero.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.engine.close()
    assert len(norms) == 1
