"""tests/support/covering: which cases of a product are left out of make test."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    strength=st.integers(1, 3),
    turn=st.integers(0, 1 << 32),
)
def test_all_that_can_meet_does(lengths: list[int], strength: int, turn: int) -> None:
    """And no case is chosen that adds nothing."""
    cases = [
        {str(axis): (value,) for axis, value in enumerate(values)}
        for values in itertools.product(*map(range, lengths))
    ]

    def tuples(numbers: set[int]) -> set[tuple[object, ...]]:
        each = (itertools.combinations(cases[n].items(), strength) for n in numbers)
        return set(itertools.chain.from_iterable(each))

    chosen = covering(cases, strength, turn)
    if strength > len(lengths):
        assert chosen == set(range(len(cases)))
    else:
        assert tuples(chosen) == tuples(set(range(len(cases))))
        assert len(chosen) <= len(tuples(chosen))


def test_products_of_the_same_axes_take_turns() -> None:
    cases = [{"place": (p,), "overlap": (o,)} for p in "abcde" for o in "vwxyz"]
    met = set().union(*(covering(cases, 1, turn) for turn in range(25)))
    assert len(covering(cases, 1, 0)) == 5
    assert len(met) == 25
