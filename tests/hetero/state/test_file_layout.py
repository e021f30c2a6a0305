"""hetero/state/memory: where the file has each chunk's state at first."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Layout, ParamSpec, pack
from hetero.planning.placement import Placement, SlotBytes
from hetero.state.memory import StateMemory
from offload.device.backend import CpuBackend
from offload.disk.scratch_file import Extent
from offload.memory.ledger import Ledger
from offload.memory.run_pool import FreeSpace
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


class File(FreeSpace):
    """What StateMemory uses of a ScratchSpace."""

    reserved_bytes = 0

    def reserve(self, nbytes: int) -> None:
        self.reserved_bytes = nbytes
        self.give(0, nbytes)

    def allocate(self, nbytes: int) -> int:
        offset = self.take(nbytes)
        assert offset is not None
        return offset

    def name(self, offset: int, nbytes: int, what: str) -> None: ...


def lay_out(
    layout: Layout, placement: Placement, d: Dtypes
) -> tuple[dict[StateKind, dict[int, Extent]], int]:
    """The extents of each kind by chunk, and the bytes of the file."""
    plan: Any = SimpleNamespace(layout=layout, dtypes=d, placement=placement)
    file: Any = File()
    with ExitStack() as resources:
        memory = StateMemory(plan, CpuBackend(), Ledger({}), file, resources)
        return {kind: memory.homes[kind].extents for kind in StateKind}, file.reserved_bytes


@given(placed())
def test_the_file_is_cut_without_overlap_or_gap(case):
    layout, placement, d = case
    extents_of, file_bytes = lay_out(layout, placement, d)
    slot = SlotBytes.of(layout, d)
    taken: list[tuple[int, int]] = []
    for extents, homes, slot_bytes, used_bytes in (
        (extents_of[StateKind.PARAM], placement.param, slot.param, d.param_bytes),
        (extents_of[StateKind.GRAD], placement.grad, slot.grad, d.grad_bytes),
        (extents_of[StateKind.OPTIM_STATE], placement.optim_state, slot.optim_state, None),
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
    assert file_bytes == end == placement.disk_bytes


def test_a_chunk_s_state_kinds_lie_together():
    layout = pack([ParamSpec(i, f"p{i}", SLOT, True) for i in range(3)], SLOT)
    every = (Tier.DISK,) * 3
    extents_of, _ = lay_out(
        layout, Placement(param=every, grad=every, optim_state=every), Dtypes("bf16", "bf16")
    )
    for chunk in range(3):
        begin = chunk * SLOT * 14
        assert extents_of[StateKind.OPTIM_STATE][chunk].offset == begin
        assert extents_of[StateKind.PARAM][chunk].offset == begin + SLOT * 10
        assert extents_of[StateKind.GRAD][chunk].offset == begin + SLOT * 12
