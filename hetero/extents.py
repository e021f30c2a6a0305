"""Where each chunk's DISK-homed payloads lie in the scratch file."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.dtypes import Dtypes
from hetero.layout import Chunk, Layout
from hetero.placement import Placement, SlotBytes
from offload.cache import Extent
from offload.sizes import PAGE_BYTES, round_up
from offload.tiers import Tier


@dataclass(frozen=True)
class FileMap:
    """Extents by chunk id, in one file: a chunk's record, then its parameter, then its gradient.

    PARAM and GRAD extents are one transfer for the whole chunk, up to its last used page; RECORD
    extents have one slot after the other. All begin at multiples of PAGE_BYTES.
    """

    param: dict[int, Extent]
    grad: dict[int, Extent]
    record: dict[int, Extent]
    nbytes: int


def map_file(layout: Layout, placement: Placement, dtypes: Dtypes) -> FileMap:
    """Lays out the payloads that `placement` puts on DISK."""
    slot = SlotBytes.of(layout, dtypes)
    param: dict[int, Extent] = {}
    grad: dict[int, Extent] = {}
    record: dict[int, Extent] = {}
    end = 0

    def extent(chunk: Chunk, slot_bytes: int, used_bytes: int) -> Extent:
        nonlocal end
        begin = end
        end += chunk.slots * slot_bytes
        return Extent(begin, round_up(used_bytes, PAGE_BYTES), chunk.slots)

    for chunk in layout.chunks:
        if placement.record[chunk.id] is Tier.DISK:
            record[chunk.id] = extent(chunk, slot.record, chunk.slots * slot.record)
        if placement.param[chunk.id] is Tier.DISK:
            param[chunk.id] = extent(chunk, slot.param, chunk.used_numel * dtypes.param_bytes)
        if placement.grad[chunk.id] is Tier.DISK:
            grad[chunk.id] = extent(chunk, slot.grad, chunk.used_numel * dtypes.grad_bytes)
    return FileMap(param, grad, record, end)
