"""backend='cuda' with several ranks, over fake devices: the same bits as ranks on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda import ranks
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import same

NO_PREFETCH = {"placement_policy": "cpu", "debug": {"prefetch": False}}
NVME = {"placement_policy": "nvme", "host_memory": "3MiB"}
AUTO = {"placement_policy": "auto", "device_memory": "1MiB"}
ON_DEVICE = {"placement_policy": "cuda", "device_memory": "64MiB"}

ON_CPU: dict[tuple[int, ...], list[dict[str, Any]]] = {}


def check(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for mine, right in zip(found, wanted, strict=True):
        assert same(mine["losses"], right["losses"])
        assert same(mine["masters"], right["masters"])
        assert mine["state"].keys() == right["state"].keys()
        assert same(list(mine["state"].values()), list(right["state"].values()))
        assert mine["peak"] <= mine["budget"]
        assert set(mine["left"][0].values()) == {0}
        assert mine["left"][1] == {}


def on_cpu(pool: RankPool, stage: int, *more: int) -> list[dict[str, Any]]:
    """The same training on the CPU, made once for all tests."""
    key = pool.world, stage, *more
    if key not in ON_CPU:
        options = {"backend": "cpu", "zero_stage": stage, "dtype": "bf16"}
        ON_CPU[key] = pool.run(ranks.train, options, *more)
    return ON_CPU[key]


@pytest.mark.parametrize(
    ("stage", "settings", "nccl"),
    [
        pytest.param(3, {"placement_policy": "cpu"}, False, id="3-cpu-gloo"),
        pytest.param(2, NO_PREFETCH, True, id="2-cpu-no-prefetch-nccl"),
        pytest.param(1, NVME, True, id="1-nvme-nccl"),
        pytest.param(3, NVME | {"host_memory": "1MiB"}, True, id="3-nvme-nccl"),
        pytest.param(3, ON_DEVICE, True, id="3-all-on-device-nccl"),
    ],
)
def test_same_bits_as_ranks_on_the_cpu(
    ranks2: RankPool, stage: int, settings: dict[str, Any], nccl: bool, tmp_path: Path
) -> None:
    options = {
        "device_memory": "600KiB", "nvme_path": str(tmp_path), "dtype": "bf16",
        "zero_stage": stage, **settings,
    }  # fmt: skip
    found = ranks2.run(ranks.train, options, 2, 1, nccl)
    check(found, on_cpu(ranks2, stage, 2))


def test_stage_1_by_gloo(ranks2: RankPool, tmp_path: Path) -> None:
    """Of chunks in RAM, and on the device."""
    options = {"nvme_path": str(tmp_path), "dtype": "bf16", "zero_stage": 1, **AUTO}
    check(ranks2.run(ranks.train, options, 2), on_cpu(ranks2, 1, 2))


@pytest.mark.parametrize(("stage", "overlap"), [(1, "both"), (2, "backward")])
def test_updates_that_overlap(ranks2: RankPool, stage: int, overlap: str) -> None:
    """Of chunks in RAM, and on the device; their gathers go on with them."""
    options = {"device_memory": "1MiB", "dtype": "bf16", "zero_stage": stage}
    options |= {"placement_policy": "auto", "debug": {"overlap_updates": overlap}}
    check(ranks2.run(ranks.train, options, 2, 1, True), on_cpu(ranks2, stage, 2))


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", ["auto", "cuda"])
@pytest.mark.parametrize("stage", [1, 2])
def test_checkpoints(ranks2: RankPool, stage: int, policy: str, tmp_path: Path) -> None:
    options = {"zero_stage": stage, "dtype": "bf16"}
    on_cpu = options | {"backend": "cpu"}
    wanted = ranks2.run(ranks.train_and_load, on_cpu, str(tmp_path / "of-cpu"))
    options |= {"backend": "cuda", "placement_policy": policy}
    options["device_memory"] = "64MiB" if policy == "cuda" else "1MiB"
    found = ranks2.run(ranks.with_nccl, ranks.train_and_load, options, str(tmp_path / "of-cuda"))
    for mine, right in zip(found, wanted, strict=True):
        for masters in mine:
            assert same(masters, right[0])


@pytest.mark.parametrize(
    ("stage", "nccl", "policy"),
    [
        (2, True, "auto"),
        pytest.param(1, False, "cpu", marks=pytest.mark.extra),
        pytest.param(1, True, "cuda", marks=pytest.mark.extra),
        pytest.param(3, True, "cpu", marks=pytest.mark.extra),
    ],
)
def test_hybrid_sharding(ranks4: RankPool, stage: int, nccl: bool, policy: str) -> None:
    options = {"device_memory": "400KiB", "dtype": "bf16", "zero_stage": stage}
    options["placement_policy"] = policy
    if policy != "cpu":
        options["device_memory"] = "700KiB" if policy == "auto" else "64MiB"
    found = ranks4.run(ranks.train, options, 2, 2, nccl)
    check(found, on_cpu(ranks4, stage, 2, 2))


@pytest.mark.parametrize(
    "stage", [3, *(pytest.param(stage, marks=pytest.mark.extra) for stage in (1, 2))]
)
def test_replicas_alone(ranks2: RankPool, stage: int) -> None:
    """Each rank has all of the state: a mesh of (2, 1)."""
    options = {"device_memory": "512KiB", "dtype": "bf16", "zero_stage": stage}
    options["placement_policy"] = "cpu"
    check(ranks2.run(ranks.train, options, 2, 2, True), on_cpu(ranks2, stage, 2, 2))


def test_ranks_read_what_a_step_in_a_stream_of_the_loop_s_own_makes(ranks2: RankPool) -> None:
    options = {**ON_DEVICE, "dtype": "bf16", "zero_stage": 3}
    assert ranks2.run(ranks.read_after_a_step_in_a_stream, options) == [True, True]
