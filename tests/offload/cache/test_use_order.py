"""offload/cache/slot_cache: the learned order, against a model that searches the whole step."""

from hypothesis import given
from hypothesis import strategies as st

from offload.cache.slot_cache import UseOrder
from tests.support.native.cache_rig import next_use
from tests.support.traced_memory import traced_memory

chunks = st.integers(0, 5)
some_steps = st.lists(st.lists(chunks, max_size=14), max_size=5)
# Few different steps, in any turn: sequences come back.
steps = some_steps | some_steps.flatmap(
    lambda made: st.lists(st.sampled_from(made), max_size=9) if made else st.just([])
)


class NaiveSequence:
    def __init__(self, uses):
        self.uses, self.position, self.followed, self.seen = uses, 0, 0, 1

    def distance(self, chunk):
        around = self.uses[self.position :] + self.uses[: self.position]
        return around.index(chunk) if chunk in around else None

    def note(self, chunk):
        distance = self.distance(chunk)
        self.followed += 1 if distance == 0 else -1
        if distance is not None:
            self.position = (self.position + distance + 1) % len(self.uses)


class NaiveOrder:
    """The same promises, by search."""

    def __init__(self):
        self.known, self.recording = [], []

    @property
    def best(self):
        followed_best = sorted(self.known, key=lambda s: (-s.followed, -s.seen))
        return followed_best[0] if followed_best else NaiveSequence([])

    def note(self, chunk):
        if self.recording[-1:] != [chunk]:
            self.recording.append(chunk)
            for sequence in self.known:
                sequence.note(chunk)

    def end_step(self):
        uses, self.recording = self.recording, []
        same = [s for s in self.known if s.uses == uses]
        if uses:
            now = NaiveSequence(uses)
            now.seen = min(4, same[0].seen + 1) if same else 1
            self.known = [now, *(s for s in self.known if s not in same)][:4]
        for sequence in self.known:
            sequence.position = sequence.followed = 0

    def next_use(self, chunk):
        distance = self.best.distance(chunk)
        return len(self.best.uses) + 1 if distance is None else distance

    def upcoming(self, count):
        around = self.best.uses[self.best.position :] + self.best.uses[: self.best.position]
        return list(dict.fromkeys(around))[:count]


@given(steps, st.integers(0, 7))
def test_any_steps_agree_with_the_model(steps, count):
    order, naive = UseOrder(), NaiveOrder()
    for step in steps:
        for chunk in step:
            order.note(chunk)
            naive.note(chunk)
            assert [next_use(order, c) for c in range(7)] == [naive.next_use(c) for c in range(7)]
            assert order.upcoming(count) == naive.upcoming(count)
        order.end_step()
        naive.end_step()
        assert order.upcoming(count) == naive.upcoming(count)


def test_inference_without_an_end_of_step_takes_no_more_and_more_memory():
    order = UseOrder()
    with traced_memory() as traced:
        for _ in range(30_000):
            order.note(0)
            order.note(1)
        grown_bytes, _ = traced()
    assert grown_bytes < 1 << 20


def use(order: UseOrder, *uses: int) -> list[int]:
    """Makes the uses; returns what was expected before each."""
    expected = []
    for chunk in uses:
        expected += order.upcoming(1)
        order.note(chunk)
    return expected


TRAIN = (0, 1, 2, 3, 2, 1, 0)


def test_what_was_done_often_gives_way_to_what_is_done_now():
    order = UseOrder()
    for _ in range(50):
        use(order, *TRAIN)
        order.end_step()
    for _ in range(5):
        use(order, 4, 3, 4)
        order.end_step()
    assert order.upcoming(1) == [4]


def test_what_is_used_in_place_is_not_expected():
    order = UseOrder()
    for chunk in (0, 1, 2, 1, 0):
        order.note(chunk)
    order.end_step()
    for chunk in (0, 2, 0):
        order.note(chunk)
    order.end_step()
    order.note(0)  # in the middle of a step
    order.use_in_place([1])
    assert order.upcoming(3) == [0, 2]
    assert next_use(order, 1) > 3
    order.note(1)  # not to be expected either, once it was noted before
    order.end_step()
    assert 1 not in order.upcoming(3)
    order.use_in_place([0, 1, 2])
    assert order.upcoming(3) == []
    order.use_in_place([])
    for chunk in (2, 1):
        order.note(chunk)
    order.end_step()
    assert order.upcoming(3) == [2, 1]
