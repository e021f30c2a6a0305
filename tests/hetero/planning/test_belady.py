"""hetero/planning/belady: the fewest fetches, against a search of all ways to give slots up."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from hetero.planning.belady import PREFETCH_CHUNKS, PlannedFetch, ahead_slots, rounds

sequences = st.lists(st.integers(0, 4), min_size=1, max_size=9)


def fewest(uses: list[int], capacity: int) -> int:
    """By trying every choice of what to give up, with slots of one size and an empty start."""

    @cache
    def best(position: int, held: frozenset[int]) -> int:
        if position == len(uses):
            return 0
        chunk = uses[position]
        if chunk in held:
            return best(position + 1, held)
        if len(held) < capacity:
            return 1 + best(position + 1, held | {chunk})
        return 1 + min(best(position + 1, held - {v} | {chunk}) for v in held)

    return best(0, frozenset())


def mean_fewest(uses: list[int], capacity: int) -> float:
    """Per step, of many steps in a row whose copies all last."""
    return (fewest(uses * 12, capacity) - fewest(uses * 4, capacity)) / 8


ONE = dict.fromkeys(range(5), 1)


def fetches(*given, **more) -> list[PlannedFetch]:
    """Those of the first time that a step uses its chunks."""
    return next(rounds(*given, **more))


@given(sequences, st.integers(1, 4))
def test_no_way_to_give_slots_up_fetches_less(uses, capacity):
    assert len(fetches(uses, ONE, capacity)) == fewest(uses, capacity)


@given(sequences, st.integers(1, 3))
def test_copies_that_last_from_step_to_step_are_found_again(uses, capacity):
    found = len(fetches(uses, ONE, capacity, kept=set(uses)))
    if len(set(uses)) <= capacity:
        assert found == 0
    # Steps may alternate between one fetch more and one fewer.
    assert mean_fewest(uses, capacity) - 1 <= found <= fewest(uses, capacity)


@given(sequences, st.integers(1, 4), st.sets(st.integers(0, 4)))
def test_room_is_free_before_it_is_taken_and_a_first_use_is_fetched(uses, capacity, kept):
    found = fetches(uses, ONE, capacity, kept)
    assert [f.use for f in found] == sorted({f.use for f in found})
    for fetch in found:
        assert -1 <= fetch.after < fetch.use
    fetched = {uses[f.use] for f in found}
    assert fetched >= set(uses) - kept


@given(st.integers(1, 30), st.integers(1, 30))
def test_forward_and_backward_meet_in_the_slots(chunks, capacity):
    uses = [*range(chunks), *reversed(range(chunks))]
    found = fetches(uses, dict.fromkeys(uses, 1), capacity)
    assert len(found) == 2 * chunks - min(capacity, chunks)


def test_a_large_chunk_pushes_several_small_ones_out():
    # Two small ones, a large one in their place, and both again.
    found = fetches([0, 1, 2, 1, 0], {0: 1, 1: 1, 2: 2}, 2)
    assert [(f.use, f.after) for f in found] == [(0, -1), (1, -1), (2, 1), (3, 2), (4, 2)]


def test_room_is_told_by_the_last_use_of_what_was_there():
    # 1 is needed again last, so it makes room for 2, right after its use; then 2 for 1.
    found = fetches([0, 1, 2, 0, 1], ONE, 2)
    assert [(f.use, f.after) for f in found] == [(0, -1), (1, -1), (2, 1), (4, 2)]


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=40),
    st.lists(st.integers(1, 3), min_size=7, max_size=7),
    st.integers(3, 12),
    st.integers(0, 4),
)
def test_fetches_that_begin_when_their_room_is_free_never_take_more_than_there_is(
    uses, sizes, capacity, ahead
):
    """A fetch begins after the use that it names; what it takes, chunks with no next use before
    their own next fetch have left by then."""
    slots_of = dict(enumerate(sizes))
    found = fetches(uses, slots_of, capacity, (), min(ahead, capacity - max(sizes)))
    fetched = {f.use for f in found}
    for now in range(-1, len(uses)):
        begun = [f for f in found if f.after <= now]
        coming = sum(slots_of[uses[f.use]] for f in begun if f.use > now)
        # Copies that a later use finds are there; others need not be.
        there = {
            chunk
            for chunk in set(uses[: now + 1])
            if next((u for u in range(now + 1, len(uses)) if uses[u] == chunk), None)
            not in (None, *fetched)
        }
        assert coming + sum(slots_of[chunk] for chunk in there) <= capacity


@given(st.integers(2, 30), st.integers(2, 12))
def test_ahead_slots_bring_fetches_forward_and_cost_what_they_do_not_keep(chunks, capacity):
    uses = [*range(chunks), *reversed(range(chunks))]
    slots = dict.fromkeys(uses, 1)
    ahead = ahead_slots(slots, capacity)
    assert ahead == (0 if chunks <= capacity else min(PREFETCH_CHUNKS, capacity - 1))
    found = fetches(uses, slots, capacity, (), ahead)
    assert len(found) == 2 * chunks - min(chunks, capacity - ahead)
    for fetch in found[:chunks]:  # those of forward; backward's follow the uses of forward
        assert fetch.after <= max(-1, fetch.use - 1 - ahead)
    for fetch in found[chunks:]:
        assert fetch.after <= max(fetch.use - 1 - ahead, 2 * chunks - 1 - fetch.use)


def test_the_longest_chunk_has_room_beside_ahead_slots():
    assert ahead_slots({0: 6, 1: 1, 2: 1, 3: 1}, 8) == 2
    assert ahead_slots({0: 6, 1: 1, 2: 1, 3: 1}, 6) == 0
    assert ahead_slots({0: 1, 1: 1}, 2) == 0
    assert ahead_slots({}, 3) == 0
