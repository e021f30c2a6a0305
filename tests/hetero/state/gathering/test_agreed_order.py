"""The order of gathers: ranks that follow it by any route start the same ones in the same order."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hetero.planning.belady import ahead_slots, rounds
from hetero.state.gathering.agreed_gathers import (
    AgreedOrder,
    ChunkUse,
    Progress,
    fingerprint,
    from_bytes,
    merge,
    to_bytes,
    without_repeats,
)

USES = st.lists(st.builds(ChunkUse, st.integers(0, 6), st.booleans()), min_size=1, max_size=30).map(
    without_repeats
)


def chain(chunks: int) -> list[ChunkUse]:
    """A forward and a backward of so many layers."""
    forward = [ChunkUse(chunk, False) for chunk in range(chunks)]
    return forward + [ChunkUse(use.chunk, True) for use in reversed(forward)]


def order(uses: Sequence[ChunkUse], capacity: int = 2) -> AgreedOrder:
    return AgreedOrder(uses, dict.fromkeys(range(7), 1), capacity, ())


def is_subsequence(part: Sequence[ChunkUse], whole: Sequence[ChunkUse]) -> bool:
    rest = iter(whole)
    return all(use in rest for use in part)


@given(st.lists(USES, min_size=1, max_size=4))
def test_a_merged_order_has_each_ranks_uses_in_its_order(
    records: list[tuple[ChunkUse, ...]],
) -> None:
    merged = merge(records)
    assert all(is_subsequence(record, merged) for record in records) or merged == records[0]
    assert merged == merge(records)


def test_equal_records_stay_what_they_are_and_experts_of_all_ranks_are_in_the_order() -> None:
    uses = tuple(chain(4))
    assert merge([uses, uses, uses]) == uses
    one, other = (tuple(use for use in uses if use.chunk != left) for left in (1, 2))
    merged = merge([one, other])
    assert set(merged) == set(uses)
    assert is_subsequence(one, merged)
    assert is_subsequence(other, merged)


def test_records_without_anything_in_common_do_not_grow_without_limit() -> None:
    records = [tuple(ChunkUse(rank, place % 2 > 0) for place in range(9)) for rank in range(6)]
    assert merge(records) == records[0]


@given(USES)
def test_a_record_survives_its_way_to_other_ranks(uses: tuple[ChunkUse, ...]) -> None:
    assert from_bytes(to_bytes(uses)) == uses
    assert fingerprint(from_bytes(to_bytes(uses))) == fingerprint(uses)


@given(USES, st.integers(1, 5))
def test_who_makes_all_uses_is_as_expected_in_every_round(
    uses: tuple[ChunkUse, ...], count: int
) -> None:
    progress = Progress(order(uses))
    for _ in range(count):
        for use in uses:
            assert progress.note(use)
    assert progress.is_as_expected
    assert progress.passed == count * len(uses)


@given(st.data())
def test_who_skips_uses_of_a_phase_is_where_the_others_are_at_its_end(data: st.DataObject) -> None:
    """As of experts. (A chunk that a phase uses twice may be found at its first place.)"""
    uses = chain(6)
    progress, whole = Progress(order(uses)), order(uses)
    for place, use in enumerate(uses):
        is_last = place + 1 == len(uses) or whole.phases[place + 1] != whole.phases[place]
        if is_last or data.draw(st.booleans()):
            assert progress.note(use)
            assert whole.uses[progress.passed - 1] == use
    assert progress.passed == len(uses)


def test_a_forward_that_others_do_not_make_is_not_taken_for_the_next_one() -> None:
    """F F B, where the order is F B: the second forward deviates, and the backward does not."""
    progress = Progress(order(chain(3)))
    forward, backward = chain(3)[:3], chain(3)[3:]
    assert all(progress.note(use) for use in forward)
    assert not any(progress.note(use) for use in forward)
    assert all(progress.note(use) for use in backward)
    assert not progress.is_as_expected
    assert progress.deviations == 3


@given(USES, st.integers(1, 4))
def test_the_gathers_of_a_step_are_beladys_and_none_is_missing_in_later_rounds(
    uses: tuple[ChunkUse, ...], capacity: int
) -> None:
    """Each use finds its chunk in the slots, if gathers fill them as the order says."""
    chunks = [use.chunk for use in uses]
    slots = dict.fromkeys(chunks, 1)
    made, ahead = order(uses, capacity), ahead_slots(slots, capacity)
    first = next(rounds(chunks, slots, capacity, (), ahead))
    found = [made.gather(number) for number in range(len(first))]
    assert [each and (each.place, each.after) for each in found] == [
        (each.use, each.after) for each in first
    ]
    by_round = rounds(chunks, slots, capacity, (), ahead)
    number = 0
    for turn in range(4):
        for each in next(by_round):
            gather = made.gather(number)
            if gather is None:
                return
            assert gather == (
                chunks[each.use],
                turn * len(uses) + each.use,
                turn * len(uses) + each.after,
            )
            number += 1
