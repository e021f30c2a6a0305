"""hetero/chunks/layout: packing and the search for a slot size."""

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hetero.chunks import layout as layout_module
from hetero.chunks.layout import (
    ALIGN_NUMEL,
    MIN_SLOT_NUMEL,
    SLOT_NUMEL_MULTIPLE,
    ParamSpec,
    pack,
    search_slot_numel,
)

SLOT = SLOT_NUMEL_MULTIPLE


def specs(numels, frozen=()):
    return [ParamSpec(i, f"p{i}", n, i not in frozen) for i, n in enumerate(numels)]


numels = st.one_of(
    st.integers(1, 200),
    st.integers(1, SLOT),
    st.integers(SLOT - 70, SLOT + 70),
    st.integers(1, 5 * SLOT),
)
params = st.lists(st.tuples(numels, st.booleans()), min_size=1, max_size=30).map(
    lambda pairs: [ParamSpec(i, f"p{i}", n, t) for i, (n, t) in enumerate(pairs)]
)
slot_numels = st.sampled_from([SLOT, 2 * SLOT, 3 * SLOT])


@given(params, slot_numels)
def test_every_parameter_has_one_place_of_its_own(params, slot_numel):
    """Order, kind and size decide the chunk, which is closed only when the next parameter does not
    fit; waste is the unused share."""
    layout = pack(params, slot_numel)
    placed = [s.param for chunk in layout.chunks for s in chunk.slices]
    assert sorted(placed, key=lambda p: p.index) == params
    assert layout.numel == sum(p.numel for p in params)
    assert [chunk.id for chunk in layout.chunks] == list(range(len(layout.chunks)))
    for chunk in layout.chunks:
        end = 0
        for s in chunk.slices:
            assert s.offset % ALIGN_NUMEL == 0
            assert end <= s.offset < end + ALIGN_NUMEL  # no overlap, and no more than alignment
            assert s.end == s.offset + s.param.numel
            end = s.end
        assert chunk.used_numel == end <= chunk.slots * slot_numel
        assert chunk.slots == -(-chunk.used_numel // slot_numel)
        indices = [s.param.index for s in chunk.slices]
        assert indices == sorted(indices)
        assert {s.param.trainable for s in chunk.slices} == {chunk.trainable}
        if any(s.param.numel > slot_numel for s in chunk.slices):
            assert len(chunk.slices) == 1
    # The small parameters of one kind fill one chunk after the other.
    for trainable in (True, False):
        chunks = [c for c in layout.chunks if c.trainable is trainable and c.slots == 1]
        indices = [s.param.index for chunk in chunks for s in chunk.slices]
        assert indices == sorted(indices)
        for before, after in itertools.pairwise(chunks):
            begin = -(-before.used_numel // ALIGN_NUMEL) * ALIGN_NUMEL
            assert begin + after.slices[0].param.numel > slot_numel
    capacity = sum(c.slots for c in layout.chunks) * slot_numel
    assert layout.slot_count * slot_numel == capacity
    assert layout.waste == pytest.approx((capacity - layout.numel) / capacity)
    assert 0 <= layout.waste < 1


def test_empty_parameters_take_no_room():
    layout = pack(specs([0, SLOT, 0]), SLOT)
    assert [c.used_numel for c in layout.chunks] == [SLOT]
    assert len(layout.chunks[0].slices) == 3


def test_a_chunk_is_named_after_its_parameters():
    chunks = pack(specs([1, 2, 3, SLOT]), SLOT).chunks
    assert chunks[0].name == "p0 (and 2 more in its chunk)"
    assert chunks[1].name == "p3"


@pytest.mark.parametrize(
    ("bad", "better"),
    [(0, SLOT), (-3 * SLOT, SLOT), (1, SLOT), (SLOT + 1, 2 * SLOT), (10**9, 1000001536)],
)
def test_bad_sizes_are_refused_with_one_that_works(bad, better):
    with pytest.raises(ValueError, match="chunk_numel") as refusal:
        pack([], bad)
    tried = int(re.search(r"try (\d+)", str(refusal.value))[1])
    assert tried == better
    pack([], tried)


search_numels = st.lists(st.integers(1, 400_000), min_size=1, max_size=30)


@example([1], 0)
@example([1], 5000)
@example([400_000] * 30, 3 * SLOT + 1)
@given(search_numels, st.integers(0, 1 << 22))
def test_the_search_takes_the_largest_of_the_best_it_tried(numels, max_numel):
    params, tried, real = specs(numels), {}, layout_module.pack

    def recording(params, slot_numel, shard):
        layout = real(params, slot_numel, shard)
        tried[slot_numel] = layout.waste
        return layout

    layout_module.pack = recording
    try:
        found = search_slot_numel(params, max_numel)
    finally:
        layout_module.pack = real
    best = min(tried.values())
    assert real(params, found).waste <= best + 0.01
    assert found == max(n for n, waste in tried.items() if waste <= best + 0.01)
    # And what it tried is what it says: an even choice from an eighth of the upper end on.
    upper = max(tried)
    share = sum(numels) / 16
    assert upper <= max(MIN_SLOT_NUMEL, min(max_numel, share + SLOT))
    assert upper > min(max_numel, share) - SLOT
    assert min(tried) >= max(MIN_SLOT_NUMEL, upper / 8 - SLOT)
    assert min(tried) <= max(MIN_SLOT_NUMEL, upper / 8 + upper / 64 + SLOT)
    assert len(tried) <= 130
    assert all(n % SLOT == 0 for n in tried)


def test_the_search_finds_a_size_that_packs_without_waste():
    # Of seven units each, and a slot is a number of units.
    params = specs([7 * SLOT] * 64)
    found = search_slot_numel(params)
    assert found % (7 * SLOT) == 0
    assert pack(params, found).waste == 0
