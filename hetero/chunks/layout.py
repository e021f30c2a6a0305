"""How parameters are packed into chunks: pure functions over sizes.

Parameters are packed in the model's order, because steps use them in that order. A tensor is not
divided over chunks: a larger one gets a chunk of several slots, so that it always is one piece of
memory. The size of a slot is searched for little waste. It is a multiple of a page for every rank,
so uneven tails are padding at a chunk's end, and nothing else knows of them. Several param groups
of an optimizer may share a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, lcm

from offload.memory.sizes import round_up

ALIGN_NUMEL = 64  # every parameter starts at a multiple: 128 bytes of bf16, a cache line and more
SLOT_NUMEL_MULTIPLE = 4096  # keeps every part of a slot a multiple of the page in any dtype
MIN_SLOT_NUMEL = 4096
MAX_SLOT_NUMEL = 16 << 20
_SEARCH_STEPS = 64


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the layout sees it: `index` is its place in model.parameters().

    Parameters with the same `group` share a chunk with each other, however large, and with no
    other parameter. DebugOptions.shard_strategy makes groups. One that `stays` is whole in RAM from
    construction until its chunk is made, because other tensors have its memory, too.
    """

    index: int
    name: str
    numel: int
    trainable: bool
    group: int | None = None
    stays: bool = False


@dataclass(frozen=True)
class ParamSlice:
    """A parameter's place in its chunk: elements [offset, offset + numel)."""

    param: ParamSpec
    offset: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.param.numel


@dataclass(frozen=True)
class Chunk:
    """Parameters that live and move together, in `slots` consecutive slots.

    Trainable and frozen parameters do not share a chunk: a frozen chunk has no GRAD and no
    OPTIM_STATE.
    """

    id: int
    slots: int
    slices: tuple[ParamSlice, ...]
    trainable: bool
    group_index: int = 0  # of its chunk group in the engine; ids count within a chunk group

    def __hash__(self) -> int:
        """Of its place alone: chunks are keys of dictionaries on the path of a step."""
        return hash((self.group_index, self.id))

    @property
    def name(self) -> str:
        """For messages: the first parameter's name and how many there are."""
        more = len(self.slices) - 1
        return self.slices[0].param.name + (f" (and {more} more in its chunk)" if more else "")

    @property
    def used_numel(self) -> int:
        """Elements up to the end of the last parameter."""
        return self.slices[-1].end


@dataclass(frozen=True)
class Shard:
    """Which part of every chunk this rank keeps.

    Attributes:
        rank: this rank's number among those that share a chunk.
        ranks: the number of these ranks; shards are equal parts.
        params: PARAM is sharded (ZeRO stage 3); else each rank keeps it whole.
        replicas: the number of groups of ranks that have all shards each.
        between_devices: each rank has a DEVICE of its own, and these gather parameters from each
            other's memory (NCCL); else RAM does (gloo).

    GRAD and OPTIM_STATE are always sharded.
    """

    rank: int = 0
    ranks: int = 1
    params: bool = True
    replicas: int = 1
    between_devices: bool = False

    @property
    def slot_multiple(self) -> int:
        """What slot_numel is a multiple of: whole pages per rank, equal parts per replica."""
        return lcm(SLOT_NUMEL_MULTIPLE, self.replicas) * self.ranks

    def numel(self, whole: int) -> int:
        """Elements of one shard of `whole` elements."""
        assert whole % self.ranks == 0, (whole, self.ranks)
        return whole // self.ranks

    def range(self, whole: int, rank: int | None = None) -> slice:
        """The shard of `rank` (default: this rank) in `whole` elements."""
        part = self.numel(whole)
        first = (self.rank if rank is None else rank) * part
        return slice(first, first + part)


WHOLE = Shard()


@dataclass(frozen=True)
class Layout:
    """All chunks of a model; slots hold `slot_numel` elements each.

    A rank's shard of a chunk of n slots is a contiguous n-th of it: n tiles of `tile_numel`.
    """

    slot_numel: int
    chunks: tuple[Chunk, ...]
    shard: Shard = WHOLE

    @cached_property
    def tile_numel(self) -> int:
        """Elements of one slot's share of a shard; what is read, updated and written at once."""
        return self.shard.numel(self.slot_numel)

    def chunk_numel(self, chunk: Chunk) -> int:
        """Elements of the whole chunk, unused ones at its end included."""
        return chunk.slots * self.slot_numel

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(s.param.numel for c in self.chunks for s in c.slices)

    @property
    def slot_count(self) -> int:
        """Slots of all chunks."""
        return sum(c.slots for c in self.chunks)

    @property
    def waste(self) -> float:
        """The share of all slots that no parameter uses, from 0 to 1."""
        return 1 - self.numel / (self.slot_count * self.slot_numel)


def pack(
    params: Sequence[ParamSpec], slot_numel: int, shard: Shard = WHOLE, group_index: int = 0
) -> Layout:
    """Packs parameters into chunks, in order, into the open chunk of their kind (next fit).

    Trainable and frozen parameters are two kinds. A parameter that does not fit the open chunk
    opens the next one; one larger than a slot gets a chunk of its own. A group has a chunk of its
    own, of as many slots as it needs. Empty parameters take no room.

    Args:
        params: in the order of packing.
        slot_numel: elements per slot.
        shard: how chunks are divided over ranks.
        group_index: of the chunk group in the engine, for its chunks.

    Raises ValueError if slot_numel is not a positive multiple of shard.slot_multiple.
    """
    multiple = shard.slot_multiple
    if slot_numel <= 0 or slot_numel % multiple:
        raise ValueError(
            f"chunk_numel must be a positive multiple of {multiple}, not {slot_numel}; "
            f"try {max(1, ceil(slot_numel / multiple)) * multiple}"
        )
    packed: list[list[ParamSlice]] = []
    open_slices: dict[tuple[bool, int | None], list[ParamSlice]] = {}
    for param in params:
        kind = (param.trainable, param.group)
        slices = open_slices.get(kind)
        offset = round_up(slices[-1].end, ALIGN_NUMEL) if slices else 0
        if param.group is None and param.numel > slot_numel:
            packed.append([ParamSlice(param, 0)])
        elif slices is None or (param.group is None and offset + param.numel > slot_numel):
            open_slices[kind] = [ParamSlice(param, 0)]
            packed.append(open_slices[kind])
        else:
            slices.append(ParamSlice(param, offset))
    chunks: list[Chunk] = []
    for slices in packed:
        slots, trainable = ceil(slices[-1].end / slot_numel), slices[0].param.trainable
        chunks.append(Chunk(len(chunks), slots, tuple(slices), trainable, group_index))
    return Layout(slot_numel, tuple(chunks), shard)


def search_slot_numel(
    params: Sequence[ParamSpec], max_numel: int = MAX_SLOT_NUMEL, shard: Shard = WHOLE
) -> int:
    """Searches the slot size that wastes least.

    Sizes go from an eighth of the upper end to the upper end, which is `max_numel` or about a
    sixteenth of the model, whichever is smaller: transfers stay large, and the slots in flight a
    small part of the whole. Sizes within 1 % of the best count as equal, and the largest of those
    is taken. With groups, each of which wastes part of a slot, smaller sizes are tried too.

    Args:
        params: as pack() takes them.
        max_numel: upper limit of the slot size, in elements.
        shard: how chunks are divided over ranks.

    Returns elements per slot, a multiple of shard.slot_multiple.
    """
    multiple = shard.slot_multiple
    least = max(MIN_SLOT_NUMEL, multiple)
    total = sum(p.numel for p in params)
    upper = max(least, min(max_numel, round_up(total // 16, multiple)))
    step = max(multiple, upper // _SEARCH_STEPS // multiple * multiple)
    upper = upper // multiple * multiple
    grouped = len({p.group for p in params}) > 1
    lower = least if grouped else max(upper // 8, least)
    sizes = [n for n in range(upper, 0, -step) if n >= lower]
    if grouped:
        sizes += [least << shift for shift in range(10, -1, -1) if least << shift < sizes[-1]]
    wastes = {n: pack(params, n, shard).waste for n in sizes}
    best = min(wastes.values())
    return next(n for n in sizes if wastes[n] <= best + 0.01)
