"""Ranks that do not use parameters alike: nothing hangs, and bits are those of whole homes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gathering import deviating
from tests.support.ranks.processes import RankPool
from tests.support.training.loops import same

TIGHT = {"host_memory": "1900KiB"}
ALONE = ["evaluates alone", "forward alone", "looks at weights", "waits elsewhere"]


WHOLE: dict[str, list[Any]] = {}


def with_whole_homes(ranks2: RankPool, how: str) -> list[Any]:
    """What ranks that gather nothing have, which is made once for all tests; nothing that a rank
    does alone changes it."""
    how = "alone" if how in ALONE else how
    if how not in WHOLE:
        WHOLE[how] = ranks2.run(deviating.train, {"zero_stage": 2}, how)
    return WHOLE[how]


@pytest.mark.parametrize("how", ["uneven", "in turns", *ALONE])
def test_masters_are_those_of_ranks_that_gather_nothing(ranks2: RankPool, how: str) -> None:
    whole = with_whole_homes(ranks2, how)
    found = ranks2.run(deviating.train, {"zero_stage": 3, **TIGHT}, how)
    for (masters, reads), (right, no_reads) in zip(found, whole, strict=True):
        assert same(masters, right)
        assert not any(no_reads)
        if how == "uneven":
            assert not any(reads), reads
    if how in ALONE and how != "forward alone":  # (for which the others, in step(), help)
        assert any(any(reads) for _, reads in found)


@pytest.mark.parametrize(
    "how",
    ["in turns", "forward alone", pytest.param("looks at weights", marks=pytest.mark.extra)],
)
def test_gathers_that_pass_through_little_ram_to_a_device(ranks2: RankPool, how: str) -> None:
    """Some wait for room in RAM, while others are made that a rank does not keep."""
    whole = with_whole_homes(ranks2, how)
    device = {"backend": "emulated", "device_memory": "600KiB", "debug": {"link_gbps": 1.0}}
    found = ranks2.run(deviating.train, {"zero_stage": 3, **device}, how)
    for (masters, _), (right, _) in zip(found, whole, strict=True):
        assert same(masters, right)


def test_four_ranks_of_which_one_goes_on_alone(ranks4: RankPool) -> None:
    whole = ranks4.run(deviating.train, {"zero_stage": 2}, "alone")
    found = ranks4.run(deviating.train, {"zero_stage": 3}, "waits elsewhere")
    for (masters, _), (right, _) in zip(found, whole, strict=True):
        assert same(masters, right)


def test_all_are_told_of_a_shard_that_one_cannot_read(ranks2: RankPool) -> None:
    (mine, first), (theirs, second) = ranks2.run(deviating.unreadable_shard, {})
    assert len(mine) == len(theirs) == 1
    assert "rank 1 could not give" in mine[0]
    assert "a bad sector" in mine[0]
    assert theirs[0].startswith("OSError: [Errno 5] a bad sector")
    assert same(first, second)


def test_gathers_that_differ_between_ranks_are_an_error(ranks2: RankPool) -> None:
    for told in ranks2.run(deviating.other_gathers):
        assert "the ranks have gathered different chunks" in told
