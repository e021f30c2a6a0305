"""offload/order: the learned order of uses, against a model that searches the whole step."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from offload.order import UseOrder

chunks = st.integers(0, 5)
steps = st.lists(st.lists(chunks, max_size=14), max_size=4)


class NaiveOrder:
    """The same promises, by search."""

    def __init__(self):
        self.known, self.position, self.recording = [], 0, []

    def distance(self, chunk):
        around = self.known[self.position :] + self.known[: self.position]
        return around.index(chunk) if chunk in around else None

    def note(self, chunk):
        if self.recording[-1:] == [chunk]:
            return
        self.recording.append(chunk)
        distance = self.distance(chunk)
        if distance is not None:
            self.position = (self.position + distance + 1) % len(self.known)

    def end_step(self):
        if self.recording:
            self.known, self.position, self.recording = self.recording, 0, []

    def next_use(self, chunk):
        distance = self.distance(chunk)
        return len(self.known) + 1 if distance is None else distance

    def upcoming(self, count):
        around = self.known[self.position :] + self.known[: self.position]
        return list(dict.fromkeys(around))[:count]


@given(steps, st.integers(1, 7))
def test_any_steps_agree_with_the_model(steps, count):
    order, naive = UseOrder(), NaiveOrder()
    for step in steps:
        for chunk in step:
            order.note(chunk)
            naive.note(chunk)
            assert [order.next_use(c) for c in range(7)] == [naive.next_use(c) for c in range(7)]
            assert order.upcoming(count) == naive.upcoming(count)
        order.end_step()
        naive.end_step()
        assert order.upcoming(count) == naive.upcoming(count)


def learned(*uses: int) -> UseOrder:
    order = UseOrder()
    for chunk in uses:
        order.note(chunk)
    order.end_step()
    return order


def test_nothing_is_known_of_the_first_step():
    order = UseOrder()
    order.note(3)
    assert order.upcoming(4) == []
    assert order.next_use(3) == order.next_use(7) == 1


def test_the_future_wraps_around_the_end_of_the_step():
    order = learned(0, 1, 2)
    order.note(0)
    order.note(1)
    assert order.upcoming(3) == [2, 0, 1]
    assert [order.next_use(c) for c in (2, 0, 1)] == [0, 1, 2]


def test_forward_and_backward_uses_are_told_apart():
    order = learned(0, 1, 2, 1, 0)
    assert order.next_use(0) == 0
    order.note(0)
    assert order.next_use(0) == 3
    assert order.next_use(1) == 0
    order.note(1)
    assert order.next_use(1) == 1


def test_a_use_that_is_repeated_in_a_row_counts_once():
    order = learned(0, 0, 0, 1, 1)
    assert order.upcoming(5) == [0, 1]
    order.note(0)
    order.note(0)
    assert order.upcoming(5) == [1, 0]


def test_a_step_that_deviates_is_learned_in_its_turn():
    order = learned(0, 1, 2)
    for chunk in (2, 9, 0):
        order.note(chunk)
    order.end_step()
    assert order.upcoming(9) == [2, 9, 0]
    assert order.next_use(1) > max(map(order.next_use, (2, 9, 0)))


def test_a_step_that_ends_twice_is_known():
    order = learned(0, 1, 2)
    order.end_step()
    assert order.upcoming(9) == [0, 1, 2]


def test_inference_without_an_end_of_step_takes_no_more_and_more_memory():
    order = UseOrder()
    tracemalloc.start()
    try:
        for _ in range(100_000):
            order.note(0)
            order.note(1)
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 1 << 20


def test_chunks_of_no_known_use_come_after_all_others():
    order = learned(0, 1, 0, 2)
    assert all(order.next_use(99) > order.next_use(c) for c in (0, 1, 2))
