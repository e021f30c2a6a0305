"""backend='cuda' with several ranks, over fake devices: the same bits as ranks on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cuda import ranks
from tests.support.ranks.processes import RankFailure, RankPool

SETTINGS = [
    pytest.param({"placement_policy": "cpu"}, id="cpu"),
    pytest.param({"placement_policy": "cpu", "prefetch": False}, id="cpu-no-prefetch"),
    pytest.param({"placement_policy": "nvme", "host_memory": "1MiB"}, id="nvme"),
    pytest.param({"placement_policy": "auto", "device_memory": "1MiB"}, id="auto"),
    pytest.param({"placement_policy": "cuda", "device_memory": "64MiB"}, id="all-on-device"),
]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def check(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for mine, right in zip(found, wanted, strict=True):
        assert same(mine["losses"], right["losses"])
        assert same(mine["masters"], right["masters"])
        assert mine["state"].keys() == right["state"].keys()
        assert same(list(mine["state"].values()), list(right["state"].values()))
        assert mine["peak"] <= mine["budget"]
        assert set(mine["left"][0].values()) == {0}
        assert mine["left"][1] == {}


def on_cpu(pool: RankPool, stage: int, *more: Any) -> list[dict[str, Any]]:
    options = {"backend": "cpu", "zero_stage": stage, "dtype": "bf16"}
    return pool.run(ranks.train, options, *more)


@pytest.mark.parametrize("nccl", [False, True], ids=["gloo", "nccl"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_same_bits_as_ranks_on_the_cpu(
    ranks2: RankPool, stage: int, settings: dict[str, Any], nccl: bool, tmp_path: Path
) -> None:
    if stage == 1 and settings["placement_policy"] in ("auto", "cuda"):
        with pytest.raises(RankFailure, match="averages gradients in RAM"):
            ranks2.run(ranks.train, {"zero_stage": 1, **settings})
        return
    options = {
        "device_memory": "400KiB", "nvme_path": str(tmp_path), "dtype": "bf16",
        "zero_stage": stage, **settings,
    }  # fmt: skip
    if settings["placement_policy"] == "nvme" and stage < 3:
        options["host_memory"] = "3MiB"
    found = ranks2.run(ranks.train, options, 2, 1, nccl)
    check(found, on_cpu(ranks2, stage, 2))


@pytest.mark.parametrize(
    ("stage", "nccl", "policy"),
    [(1, False, "cpu"), (3, False, "cpu"), (2, True, "cuda"), (3, True, "cpu"), (3, True, "auto")],
)
def test_hybrid_sharding(ranks4: RankPool, stage: int, nccl: bool, policy: str) -> None:
    options = {"device_memory": "400KiB", "dtype": "bf16", "zero_stage": stage}
    options["placement_policy"] = policy
    if policy != "cpu":
        options["device_memory"] = "700KiB" if policy == "auto" else "64MiB"
    found = ranks4.run(ranks.train, options, 2, 2, nccl)
    check(found, on_cpu(ranks4, stage, 2, 2))


@pytest.mark.parametrize("stage", [2, 3])
def test_replicas_alone(ranks2: RankPool, stage: int) -> None:
    """Each rank has all of the state: a mesh of (2, 1)."""
    options = {"device_memory": "400KiB", "dtype": "bf16", "zero_stage": stage}
    options["placement_policy"] = "cpu"
    check(ranks2.run(ranks.train, options, 2, 2, True), on_cpu(ranks2, stage, 2, 2))
