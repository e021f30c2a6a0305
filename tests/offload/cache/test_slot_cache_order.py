"""offload/cache with a known order of uses: what is given up, and what is read ahead."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.native.cache_rig import Rig, pattern


class TestOrder:
    @given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.integers(1, 3))
    def test_a_known_step_costs_as_few_reads_as_possible(self, step, slots):
        r = Rig(slots, [1] * 5)
        for chunk in step:
            r.use(chunk)
        r.order.end_step()
        residents = frozenset(r.held())
        r.reads.clear()
        for _ in range(2):
            for chunk in step:
                r.use(chunk)
            r.order.end_step()
        assert len(r.reads) == fewest_reads(step * 2, slots, residents)
        r.close()

    def test_prefetch_reads_everything_ahead_once_the_step_is_known(self, rig):
        r = rig(3, [1, 1, 1, 1, 1])
        late = []
        for turn in range(3):
            for chunk in range(5):
                if turn and not r.cache.holds(chunk):
                    late.append((turn, chunk))
                pin = r.use(chunk)
                r.cache.prefetch(4)
                assert torch.equal(pin, pattern(r.extents[chunk].nbytes, chunk))
                del pin
            r.order.end_step()
        assert late == [(1, 0)] or late == []

    def test_prefetch_leaves_chunks_of_other_homes_alone(self, rig):
        r = rig(2, [1])
        r.order.note(77)
        r.order.note(0)
        r.order.end_step()
        r.cache.prefetch(2)
        assert r.held() == {0}


def fewest_reads(uses: list[int], slots: int, residents: frozenset[int]) -> int:
    """By trying every choice of what to give up."""
    costs = {residents: 0}
    for chunk in uses:
        after: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            if chunk in held:
                choices = [(held, cost)]
            elif len(held) < slots:
                choices = [(held | {chunk}, cost + 1)]
            else:
                choices = [((held - {victim}) | {chunk}, cost + 1) for victim in held]
            for now, total in choices:
                after[now] = min(total, after.get(now, total))
        costs = after
    return min(costs.values())
