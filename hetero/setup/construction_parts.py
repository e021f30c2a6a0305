"""Which bytes of a parameter under construction each rank keeps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from hetero.planning.placement import part_bytes
from hetero.ranks.communicator import Communicator
from hetero.ranks.process_groups import ProcessGroups
from hetero.setup.construction_file import BLOCK_BYTES
from hetero.stand_ins.tile_changes import TileChange, tiles
from offload.errors import HeteroError

_NOT_ALIKE = (
    "the ranks need different parameters while they build the model; inside ZeroInitContext all "
    "ranks must run the same code on all parameters"
)


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
        raise HeteroError(_NOT_ALIKE)
    kept = [part_of(nbytes, rank, shard.size) for rank in range(shard.size)]
    sends = [_common(mine, kept[shard.rank], wanted[rank]) for rank in range(shard.size)]
    receives = [_common(into, wanted[shard.rank], kept[rank]) for rank in range(shard.size)]
    shard.exchange(sends, receives, "building the model")


def _common(flat: torch.Tensor, has: slice, wanted: slice) -> torch.Tensor:
    """The part of `flat` (the elements `has` of a longer array) that is in the range `wanted`."""
    begin = max(has.start, wanted.start)
    return flat[begin - has.start : max(begin, min(has.stop, wanted.stop)) - has.start]


def make_alike(world: ProcessGroups, number: int, values: torch.Tensor) -> None:
    """Makes a parameter's values, flat, those of the first rank, where they differ.

    All ranks call it before each keeps a part alone: ranks may draw other random numbers, as they
    do under DDP, and all parts must be of the same values. `number` is of the parameter.

    Raises HeteroError if the ranks are at different parameters, PeerError if a rank is gone.
    """
    everyone = world.everyone
    assert everyone is not None
    own = torch.tensor([number, zlib.crc32(values.view(torch.uint8).numpy().data)])
    found = everyone.all_gather(own, "building the model")
    differ = found.ne(found[0]).any(dim=0)
    if differ[0]:
        raise HeteroError(_NOT_ALIKE)
    if differ[1]:
        take_from_first(values, everyone)


def take_from_first(values: torch.Tensor, everyone: Communicator) -> None:
    """Copies the first rank's `values`, of any shape, over this rank's. All ranks call it."""
    flat = values.detach().contiguous()
    everyone.broadcast(flat, 0, "the first rank's values")
    if flat.data_ptr() != values.data_ptr():
        values.copy_(flat)


def change_part(
    world: ProcessGroups,
    number: int,
    part: torch.Tensor,
    kept: slice,
    param: torch.Tensor,
    change: TileChange,
) -> bool:
    """Makes a change to the bytes `kept` of a parameter, which `part` has. All ranks call it.

    Returns False, on all ranks, if elements are cut in two by the ranks' parts.

    What fills is made on all of the parameter, tile by tile, because it may draw random numbers, of
    which each rank draws all; the first rank's count. `number` is of the parameter.
    """
    itemsize = param.element_size()
    if not change.fills:
        cut = part_bytes(param.numel() * itemsize, world.ranks) % itemsize
        if not cut:
            change.apply(part.view(param.dtype))
        return not cut
    for tile in tiles(param.numel(), BLOCK_BYTES // itemsize):
        values = torch.empty(tile.stop - tile.start, dtype=param.dtype)
        change.apply(values)
        make_alike(world, number, values)
        has = slice(tile.start * itemsize, tile.stop * itemsize)
        _common(part, kept, has).copy_(_common(values.view(torch.uint8), has, kept))
    return True
