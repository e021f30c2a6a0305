"""Ranks on CUDA: one result for every stage and placement, and whatever carries bytes between them.

With two GPUs or more each rank has one, and NCCL gathers; else ranks share one, and gloo does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.device.cuda_backend import CudaBackend
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account
from tests.support.cuda.ranks import train_on_gpu
from tests.support.ranks.processes import RankPool

NCCL = torch.cuda.device_count() >= 2 and dist.is_nccl_available()
ONE_GPU_EACH = pytest.mark.skipif(not NCCL, reason="needs a GPU for each rank, and NCCL")
SETTINGS = [
    pytest.param({"zero_stage": 1, "placement_policy": "cpu"}, id="1-cpu"),
    pytest.param(
        {"zero_stage": 1, "placement_policy": "auto", "device_memory": "1MiB"},
        id="1-auto",
        marks=ONE_GPU_EACH,
    ),
    pytest.param(
        {"zero_stage": 1, "placement_policy": "cuda"}, id="1-all-on-device", marks=ONE_GPU_EACH
    ),
    pytest.param(
        {"zero_stage": 2, "placement_policy": "auto", "device_memory": "1MiB"}, id="2-auto"
    ),
    pytest.param({"zero_stage": 2, "placement_policy": "cpu"}, id="2-cpu"),
    pytest.param({"zero_stage": 3, "placement_policy": "cpu"}, id="3-cpu"),
    pytest.param({"zero_stage": 3, "placement_policy": "nvme", "host_memory": "1MiB"}, id="3-nvme"),
    pytest.param(
        {"zero_stage": 3, "placement_policy": "auto", "device_memory": "1MiB"}, id="3-auto"
    ),
    pytest.param({"zero_stage": 2, "placement_policy": "cuda"}, id="2-all-on-device"),
    pytest.param({"zero_stage": 3, "placement_policy": "cuda"}, id="3-all-on-device"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """As many ranks as there are GPUs, two at least and four at most."""
    with RankPool(min(4, max(2, torch.cuda.device_count()))) as made:
        yield made


@pytest.fixture(scope="module")
def everything_gathered(pool: RankPool) -> list[list[torch.Tensor]]:
    options = {"zero_stage": 3, "placement_policy": "cpu", "device_memory": "64MiB"}
    return pool.run(train_on_gpu, options)


@pytest.mark.parametrize("settings", SETTINGS)
def test_same_bits_for_every_stage_and_placement(
    pool: RankPool,
    everything_gathered: list[list[torch.Tensor]],
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    options = {"device_memory": "400KiB", "nvme_path": str(tmp_path), **settings}
    if settings["placement_policy"] == "cuda":
        options["device_memory"] = "64MiB"
    for found, wanted in zip(pool.run(train_on_gpu, options), everything_gathered, strict=True):
        assert len(found) == len(wanted)
        assert all(map(torch.equal, found, wanted))


def test_same_bits_for_every_stage_with_replicas(pool: RankPool) -> None:
    """Two replicas; of four ranks two share one, of two each has all of the state."""
    replicas = 2 if pool.world % 2 == 0 else 1
    options = {"zero_stage": 3, "placement_policy": "cpu", "device_memory": "64MiB"}
    wanted = pool.run(train_on_gpu, options, replicas)
    settings = [{"zero_stage": 1}, {"zero_stage": 2, "placement_policy": "cuda"}]
    if NCCL:
        settings.append({"zero_stage": 1, "placement_policy": "cuda"})
    for more in settings:
        for mine, right in zip(
            pool.run(train_on_gpu, options | more, replicas), wanted, strict=True
        ):
            assert all(map(torch.equal, mine, right))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")
def test_a_group_of_one_device_gathers_its_part() -> None:
    backend = CudaBackend()
    ledger = Ledger({})
    device = backend.arena(4, 1 << 20, ledger, Account.GATHERED)
    ram = backend.host_arena(1, 4 << 20, ledger, Account.PARAM)
    ram.commit(0)
    source = ram.view(0, 1, torch.uint8)
    group = backend.runtime.process_group(dist.HashStore(), 0, 1)
    streams = backend.connect(group)
    try:
        for value in range(20):
            source.fill_(value)
            whole = device.view(0, 4, torch.uint8)
            unused = backend.unused_after(whole)
            done = backend.gather(streams, whole, whole, source, None, unused)
            assert bool((device.view(0, 4, torch.uint8, pinned=True) == value).all())
            assert backend.runtime.comes_within(done, 60.0)
    finally:
        group.abort()
        backend.close()
        ram.close()
        device.close()
