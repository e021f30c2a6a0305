"""The extents of the scratch file in which state with its home on DISK lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hetero.chunks.dtypes import Dtypes
from hetero.chunks.layout import Chunk, Layout
from hetero.planning.placement import Placement, SlotBytes
from offload.disk.backing import Extent
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import StateKind, Tier

_FILE_ORDER = (StateKind.OPTIM_STATE, StateKind.PARAM, StateKind.GRAD)  # within a chunk


class ExtentSize(NamedTuple):
    """Bytes that an extent takes in the file, and those that a transfer of it moves."""

    space_bytes: int
    transfer_bytes: int


class FileMap(NamedTuple):
    """The extents of this rank's shards in one file, as they are at first.

    All begin at multiples of PAGE_BYTES. Those of PARAM and GRAD are one transfer, up to the last
    used page (with several ranks all of the shard); those of OPTIM_STATE are one tile after the
    other. When homes move, extents come and go, wherever the file has room.

    Attributes:
        extents: by state kind and chunk id.
        nbytes: length of the file.
    """

    extents: dict[StateKind, dict[int, Extent]]
    nbytes: int


def extent_size(layout: Layout, dtypes: Dtypes, state_kind: StateKind, chunk: Chunk) -> ExtentSize:
    """The size of the extent of one state kind of `chunk`."""
    space_bytes = chunk.slots * int(getattr(SlotBytes.of(layout, dtypes), state_kind.value))
    if state_kind is StateKind.OPTIM_STATE or layout.shard.ranks > 1:
        return ExtentSize(space_bytes, space_bytes)
    itemsize = dtypes.param_bytes if state_kind is StateKind.PARAM else dtypes.grad_bytes
    return ExtentSize(space_bytes, round_up(chunk.used_numel * itemsize, PAGE_BYTES))


def map_file(layout: Layout, placement: Placement, dtypes: Dtypes) -> FileMap:
    """Lays out one after the other what `placement` puts on DISK, chunk by chunk."""
    extents: dict[StateKind, dict[int, Extent]] = {state_kind: {} for state_kind in StateKind}
    end = 0
    for chunk in layout.chunks:
        for state_kind in _FILE_ORDER:
            if getattr(placement, state_kind.value)[chunk.id] is Tier.DISK:
                size = extent_size(layout, dtypes, state_kind, chunk)
                extents[state_kind][chunk.id] = Extent(end, size.transfer_bytes, chunk.slots)
                end += size.space_bytes
    return FileMap(extents, end)


def name_of(kind: StateKind, chunk: Chunk) -> str:
    """What an extent has, for errors: the chunk, by the names of its parameters."""
    what = {StateKind.PARAM: "parameters", StateKind.OPTIM_STATE: "optimizer state"}
    names = list_names([s.param.name for s in chunk.slices])
    return f"{what.get(kind, 'gradients')} of chunk {chunk.id} ({names})"


def list_names(names: Sequence[str]) -> str:
    """The first ones, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
