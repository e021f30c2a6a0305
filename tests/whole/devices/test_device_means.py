"""Means that fake devices make, one for each rank: the bits of ranks on the CPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.cuda import ranks
from tests.support.ranks import rank_training
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import same

CHUNK_BYTES = 16384 * 2  # in bf16
ON_DEVICE = {"backend": "cuda", "device_memory": "64MiB"}


def test_of_a_mean_over_replicas_one_shard_crosses_the_link(ranks4: RankPool) -> None:
    options = {"placement_policy": "cpu", "device_memory": "2MiB", "dtype": "bf16"}
    options["host_memory"] = "8MiB"
    in_ram = ranks4.run(ranks.train, options, 1, 2)
    for mine, other in zip(ranks4.run(ranks.train, options, 1, 2, True), in_ram, strict=True):
        assert mine["d2h"] == other["d2h"] // 2
        assert same(mine["masters"], other["masters"])


def test_in_stage_1_a_shard_of_the_mean_comes_once(ranks2: RankPool) -> None:
    """Beside parameters, of which a shard goes up."""
    options = {"placement_policy": "cpu", "device_memory": "2MiB", "dtype": "bf16"}
    options |= {"zero_stage": 1, "debug": {"overlap_updates": "none"}}
    in_ram = ranks2.run(ranks.train, options)
    for mine, other in zip(ranks2.run(ranks.train, options, 1, 1, True), in_ram, strict=True):
        # Of the other rank's shards, in every step and of the first values.
        gathered = (ranks.STEPS + 1) * mine["chunks"] * CHUNK_BYTES // 2
        means = mine["chunks"] * CHUNK_BYTES * ranks.STEPS
        assert mine["h2d"] - other["h2d"] == gathered
        assert mine["d2h"] - other["d2h"] == gathered - means // 2
        assert same(mine["masters"], other["masters"])


def test_a_budget_without_room_for_what_replicas_send_is_refused(ranks2: RankPool) -> None:
    """Five chunks: gathered, in a bucket, received, zeros, and what the other replica sends."""
    options = {"placement_policy": "cpu", "dtype": "bf16", "device_memory": str(4 * CHUNK_BYTES)}
    least = f"device_memory is .*smallest that works is .*\\({5 * CHUNK_BYTES} bytes\\)"
    for told in ranks2.run(ranks.refused, ranks.train, options, 1, 2, True):
        assert re.search(least, told), told
    options["device_memory"] = str(5 * CHUNK_BYTES)
    ranks2.run(ranks.train, options, 1, 2, True)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "more",
    [
        {"dtype": "bf16", "grad_dtype": "fp32", "reduce_dtype": "bf16"},
        {"dtype": "bf16", "zero_stage": 2, "placement_policy": "cuda"},
        {"dtype": "fp16", "zero_stage": 1, "placement_policy": "cuda"},
        {"dtype": "bf16", "zero_stage": 1, "placement_policy": "cpu", "keep_fp32": ["*ln_*"]},
    ],
    ids=["grads-in-fp32", "all-on-device", "stage-1-on-device", "stage-1-in-ram"],
)
@pytest.mark.parametrize("sync_each", [True, False])
def test_accumulation_with_and_without_no_sync(
    ranks2: RankPool, more: dict[str, Any], sync_each: bool
) -> None:
    on_cpu = more | {"placement_policy": "cpu"}
    wanted = ranks2.run(rank_training.train, on_cpu, 2, 2, sync_each)
    found = ranks2.run(ranks.with_nccl, rank_training.train, ON_DEVICE | more, 2, 2, sync_each)
    for mine, right in zip(found, wanted, strict=True):
        assert mine["losses"] == right["losses"]
        assert mine["norms"] == right["norms"]
        assert mine["scale"] == right["scale"]
        assert same(mine["masters"], right["masters"])


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_have_gradients_of_different_experts(ranks2: RankPool, stage: int) -> None:
    wanted = ranks2.run(ranks.train_experts, {"zero_stage": stage})
    options = ON_DEVICE | {"zero_stage": stage}
    for mine, right in zip(
        ranks2.run(ranks.with_nccl, ranks.train_experts, options), wanted, strict=True
    ):
        assert same(mine, right)


@pytest.mark.parametrize(("stage", "more"), [(1, 1), (2, 3)])
def test_what_comes_to_the_device_gets_the_room_of_slots_that_are_needed_no_more(
    ranks2: RankPool, stage: int, more: int
) -> None:
    """The budget is just enough for all of the state, and for `more` slots of headroom."""
    options = ON_DEVICE | {"dtype": "bf16", "zero_stage": stage}
    few = options | {"placement_policy": "cuda", "device_memory": "4KiB"}
    told, _ = ranks2.run(ranks.with_nccl, ranks.refused, ranks.homes_after_a_move, few, "4KiB")
    least = re.search(r"smallest that works is [^(]*\((\d+) bytes\)", told)
    assert least is not None, told
    budget = str(int(least[1]) + more * CHUNK_BYTES)
    # (In stage 1 a device has all gradients whole.)
    first = "400KiB" if stage > 1 else "600KiB"
    options |= {"placement_policy": "auto", "device_memory": first}
    for slots, in_ram in ranks2.run(ranks.with_nccl, ranks.homes_after_a_move, options, budget):
        assert (slots, in_ram) == (0, 0)


@pytest.mark.parametrize(
    ("stage", "policy"),
    [
        *((3, "cpu"), (1, "auto")),
        *(pytest.param(stage, "auto", marks=pytest.mark.extra) for stage in (2, 3)),
    ],
)
def test_budgets_that_move(ranks2: RankPool, stage: int, policy: str) -> None:
    """(In stages 1 and 2 chunks are on the device of one rank, and in RAM of the other.)"""
    budgets = ["64MiB", "700KiB", "300KiB" if stage > 1 else "600KiB", "1MiB"]
    wanted = ranks2.run(
        ranks.train_while_budgets_move,
        {"backend": "cpu", "dtype": "bf16", "zero_stage": stage},
        budgets,
    )
    options = ON_DEVICE | {"placement_policy": policy, "dtype": "bf16", "zero_stage": stage}
    for mine, right in zip(
        ranks2.run(ranks.with_nccl, ranks.train_while_budgets_move, options, budgets),
        wanted,
        strict=True,
    ):
        assert same(mine, right)
