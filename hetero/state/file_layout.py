"""Where each chunk's DISK-homed kinds of state lie in the scratch file."""

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
    """Extents by chunk id, in one file: a chunk's optimizer state, then its parameter, then its
    gradient.

    All are of this rank's shard. PARAM and GRAD extents are one transfer, up to the last used page
    (for several ranks all of the shard); OPTIM_STATE extents have one tile after the other. All
    begin at multiples of PAGE_BYTES. When homes move, extents come and go, wherever the file has
    room.
    """

    param: dict[int, Extent]
    grad: dict[int, Extent]
    optim_state: dict[int, Extent]
    nbytes: int


def extent_sizes(layout: Layout, dtypes: Dtypes, state_kind: str, chunk: Chunk) -> tuple[int, int]:
    """Bytes that an extent of "param", "grad" or "optim_state" takes, and transfers move."""
    space = chunk.slots * int(getattr(SlotBytes.of(layout, dtypes), state_kind))
    if state_kind == "optim_state" or layout.shard.ranks > 1:
        return space, space
    itemsize = dtypes.param_bytes if state_kind == "param" else dtypes.grad_bytes
    return space, round_up(chunk.used_numel * itemsize, PAGE_BYTES)


def map_file(layout: Layout, placement: Placement, dtypes: Dtypes) -> FileMap:
    """Lays out the kinds of state that `placement` puts on DISK."""
    found: dict[str, dict[int, Extent]] = {"optim_state": {}, "param": {}, "grad": {}}
    end = 0
    for chunk in layout.chunks:
        for state_kind, extents in found.items():
            if getattr(placement, state_kind)[chunk.id] is Tier.DISK:
                space, used = extent_sizes(layout, dtypes, state_kind, chunk)
                extents[chunk.id] = Extent(end, used, chunk.slots)
                end += space
    return FileMap(found["param"], found["grad"], found["optim_state"], end)
