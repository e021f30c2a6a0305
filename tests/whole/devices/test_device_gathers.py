"""Gathers between fake devices, one for each rank: what crosses the link, and what goes wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda import ranks
from tests.support.gathering import deviating
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import same

CHUNK_BYTES = 16384 * 2  # in bf16
LEAST = 5  # chunks on a device: gathered, not kept, in a bucket, received, and zeros


@pytest.mark.parametrize("policy", ["cpu", pytest.param("nvme", marks=pytest.mark.extra)])
def test_of_a_chunk_and_of_a_mean_one_shard_crosses_the_link(
    ranks2: RankPool, policy: str, tmp_path: Path
) -> None:
    options = {"dtype": "bf16", "nvme_path": str(tmp_path), "zero_stage": 3}
    options |= {"placement_policy": policy, "debug": {"overlap_updates": "none"}}
    # Five gathered chunks each, beside two gradients on their way to RAM; or one chunk that is not
    # kept, three buckets, two that are received, and zeros.
    in_ram = ranks2.run(ranks.train, options | {"device_memory": str((5 + 2) * CHUNK_BYTES)})
    between = options | {"device_memory": str((5 + 1 + 3 + 2 + 1) * CHUNK_BYTES)}
    for mine, other in zip(ranks2.run(ranks.train, between, 1, 1, True), in_ram, strict=True):
        assert other["gathers"] == 0 < other["h2d"]  # through RAM each rank reads alone
        assert mine["h2d"] == mine["gathers"] * CHUNK_BYTES // 2
        assert mine["d2h"] == other["d2h"] // 2  # of the means
        assert same(mine["masters"], other["masters"])


def test_what_every_rank_has_whole_in_ram_comes_by_way_of_the_device(ranks2: RankPool) -> None:
    """Of each chunk this rank's shard goes up and the other one comes down."""
    options = {"placement_policy": "cpu", "dtype": "bf16", "zero_stage": 2}
    options |= {"device_memory": "2MiB", "debug": {"overlap_updates": "none"}}
    in_ram = ranks2.run(ranks.train, options)
    for mine, other in zip(ranks2.run(ranks.train, options, 1, 1, True), in_ram, strict=True):
        halves = other["chunks"] * CHUNK_BYTES // 2
        assert mine["h2d"] - other["h2d"] == (ranks.STEPS + 1) * halves  # and the first values
        # Of gradients the shards of the means come back, and not all of them.
        gradients = other["numel"] * 2 - halves
        assert mine["d2h"] - other["d2h"] == (ranks.STEPS + 1) * halves - ranks.STEPS * gradients
        assert same(mine["masters"], other["masters"])


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.extra), 3])
def test_what_is_at_home_on_the_device_does_not_cross_the_link(
    ranks2: RankPool, stage: int
) -> None:
    options = {"placement_policy": "cuda", "device_memory": "64MiB", "dtype": "bf16"}
    options["zero_stage"] = stage
    for mine in ranks2.run(ranks.train, options, 1, 1, True):
        assert mine["h2d"] == 0
        assert stage == 3 or mine["d2h"] == 0


def test_a_budget_without_room_for_what_is_not_kept_is_refused(ranks2: RankPool) -> None:
    """Without NCCL a slot is enough, and a gradient on its way."""
    options = {"placement_policy": "cpu", "device_memory": str(2 * CHUNK_BYTES), "dtype": "bf16"}
    least = f"device_memory is .*smallest that works is .*\\({LEAST * CHUNK_BYTES} bytes\\)"
    for told in ranks2.run(ranks.refused, ranks.train, options, 1, 1, True):
        assert re.search(least, told), told
    options["device_memory"] = str(LEAST * CHUNK_BYTES)
    ranks2.run(ranks.train, options, 1, 1, True)


def test_a_budget_without_room_for_whole_gradients_is_refused(ranks2: RankPool) -> None:
    """In stage 1: a chunk for compute, one that is gathered to RAM, all gradients, what is
    received, and zeros."""
    options = {"placement_policy": "cpu", "dtype": "bf16", "zero_stage": 1}
    options["device_memory"] = str(3 * CHUNK_BYTES)
    told, _ = ranks2.run(ranks.refused, ranks.train, options, 1, 1, True)
    least = re.search(r"device_memory is .*smallest that works is [^(]*\((\d+) bytes\)", told)
    assert least is not None, told
    options["device_memory"] = least[1]
    for found in ranks2.run(ranks.train, options, 1, 1, True):
        assert found["budget"] == (found["chunks"] + 4) * CHUNK_BYTES


@pytest.mark.parametrize(
    "how",
    ["uneven", pytest.param("evaluates alone", marks=pytest.mark.extra), "waits elsewhere"],
)
def test_ranks_that_do_not_use_parameters_alike(ranks2: RankPool, how: str) -> None:
    whole = ranks2.run(deviating.train, {"zero_stage": 2}, how)
    options = {"backend": "cuda", "zero_stage": 3, "device_memory": "600KiB"}
    found = ranks2.run(ranks.with_nccl, deviating.train, options, how)
    for (masters, _), (right, _) in zip(found, whole, strict=True):
        assert same(masters, right)


def test_all_are_told_of_a_shard_that_one_cannot_read(ranks2: RankPool) -> None:
    (mine, first), (theirs, second) = ranks2.run(
        ranks.with_nccl, deviating.unreadable_shard, {"backend": "cuda", "device_memory": "600KiB"}
    )
    assert len(mine) == len(theirs) == 1
    assert "rank 1 could not give" in mine[0]
    assert "a bad sector" in mine[0]
    assert theirs[0].startswith("OSError: [Errno 5] a bad sector")
    assert same(first, second)


# Where a device may wait for another one: the collective, and options. (With two ranks replicas
# do not shard.)
WAITS = [
    pytest.param("_allgather_base", {}, "gathering", id="gather"),
    pytest.param("_allgather_base", {"zero_stage": 1}, "gathering", id="gather-at-home"),
    pytest.param("alltoall_base", {}, "the gradient of", id="mean"),
    pytest.param("alltoall_base", {"zero_stage": 1}, "the gradient of", id="mean-in-stage-1"),
    pytest.param("alltoall_base", {"replicas": 2}, "the gradient of", id="mean-of-replicas"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize(("where", "more", "what"), WAITS)
def test_a_rank_that_ends_or_hangs_where_a_device_waits_for_it(
    ranks2: RankPool, where: str, more: dict[str, Any], what: str, how: str
) -> None:
    waits, other = ranks2.run_to_the_end(ranks.without_other, how, where, more)
    if how == "dies":
        assert other.failure is not None
        assert "rank 1 is gone" in waits.result
    else:
        assert f"rank 1 did not take part in {what}" in waits.result


def test_a_rank_that_dies_ends_replicas_that_do_not_wait_for_it(ranks4: RankPool) -> None:
    """Rank 2 shares nothing with rank 1, but waits for rank 3, who waits for rank 1."""
    outcomes = ranks4.run_to_the_end(ranks.without_other, "dies", "alltoall_base", {"replicas": 2})
    assert outcomes[1].failure is not None
    for rank in (0, 2, 3):
        assert "is gone" in outcomes[rank].result or "ended by" in outcomes[rank].result
