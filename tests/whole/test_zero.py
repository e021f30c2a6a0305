"""ZeRO over ranks: the same numbers in every stage, and the bytes that theory says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.planning.belady import ahead_slots
from tests.support.ranks import rank_training
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import same

PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"placement_policy": "cpu"},
    "nvme": {"placement_policy": "nvme"},
    "tight": {"placement_policy": "nvme", "host_memory": "900KiB", "chunk_numel": 16384},
    "auto": {"placement_policy": "auto", "host_memory": "2500KiB"},
}
REFERENCES: dict[Any, Any] = {}


def sweep(*values: Any) -> Any:
    """A case for `make test-all` only."""
    return pytest.param(*values, marks=pytest.mark.extra)


def options(stage: int, place: str, path: Path, **more: Any) -> dict[str, Any]:
    where = {} if place == "cpu" else {"nvme_path": str(path)}
    return {"zero_stage": stage, **PLACES[place], **where, **more}


def reference(pool: RankPool, dtype: str, accumulate: int, sync_each: bool) -> Any:
    """Stage 2 (its rounding is that of stage 3) or, without sync, stage 1, all in RAM."""
    key = (pool.world, dtype, accumulate, sync_each)
    if key not in REFERENCES:
        stage = 2 if sync_each else 1
        chosen = {"zero_stage": stage, "dtype": dtype, "initial_loss_scale": 256.0}
        REFERENCES[key] = pool.run(rank_training.train, chosen, 2, accumulate, sync_each)
    return REFERENCES[key]


@pytest.mark.parametrize(
    ("stage", "place", "dtype", "accumulate", "sync_each", "more"),
    [
        (1, "nvme", "bf16", 1, True, {}),
        (3, "cpu", "fp32", 1, True, {"debug": {"shard_strategy": "tensor"}}),
        (3, "cpu", "fp32", 1, True, {"debug": {"shard_strategy": "bucket", "prefetch": False}}),
        (3, "auto", "fp16", 1, True, {}),
        (3, "cpu", "fp32", 3, False, {}),
        (2, "auto", "fp32", 1, True, {"debug": {"overlap_updates": "forward"}}),
        (3, "tight", "bf16", 3, True, {"debug": {"overlap_updates": "forward"}}),
        sweep(1, "cpu", "fp32", 1, True, {}),
        sweep(1, "nvme", "fp16", 3, False, {}),
        sweep(2, "nvme", "bf16", 3, True, {}),
        sweep(2, "cpu", "fp32", 3, False, {}),
        sweep(3, "cpu", "bf16", 1, True, {}),
        sweep(3, "nvme", "fp32", 3, True, {"debug": {"io_engine": "threads"}}),
        sweep(3, "tight", "fp32", 1, True, {}),
    ],
)
def test_stage_and_placement_change_no_bit(
    ranks2: RankPool,
    tmp_path: Path,
    stage: int,
    place: str,
    dtype: str,
    accumulate: int,
    sync_each: bool,
    more: dict[str, Any],
) -> None:
    chosen = options(stage, place, tmp_path, dtype=dtype, initial_loss_scale=256.0, **more)
    found = ranks2.run(rank_training.train, chosen, 2, accumulate, sync_each)
    expected = reference(ranks2, dtype, accumulate, sync_each)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["norms"] == theirs["norms"]
        assert same(mine["masters"], theirs["masters"])
    assert same(found[0]["masters"], found[1]["masters"])
    assert all(one["disk"] == (place in ("nvme", "tight")) or place == "auto" for one in found)


def test_shards_of_states_in_8_bits_change_no_bit(ranks2: RankPool, tmp_path: Path) -> None:
    """State blocks are the same ones, because shards begin where one begins."""
    common = {"dtype": "bf16", "state_dtype": "8bit"}
    expected = ranks2.run(rank_training.train, {"zero_stage": 2, **common}, 2)
    for stage, place in ((1, "nvme"), (3, "tight")):
        found = ranks2.run(rank_training.train, options(stage, place, tmp_path, **common), 2)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["losses"] == theirs["losses"], stage
            assert same(mine["masters"], theirs["masters"]), stage


def test_fp16_means_do_not_overflow(ranks2: RankPool) -> None:
    found = ranks2.run(rank_training.train, {"dtype": "fp16", "initial_loss_scale": 2.0**14})[0]
    assert found["skipped"] == 0


def test_skipped_steps_are_skipped_on_all_ranks(ranks2: RankPool) -> None:
    found = ranks2.run(rank_training.train, {"dtype": "fp16", "initial_loss_scale": 2.0**24})
    assert found[0]["skipped"] == found[1]["skipped"] > 0
    assert found[0]["scale"] == found[1]["scale"]
    assert same(found[0]["masters"], found[1]["masters"])


def test_gradients_travel_in_the_reduce_dtype(ranks2: RankPool) -> None:
    kept = ranks2.run(rank_training.train, {"grad_dtype": "fp32", "dtype": "bf16"})
    rounded = ranks2.run(
        rank_training.train, {"grad_dtype": "fp32", "dtype": "bf16", "reduce_dtype": "bf16"}
    )
    assert not same(kept[0]["masters"], rounded[0]["masters"])
    assert same(rounded[0]["masters"], rounded[1]["masters"])


@pytest.mark.parametrize(
    ("stage", "dtype", "more"),
    [
        (1, "bf16", {}),
        (2, "fp32", {}),
        (3, "bf16", {}),
        sweep(1, "fp32", {}),
        sweep(2, "bf16", {}),
        sweep(3, "fp32", {"debug": {"prefetch": False}}),
    ],
)
def test_bytes_are_as_the_formula_says(
    ranks2: RankPool, ranks4: RankPool, stage: int, dtype: str, more: dict[str, Any]
) -> None:
    """Stages 1 and 2 send as data parallel does, stage 3 half as much again."""
    pool = ranks4 if stage == 3 else ranks2
    n = pool.world
    param, optim_state = (2, 10) if dtype == "bf16" else (4, 8)
    for found in pool.run(rank_training.traffic, {"zero_stage": stage, "dtype": dtype, **more}):
        capacity, used = found["capacity"], found["used"]
        once, kept = capacity * param // n * (n - 1), 0
        if stage == 3:
            # Backward begins with what forward left in the slots, but those for gathers ahead.
            assert found["chunks"] == 12
            slots = found["gathered_slots"]
            ahead = ahead_slots(dict.fromkeys(range(12), 1), slots)
            assert 0 < ahead < slots
            kept = once * (slots - ahead) // found["chunks"]
        sent = once * (3 if stage == 3 else 2) - kept
        assert found["last"] == (sent, sent)
        assert used["param"] == capacity * param // (n if stage == 3 else 1)
        assert used["grad"] == capacity * param // n
        assert (used["bucket"] > capacity * param) == (stage == 1)
        assert used["optim_state"] == capacity * optim_state // n
        assert (used["gathered"] > 0) == (stage == 3)


@pytest.mark.parametrize(
    ("stage", "shape"),
    [(3, (2, 2)), sweep(2, (4, 1)), sweep(1, (2, 2)), sweep(2, (2, 2))]
    + [sweep(stage, shape) for stage in (1, 3) for shape in ((4, 1), (1, 4), (4,))],
)
def test_hybrid_sharding(ranks4: RankPool, stage: int, shape: tuple[int, ...]) -> None:
    found = ranks4.run(rank_training.train, {"zero_stage": stage}, 2, 1, True, shape)
    expected = ranks4.run(rank_training.train, {"zero_stage": 3}, 2)
    assert all(same(one["masters"], found[0]["masters"]) for one in found)
    assert found[0]["norms"] == pytest.approx(expected[0]["norms"], rel=1e-5)
    if len(shape) == 1 or shape[0] == 1:
        assert same(found[0]["masters"], expected[0]["masters"])
