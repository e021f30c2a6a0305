"""How parameters are packed into chunks: pure functions over sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    Parameters of one `group` are packed together, whatever their size, and apart from all others.
    """

    index: int
    name: str
    numel: int
    trainable: bool
    group: int | None = None


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
    """Which part of every chunk is this rank's: number `rank` of `ranks` equal ones.

    Of OPTIM_STATE it has that part alone; of GRAD and PARAM as `grads` and `params` say, else all.
    So ZeRO's stages 1, 2 and 3 are neither, `grads`, and both. For a single rank it is all the
    same. There are `replicas` of the whole, all alike.
    """

    rank: int = 0
    ranks: int = 1
    grads: bool = True
    params: bool = True
    replicas: int = 1

    @property
    def slot_multiple(self) -> int:
        """What divides slot_numel: whole pages for every rank, an even part per replica."""
        return lcm(SLOT_NUMEL_MULTIPLE, self.replicas) * self.ranks

    def numel(self, whole: int) -> int:
        """Elements of a part of `whole` elements."""
        assert whole % self.ranks == 0, (whole, self.ranks)
        return whole // self.ranks

    def range(self, whole: int, rank: int | None = None) -> slice:
        """The part of `rank` (default: this one) of `whole` elements."""
        part = self.numel(whole)
        first = (self.rank if rank is None else rank) * part
        return slice(first, first + part)


WHOLE = Shard()


@dataclass(frozen=True)
class Layout:
    """All chunks of a model; slots hold `slot_numel` elements each.

    A rank's shard of a chunk of n slots is a contiguous n-th of it: n tiles of `piece_numel`.
    """

    slot_numel: int
    chunks: tuple[Chunk, ...]
    shard: Shard = WHOLE

    @property
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
        """Share of the capacity that no parameter uses."""
        return 1 - self.numel / (self.slot_count * self.slot_numel)


def pack(
    params: Sequence[ParamSpec], slot_numel: int, shard: Shard = WHOLE, group_index: int = 0
) -> Layout:
    """Packs `params` in order, first fit into the open chunk of their kind, into chunks
    of the chunk group number `group_index`.

    A parameter that does not fit the open chunk opens the next one; one larger than a slot gets a
    chunk of its own. A group has a chunk of its own, of as many slots as it needs. Empty
    parameters take no room. Raises ValueError for a slot size that is not a positive multiple of
    shard.slot_multiple.
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
    return Layout(
        slot_numel,
        tuple(
            Chunk(
                i,
                ceil(slices[-1].end / slot_numel),
                tuple(slices),
                slices[0].param.trainable,
                group_index,
            )
            for i, slices in enumerate(packed)
        ),
        shard,
    )


def search_slot_numel(
    params: Sequence[ParamSpec], max_numel: int = MAX_SLOT_NUMEL, shard: Shard = WHOLE
) -> int:
    """The slot size that wastes least, from an eighth of the upper end to the upper end.

    The upper end is `max_numel` or about a sixteenth of the model, whichever is smaller, so that
    transfers stay large and the few slots in flight stay a small part of the whole. Sizes within
    1 % of the best count as equal, and of those the largest is taken. With `group`s, each of which
    wastes part of a slot, smaller sizes are looked at too.
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
