"""Which calls of a forward are computed again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hetero.runtime.recompute.recompute import CallCost, choose

COST = CallCost(100, 10)


def saved(calls: list[CallCost], chosen: list[bool]) -> int:
    pairs = zip(calls, chosen, strict=True)
    return sum(call.size_bytes if again else call.saved_bytes for call, again in pairs)


@given(
    st.lists(st.builds(CallCost, st.integers(10, 100), st.integers(0, 10), st.booleans())),
    st.integers(-100, 1000),
)
def test_no_more_than_it_takes(calls: list[CallCost], kept_bytes: int) -> None:
    """All that can be, or so few that with one less the rest would not fit."""
    chosen = choose(calls, kept_bytes)
    assert not any(
        again and not call.is_repeatable for call, again in zip(calls, chosen, strict=True)
    )
    if saved(calls, chosen) > kept_bytes:
        assert chosen == [call.is_repeatable for call in calls]
    elif any(chosen):
        last = max(index for index, again in enumerate(chosen) if again)
        fewer = [again and index != last for index, again in enumerate(chosen)]
        assert saved(calls, fewer) > kept_bytes


def test_the_earliest_calls() -> None:
    """Backward has freed what the last ones keep before it computes another one again."""
    assert choose([COST] * 8, 620) == [True] * 2 + [False] * 6
    odd = [replace(COST, is_repeatable=index % 2 == 1) for index in range(8)]
    assert choose(odd, 620) == [False, True, False, True, False, False, False, False]


def test_larger_inputs() -> None:
    assert choose([COST] * 4, 400) == [False] * 4
    assert choose([COST] * 4, 400, share=2.0) == [True] * 3 + [False]
