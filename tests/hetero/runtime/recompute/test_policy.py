"""What is computed again, step after step: bytes at first, then bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hetero.runtime.recompute.policy import CallCost, Expected, Forward, RecomputePolicy, SeenStep

MB = 1_000_000
CALLS = 8
COST = CallCost(100 * MB, 10 * MB, 0.1, 10 * MB)
# A disk that moves 1 GB/s while nothing is computed again.
SEEN = SeenStep(
    forward_s=0.8,
    backward_s=1.6,
    micro_batches=1,
    moved_bytes=1000.0 * MB,
    moving_s=1.0,
    activation_bytes=1000.0 * MB,
)
DUE = 2  # the first step that is looked at


@dataclass
class Room:
    """What ActivationStore says of its room."""

    keepable_bytes: int = 0
    elsewhere_bytes: int | None = None


class Rig:
    """A policy, and the collectives that it has made."""

    def __init__(self, mode: Any = "auto", agree: Callable[..., int] | None = None, **room: Any):
        self.room: Any = Room(**room)
        self.agreed = 0
        self._agree = agree or (lambda value, choose, what: value)
        self.policy = RecomputePolicy(mode, self.room, self._count)

    def _count(self, value: int, choose: Callable[[Iterable[int]], int], what: str) -> int:
        self.agreed += 1
        return self._agree(value, choose, what)

    def chosen(
        self, cost: CallCost = COST, other_bytes: int | None = 0, held_bytes: int = 0
    ) -> list[bool]:
        """For a forward of so large inputs."""
        expected = Expected([COST] * CALLS, other_bytes, held_bytes)
        return [
            self.policy.recomputes(number, cost.size_bytes, expected) for number in range(CALLS)
        ]

    def steps(self, count: int, seen: SeenStep | None = SEEN, other_bytes: int = 0) -> None:
        for _ in range(count):
            forward = Forward()
            for again in self.chosen():
                forward.add(COST, again, 0)
            forward.end(other_bytes)
            self.policy.end_step(forward, seen)


def test_by_bytes_at_first() -> None:
    assert Rig().chosen() == [True] * CALLS
    assert Rig(keepable_bytes=CALLS * 100 * MB).chosen() == [False] * CALLS
    assert Rig(keepable_bytes=CALLS * 100 * MB - 1).chosen() == [True] * CALLS


def test_what_is_saved_beside_blocks() -> None:
    """Has its part of the room; of the first forward nobody knows it."""
    rig = Rig(keepable_bytes=CALLS * 100 * MB + 50 * MB)
    assert rig.chosen(other_bytes=None) == [True] * CALLS
    assert rig.chosen(other_bytes=50 * MB) == [False] * CALLS
    assert rig.chosen(other_bytes=51 * MB) == [True] * CALLS
    assert rig.chosen(other_bytes=0, held_bytes=51 * MB) == [True] * CALLS
    rig.steps(DUE, replace(SEEN, moving_s=100.0))
    assert rig.chosen() == [False] * CALLS
    assert any(rig.chosen(held_bytes=150 * MB))


def test_by_seconds_when_they_are_known() -> None:
    """Transfers that compute hides are free; a slow disk's are not."""
    rig = Rig()
    rig.steps(DUE - 1)
    assert rig.chosen() == [True] * CALLS
    rig.steps(1)
    assert rig.chosen() == [False] * CALLS
    slow = Rig()
    slow.steps(DUE, replace(SEEN, moving_s=100.0))
    assert slow.chosen() == [True] * CALLS


def test_micro_batches_share_a_step() -> None:
    """Seconds and bytes of a step are of all its micro-batches."""
    one, four = Rig(), Rig()
    rate = replace(SEEN, moving_s=2.5)
    one.steps(DUE, rate)
    four.steps(
        DUE,
        SeenStep(
            4 * rate.forward_s,
            4 * rate.backward_s,
            4,
            4 * rate.moved_bytes,
            4 * rate.moving_s,
            4 * rate.activation_bytes,
        ),
    )
    assert 0 < sum(one.chosen()) < CALLS
    assert one.chosen() == four.chosen()


def test_no_place_elsewhere() -> None:
    rig = Rig(keepable_bytes=500 * MB, elsewhere_bytes=0)
    rig.steps(DUE)
    assert sum(rig.chosen()) == 4
    rig = Rig(keepable_bytes=500 * MB, elsewhere_bytes=0)
    rig.steps(DUE, other_bytes=90 * MB)
    assert sum(rig.chosen()) == 5


def test_inputs_of_another_length() -> None:
    rig = Rig(keepable_bytes=CALLS * 100 * MB, elsewhere_bytes=0)
    rig.steps(DUE)
    assert rig.chosen() == [False] * CALLS
    assert 0 < sum(rig.chosen(COST.times(2.0))) < CALLS
    assert rig.chosen(COST.times(0.5)) == [False] * CALLS
    for length in range(1, 60):  # the usual one is known after very many others
        rig.chosen(COST.times(1 + length / 100))
    assert rig.chosen() == [False] * CALLS


def test_more_calls_than_before() -> None:
    rig = Rig()
    expected = Expected([COST] * CALLS, 0, 0)
    assert rig.policy.recomputes(CALLS + 5, COST.size_bytes, expected)
    rig.room.keepable_bytes = CALLS * 100 * MB
    assert not rig.policy.recomputes(CALLS + 5, COST.size_bytes, expected)


def test_small_gains_change_nothing() -> None:
    """The order of gathers is not changed for less than a twentieth of a micro-batch."""
    rig = Rig()
    rig.steps(DUE, replace(SEEN, moving_s=2.5))
    before = rig.chosen()
    assert 0 < sum(before) < CALLS
    rig.steps(1, replace(SEEN, moving_s=2.6))
    assert rig.chosen() == before
    rig.steps(13, replace(SEEN, moving_s=25.0))
    assert rig.chosen() == [True] * CALLS


def test_room_that_is_gone_changes_it() -> None:
    """Whatever it gains: nothing may leave."""
    rig = Rig(keepable_bytes=CALLS * 100 * MB, elsewhere_bytes=0)
    rig.steps(DUE)
    assert rig.chosen() == [False] * CALLS
    rig.room.keepable_bytes = CALLS * 100 * MB - 1
    rig.steps(1)
    assert sum(rig.chosen()) == 1


def test_when_ranks_agree() -> None:
    """Few times: at the end of two steps, and of each 16th."""
    rig = Rig()
    counts = []
    for _ in range(33):
        rig.steps(1)
        counts.append(rig.agreed)
    changes = [step for step in range(1, 33) if counts[step] != counts[step - 1]]
    assert [step + 1 for step in changes] == [2, 3, 16, 32]
    assert len({counts[step] - counts[step - 1] for step in changes}) == 1
    silent = Rig("all", keepable_bytes=CALLS * 100 * MB)
    silent.steps(33)
    assert silent.agreed == 0
    assert silent.chosen() == [True] * CALLS


def test_a_rank_that_knows_nothing_yet() -> None:
    """Then no rank takes its own figures."""
    rig = Rig(agree=lambda value, choose, what: choose([value, 0]))
    rig.steps(DUE)
    assert rig.agreed == 1
    assert rig.chosen() == [True] * CALLS
    alone = Rig()
    alone.steps(DUE, None)
    assert alone.chosen() == [True] * CALLS


@pytest.mark.parametrize("slower", [0, 1])
def test_ranks_choose_alike(slower: int) -> None:
    """By the slowest compute, and the slowest disk, of all."""
    seen = [replace(SEEN, moving_s=2.5), replace(SEEN, moving_s=9.0, forward_s=0.9)]
    if slower:
        seen.reverse()
    posted: list[list[int]] = [[], []]
    rigs = []
    for rank in (0, 1):  # what each one brings

        def post(value: int, choose: Any, what: str, rank: int = rank) -> int:
            posted[rank].append(value)
            return value

        Rig(agree=post).steps(DUE, seen[rank])
    for rank in (0, 1):
        turns = iter(zip(*posted, strict=True))
        rig = Rig(agree=lambda value, choose, what, turns=turns: choose(next(turns)))
        rig.steps(DUE, seen[rank])
        rigs.append(rig)
    assert rigs[0].chosen() == rigs[1].chosen()
    assert any(rigs[0].chosen())


def test_fast_devices() -> None:
    """Seconds per byte have digits enough: a block computes a GB in a millisecond."""
    fast = replace(COST, saved_bytes=1000 * MB, forward_s=1e-3)
    rig = Rig()
    forward = Forward()
    for _ in range(CALLS):
        forward.add(fast, True, 0)
    forward.end(0)
    for _ in range(DUE):
        rig.policy.end_step(forward, replace(SEEN, forward_s=8e-3, backward_s=24e-3))
    assert rig.policy._costs[0].forward_s == pytest.approx(1e-3, rel=1e-6)


def test_words() -> None:
    rig = Rig()
    assert "No call of a block was seen" in rig.policy.words(Forward())
    forward = Forward()
    for again in rig.chosen():
        forward.add(COST, again, 0)
    assert "no step has measured" in rig.policy.words(forward)
    rig.steps(DUE)
    assert "Of 8 calls of blocks 8 are computed again" in rig.policy.words(forward)
    assert "with one more GiB for activations" in rig.policy.words(forward)
