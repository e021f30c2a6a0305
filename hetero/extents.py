"""Where each chunk's DISK-homed payloads lie in the scratch file."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.dtypes import Dtypes
from hetero.layout import Chunk, Layout
from hetero.placement import Placement, SlotBytes
from offload.backing import Extent
from offload.sizes import PAGE_BYTES, round_up
from offload.tiers import Tier


@dataclass(frozen=True)
class FileMap:
    """Extents by chunk id, in one file: a chunk's record, then its parameter, then its gradient.

    All are of this rank's shard. PARAM and GRAD extents are one transfer, up to the last used page
    (for several ranks all of the shard); RECORD extents have one piece after the other. All begin
    at multiples of PAGE_BYTES.
    """

    param: dict[int, Extent]
    grad: dict[int, Extent]
    record: dict[int, Extent]
    nbytes: int


def map_file(layout: Layout, placement: Placement, dtypes: Dtypes) -> FileMap:
    """Lays out the payloads that `placement` puts on DISK."""
    piece = SlotBytes.of(layout, dtypes)
    param: dict[int, Extent] = {}
    grad: dict[int, Extent] = {}
    record: dict[int, Extent] = {}
    end = 0

    def extent(chunk: Chunk, piece_bytes: int, used_bytes: int) -> Extent:
        nonlocal end
        begin = end
        end += chunk.slots * piece_bytes
        return Extent(begin, round_up(used_bytes, PAGE_BYTES), chunk.slots)

    for chunk in layout.chunks:
        used = chunk.used_numel if layout.shard.ranks == 1 else chunk.slots * layout.piece_numel
        if placement.record[chunk.id] is Tier.DISK:
            record[chunk.id] = extent(chunk, piece.record, chunk.slots * piece.record)
        if placement.param[chunk.id] is Tier.DISK:
            param[chunk.id] = extent(chunk, piece.param, used * dtypes.param_bytes)
        if placement.grad[chunk.id] is Tier.DISK:
            grad[chunk.id] = extent(chunk, piece.grad, used * dtypes.grad_bytes)
    return FileMap(param, grad, record, end)
