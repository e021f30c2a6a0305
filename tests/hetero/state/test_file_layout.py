"""hetero/state/memory/homes: the file's map."""

from hypothesis import given
from hypothesis import strategies as st

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout, ParamSpec, pack
from hetero.planning.placement import Placement, SlotBytes
from hetero.state.memory.homes import map_file
from offload.memory.sizes import PAGE_BYTES
from offload.memory.tiers import StateKind, Tier

SLOT = 4096
NAMES = ("bf16", "fp16", "fp32")
dtypes = st.builds(Dtypes, st.sampled_from(NAMES), st.sampled_from(NAMES))
tiers = st.sampled_from([Tier.HOST, Tier.DISK])


@st.composite
def placed(draw) -> tuple[Layout, Placement, Dtypes]:
    """Any homes, also such as place() would not choose."""
    pairs = draw(
        st.lists(st.tuples(st.integers(1, 3 * SLOT), st.booleans()), min_size=1, max_size=8)
    )
    layout = pack([ParamSpec(i, f"p{i}", n, t) for i, (n, t) in enumerate(pairs)], SLOT)
    d = draw(dtypes)

    def homes(needed: bool) -> Tier | None:
        return draw(tiers) if needed else None

    param = tuple(homes(True) for _ in layout.chunks)
    grad = tuple(homes(c.trainable) for c in layout.chunks)
    optim_state = tuple(homes(c.trainable) for c in layout.chunks)
    slot = SlotBytes.of(layout, d)
    disk_bytes = sum(
        c.slots * nbytes
        for where, nbytes in (
            (param, slot.param),
            (grad, slot.grad),
            (optim_state, slot.optim_state),
        )
        for c in layout.chunks
        if where[c.id] is Tier.DISK
    )
    return (
        layout,
        Placement(param=param, grad=grad, optim_state=optim_state, disk_bytes=disk_bytes),
        d,
    )


@given(placed())
def test_the_file_is_cut_without_overlap_or_gap(case):
    layout, placement, d = case
    file_map = map_file(layout, placement, d)
    slot = SlotBytes.of(layout, d)
    taken: list[tuple[int, int]] = []
    for extents, homes, slot_bytes, used_bytes in (
        (file_map.extents[StateKind.PARAM], placement.param, slot.param, d.param_bytes),
        (file_map.extents[StateKind.GRAD], placement.grad, slot.grad, d.grad_bytes),
        (file_map.extents[StateKind.OPTIM_STATE], placement.optim_state, slot.optim_state, None),
    ):
        assert set(extents) == {c.id for c in layout.chunks if homes[c.id] is Tier.DISK}
        for chunk_id, extent in extents.items():
            chunk = layout.chunks[chunk_id]
            assert extent.run == chunk.slots
            assert extent.offset % PAGE_BYTES == extent.nbytes % PAGE_BYTES == 0
            assert 0 < extent.nbytes <= chunk.slots * slot_bytes
            # All that is used is moved, and no whole page more.
            wanted = (
                chunk.slots * slot_bytes if used_bytes is None else chunk.used_numel * used_bytes
            )
            assert wanted <= extent.nbytes < wanted + PAGE_BYTES
            taken.append((extent.offset, extent.offset + chunk.slots * slot_bytes))
    end = 0
    for begin, after in sorted(taken):
        assert begin == end
        end = after
    assert file_map.nbytes == end == placement.disk_bytes


def test_a_chunk_s_state_kinds_lie_together():
    layout = pack([ParamSpec(i, f"p{i}", SLOT, True) for i in range(3)], SLOT)
    every = (Tier.DISK,) * 3
    file_map = map_file(
        layout, Placement(param=every, grad=every, optim_state=every), Dtypes("bf16", "bf16")
    )
    for chunk in range(3):
        begin = chunk * SLOT * 14
        assert file_map.extents[StateKind.OPTIM_STATE][chunk].offset == begin
        assert file_map.extents[StateKind.PARAM][chunk].offset == begin + SLOT * 10
        assert file_map.extents[StateKind.GRAD][chunk].offset == begin + SLOT * 12
