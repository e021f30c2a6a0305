"""Where each chunk's DISK-homed payloads lie in the scratch file."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.planning.placement import Placement, SlotBytes
from offload.disk.backing import Extent
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Tier


@dataclass(frozen=True)
class FileMap:
    """Extents by chunk id, in one file: a chunk's record, then its parameter, then its gradient.

    All are of this rank's shard. PARAM and GRAD extents are one transfer, up to the last used page
    (for several ranks all of the shard); RECORD extents have one piece after the other. All begin
    at multiples of PAGE_BYTES. When homes move, extents come and go, wherever the file has room.
    """

    param: dict[int, Extent]
    grad: dict[int, Extent]
    record: dict[int, Extent]
    nbytes: int


def extent_sizes(layout: Layout, dtypes: Dtypes, payload: str, chunk: Chunk) -> tuple[int, int]:
    """Bytes that an extent of "param", "grad" or "record" takes, and that are transferred."""
    space = chunk.slots * int(getattr(SlotBytes.of(layout, dtypes), payload))
    if payload == "record" or layout.shard.ranks > 1:
        return space, space
    itemsize = dtypes.param_bytes if payload == "param" else dtypes.grad_bytes
    return space, round_up(chunk.used_numel * itemsize, PAGE_BYTES)


def map_file(layout: Layout, placement: Placement, dtypes: Dtypes) -> FileMap:
    """Lays out the payloads that `placement` puts on DISK."""
    found: dict[str, dict[int, Extent]] = {"record": {}, "param": {}, "grad": {}}
    end = 0
    for chunk in layout.chunks:
        for payload, extents in found.items():
            if getattr(placement, payload)[chunk.id] is Tier.DISK:
                space, used = extent_sizes(layout, dtypes, payload, chunk)
                extents[chunk.id] = Extent(end, used, chunk.slots)
                end += space
    return FileMap(found["param"], found["grad"], found["record"], end)
