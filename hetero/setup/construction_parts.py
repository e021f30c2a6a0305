"""Which bytes of a parameter under construction each rank keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.planning.placement import part_bytes
from hetero.ranks.process_groups import ProcessGroups
from hetero.setup.construction_file import BLOCK_BYTES
from hetero.stand_ins.tile_changes import TileChange, tiles
from offload.errors import HeteroError


def part_of(nbytes: int, rank: int, ranks: int) -> slice:
    """The bytes of an offloaded parameter of `nbytes` that a rank keeps."""
    part = part_bytes(nbytes, ranks)
    return slice(min(nbytes, rank * part), min(nbytes, (rank + 1) * part))


def exchange_parts(
    world: ProcessGroups,
    number: int,
    nbytes: int,
    mine: torch.Tensor,
    into: torch.Tensor,
    wanted: Sequence[slice],
) -> None:
    """Gives every rank the bytes wanted[rank] of a parameter. All ranks call it.

    Args:
        world: the ranks, each of which keeps a part.
        number: of the parameter, in the order in which they were built.
        nbytes: of the whole parameter.
        mine: this rank's part, as part_of() says; bytes.
        into: takes this rank's bytes, flat.
        wanted: byte ranges of the whole parameter, one a rank.

    Raises:
        HeteroError: the ranks are at different parameters.
        PeerError: a rank is gone.
    """
    shard = world.shard
    assert shard is not None
    if not shard.are_same(torch.tensor([number]), "building the model"):
        raise HeteroError(
            "the ranks need different parameters while they build the model; inside "
            "ZeroInitContext all ranks must run the same code on all parameters"
        )
    kept = [part_of(nbytes, rank, shard.size) for rank in range(shard.size)]
    sends = [_common(mine, kept[shard.rank], wanted[rank]) for rank in range(shard.size)]
    receives = [_common(into, wanted[shard.rank], kept[rank]) for rank in range(shard.size)]
    shard.exchange(sends, receives, "building the model")


def _common(flat: torch.Tensor, has: slice, wanted: slice) -> torch.Tensor:
    """The part of `flat` (the elements `has` of a longer array) that is in the range `wanted`."""
    begin = max(has.start, wanted.start)
    return flat[begin - has.start : max(begin, min(has.stop, wanted.stop)) - has.start]


def change_part(
    part: torch.Tensor, kept: slice, ranks: int, param: torch.Tensor, change: TileChange
) -> bool:
    """Makes a change to the bytes `kept` of a parameter, which `part` has.

    Returns False, on all ranks, if elements are cut in two by the ranks' parts.

    What fills is made on all of the parameter, tile by tile, because it may draw random numbers, of
    which each rank draws all.
    """
    itemsize = param.element_size()
    if not change.fills:
        cut = part_bytes(param.numel() * itemsize, ranks) % itemsize
        if not cut:
            change.apply(part.view(param.dtype))
        return not cut
    for tile in tiles(param.numel(), BLOCK_BYTES // itemsize):
        values = torch.empty(tile.stop - tile.start, dtype=param.dtype)
        change.apply(values)
        has = slice(tile.start * itemsize, tile.stop * itemsize)
        _common(part, kept, has).copy_(_common(values.view(torch.uint8), has, kept))
    return True
