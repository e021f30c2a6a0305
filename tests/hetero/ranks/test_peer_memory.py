"""Ranks of one machine read each other's memory; where they cannot, gloo brings the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetero.ranks.collectives import GatheredParts
from tests.support.gathering import peer_memory
from tests.support.ranks.processes import RankPool


@pytest.fixture(scope="module")
def pool(ranks_of: Callable[[int], RankPool]) -> RankPool:
    return ranks_of(3)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"zero_stage": stage, "dtype": dtype}, id=f"stage {stage}, {dtype}")
        for stage, dtype in ((1, "fp32"), (2, "bf16"), (3, "bf16"))
    ],
)
def test_the_same_bits_with_and_without(pool: RankPool, options: dict[str, Any]) -> None:
    read = pool.run(peer_memory.train, options, "read")
    sent = pool.run(peer_memory.train, options, "sent")
    for ours, theirs in zip(read, sent, strict=True):
        assert (ours["reads"], theirs["reads"]) == (True, False)
        assert torch.equal(ours["losses"], theirs["losses"])
        for a, b in zip(ours["masters"], theirs["masters"], strict=True):
            assert torch.equal(a, b)


def test_if_the_system_refuses_one_rank_all_send() -> None:
    """A rank that may not read makes all of them use gloo: none waits for what never comes."""
    with RankPool(2) as pool:  # for which that is so for good
        refused = pool.run(peer_memory.train, {}, "refused")
        read = pool.run(peer_memory.train, {}, "read")
    assert [found["reads"] for found in refused] == [False, False]
    for a, b in zip(refused[0]["masters"], read[0]["masters"], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("how", "reads", "connected", "closed"),
    [
        ("free", True, [], []),
        ("ptrace_scope 1", True, [True], [True, False]),
        ("ptrace_scope 3", False, [True, False], [True, False]),
        ("unwanted", False, [], []),
    ],
)
def test_memory_is_opened_to_others_only_where_that_helps(
    pool: RankPool, how: str, reads: bool, connected: list[bool], closed: list[bool]
) -> None:
    for found in pool.run(peer_memory.connect, how):
        assert found == {"reads": reads, "connected": connected, "closed": closed}


def test_hybrid_sharding(ranks4: RankPool) -> None:
    """Replicas read each other's parts, too."""
    read = ranks4.run(peer_memory.train, {}, "read", 2)
    sent = ranks4.run(peer_memory.train, {}, "sent", 2)
    for ours, theirs in zip(read, sent, strict=True):
        assert ours["reads"]
        for a, b in zip(ours["masters"], theirs["masters"], strict=True):
            assert torch.equal(a, b)


def test_by_gloo_no_connection_carries_bytes_in_both_directions(pool: RankPool) -> None:
    """It would carry them in turn, at half the rate of a link."""
    for found in zip(*pool.run(peer_memory.send_both_ways), strict=True):
        pairs = set().union(*found)
        assert pairs
        assert not pairs & {(to, begin) for begin, to in pairs}


def test_a_wait_by_gloo_ends_with_the_other_rank(ranks2: RankPool) -> None:
    told, _ = ranks2.run(peer_memory.wait_for_one_that_leaves)
    assert "rank 1" in told
    assert "needed it for it" in told


def test_memory_is_the_owners_when_all_have_read(ranks2: RankPool) -> None:
    """What a rank writes right after a gather or a mean no other rank has got."""
    assert ranks2.run(peer_memory.write_afterwards) == [0, 0]


def test_memory_that_is_kept_is_let_go_when_all_have_read(ranks2: RankPool) -> None:
    assert ranks2.run(peer_memory.write_when_let_go) == [0, 0]


def test_who_reads_what_its_owner_has_freed_is_told(ranks2: RankPool) -> None:
    first, second = ranks2.run(peer_memory.read_what_is_freed)
    assert first == ""
    assert "rank 0 closed its engine" in second
    assert "needed it for it" in second


def test_memory_that_was_let_go_is_not_written_to() -> None:
    """A gather that a rank does not wait for any more goes on, for the others."""
    whole = torch.zeros(8, dtype=torch.uint8)
    parts = GatheredParts(whole, 2)
    parts.store(0, torch.ones(2, 2, dtype=torch.uint8))
    assert parts.let_go()
    parts.store(2, torch.ones(2, 2, dtype=torch.uint8))
    assert whole.view(2, 4).tolist() == [[1, 1, 0, 0]] * 2
