"""Means that fake devices make, one for each rank: the bits of ranks on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.cuda import ranks
from tests.support.gathering import deviating
from tests.support.ranks import rank_training
from tests.support.ranks.processes import RankFailure, RankPool

ON_DEVICE = {"backend": "cuda", "device_memory": "64MiB"}


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("stage", [2, 3])
def test_of_a_mean_one_shard_crosses_the_link(ranks2: RankPool, stage: int) -> None:
    options = {"placement_policy": "cpu", "device_memory": "2MiB", "dtype": "bf16"}
    options["zero_stage"] = stage
    in_ram = ranks2.run(ranks.train, options, 2)
    for mine, other in zip(ranks2.run(ranks.train, options, 2, 1, True), in_ram, strict=True):
        assert mine["d2h"] == other["d2h"] // 2
        assert same(mine["masters"], other["masters"])


def test_of_a_mean_over_replicas_one_shard_crosses_the_link(ranks4: RankPool) -> None:
    options = {"placement_policy": "cpu", "device_memory": "2MiB", "dtype": "bf16"}
    options["host_memory"] = "8MiB"
    in_ram = ranks4.run(ranks.train, options, 2, 2)
    for mine, other in zip(ranks4.run(ranks.train, options, 2, 2, True), in_ram, strict=True):
        assert mine["d2h"] == other["d2h"] // 2
        assert same(mine["masters"], other["masters"])


def test_a_budget_without_room_for_what_replicas_send_is_refused(ranks2: RankPool) -> None:
    """Two chunks: gathered, and in a bucket; received, zeros, and what the other replica sends."""
    chunk_bytes = 16384 * 2
    options = {"placement_policy": "cpu", "dtype": "bf16", "device_memory": str(4 * chunk_bytes)}
    least = f"device_memory is .*smallest that works is .*\\({5 * chunk_bytes} bytes\\)"
    with pytest.raises(RankFailure, match=least):
        ranks2.run(ranks.train, options, 1, 2, True)
    options["device_memory"] = str(5 * chunk_bytes)
    ranks2.run(ranks.train, options, 1, 2, True)


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "bf16"},
        {"dtype": "fp16"},
        {"dtype": "bf16", "grad_dtype": "fp32", "reduce_dtype": "bf16"},
        {"dtype": "bf16", "keep_fp32": ["*ln_*"]},
        {"dtype": "bf16", "zero_stage": 2, "placement_policy": "cuda"},
    ],
    ids=["bf16", "fp16", "grads-in-fp32", "two-chunk-groups", "all-on-device"],
)
@pytest.mark.parametrize("sync_each", [True, False])
def test_accumulation_with_and_without_no_sync(
    ranks2: RankPool, more: dict[str, Any], sync_each: bool
) -> None:
    on_cpu = more | {"placement_policy": "cpu"}
    wanted = ranks2.run(rank_training.train, on_cpu, 3, 2, sync_each)
    found = ranks2.run(ranks.with_nccl, rank_training.train, ON_DEVICE | more, 3, 2, sync_each)
    for mine, right in zip(found, wanted, strict=True):
        assert mine["losses"] == right["losses"]
        assert mine["norms"] == right["norms"]
        assert mine["scale"] == right["scale"]
        assert same(mine["masters"], right["masters"])


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_have_gradients_of_different_experts(ranks2: RankPool, stage: int) -> None:
    wanted = ranks2.run(ranks.train_experts, {"zero_stage": stage})
    options = ON_DEVICE | {"zero_stage": stage}
    for mine, right in zip(
        ranks2.run(ranks.with_nccl, ranks.train_experts, options), wanted, strict=True
    ):
        assert same(mine, right)


@pytest.mark.parametrize("memory", ["250KiB", "64MiB"])
def test_sums_of_the_backend(ranks2: RankPool, memory: str) -> None:
    """(Of two ranks they have the same bits in any order.)"""
    options = {"grad_reduce": "backend", "dtype": "bf16"}
    wanted = ranks2.run(deviating.reduced, options)
    on_device = options | ON_DEVICE | {"device_memory": memory}
    for mine, right in zip(
        ranks2.run(ranks.with_nccl, deviating.reduced, on_device), wanted, strict=True
    ):
        assert same(mine, right)


@pytest.mark.parametrize("policy", ["cpu", "auto"])
def test_budgets_that_move(ranks2: RankPool, policy: str) -> None:
    budgets = ["64MiB", "700KiB", "1MiB", "300KiB", "64MiB"]
    wanted = ranks2.run(
        ranks.train_while_budgets_move, {"backend": "cpu", "dtype": "bf16"}, budgets
    )
    options = ON_DEVICE | {"placement_policy": policy, "dtype": "bf16"}
    for mine, right in zip(
        ranks2.run(ranks.with_nccl, ranks.train_while_budgets_move, options, budgets),
        wanted,
        strict=True,
    ):
        assert same(mine, right)
