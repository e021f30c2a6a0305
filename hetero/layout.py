"""How parameters are packed into chunks: pure functions over sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from offload.sizes import round_up

ALIGN_NUMEL = 64  # every parameter starts at a multiple: 128 bytes of bf16, a cache line and more
SLOT_NUMEL_MULTIPLE = 4096  # keeps every part of a slot a multiple of the page in any dtype
MIN_SLOT_NUMEL = 4096
MAX_SLOT_NUMEL = 16 << 20
_SEARCH_STEPS = 64


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the layout sees it: `index` is its place in model.parameters()."""

    index: int
    name: str
    numel: int
    trainable: bool


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

    Trainable and frozen parameters do not share a chunk: a frozen chunk has no GRAD and no RECORD.
    """

    id: int
    slots: int
    slices: tuple[ParamSlice, ...]
    trainable: bool

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
class Layout:
    """All chunks of a model; slots hold `slot_numel` elements each."""

    slot_numel: int
    chunks: tuple[Chunk, ...]

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


def pack(params: Sequence[ParamSpec], slot_numel: int) -> Layout:
    """Packs `params` in order, first fit into the open chunk of their kind.

    A parameter that does not fit the open chunk opens the next one; one larger than a slot gets a
    chunk of its own. Empty parameters take no room. Raises ValueError for a slot size that is not a
    positive multiple of SLOT_NUMEL_MULTIPLE.
    """
    if slot_numel <= 0 or slot_numel % SLOT_NUMEL_MULTIPLE:
        raise ValueError(
            f"chunk_numel must be a positive multiple of {SLOT_NUMEL_MULTIPLE}, not {slot_numel}; "
            f"try {max(1, ceil(slot_numel / SLOT_NUMEL_MULTIPLE)) * SLOT_NUMEL_MULTIPLE}"
        )
    packed: list[tuple[list[ParamSlice], int]] = []
    open_slices: dict[bool, list[ParamSlice]] = {}
    for param in params:
        if param.numel > slot_numel:
            packed.append(([ParamSlice(param, 0)], ceil(param.numel / slot_numel)))
            continue
        slices = open_slices.get(param.trainable)
        offset = round_up(slices[-1].end, ALIGN_NUMEL) if slices else 0
        if slices is None or offset + param.numel > slot_numel:
            slices, offset = [], 0
            open_slices[param.trainable] = slices
            packed.append((slices, 1))
        slices.append(ParamSlice(param, offset))
    return Layout(
        slot_numel,
        tuple(
            Chunk(i, slots, tuple(slices), slices[0].param.trainable)
            for i, (slices, slots) in enumerate(packed)
        ),
    )


def search_slot_numel(params: Sequence[ParamSpec], max_numel: int = MAX_SLOT_NUMEL) -> int:
    """The slot size that wastes least, from an eighth of the upper end to the upper end.

    The upper end is `max_numel` or about a sixteenth of the model, whichever is smaller, so that
    transfers stay large and the few slots in flight stay a small part of the whole. Sizes within
    1 % of the best count as equal, and of those the largest is taken.
    """
    total = sum(p.numel for p in params)
    upper = max(MIN_SLOT_NUMEL, min(max_numel, round_up(total // 16, SLOT_NUMEL_MULTIPLE)))
    step = max(
        SLOT_NUMEL_MULTIPLE, upper // _SEARCH_STEPS // SLOT_NUMEL_MULTIPLE * SLOT_NUMEL_MULTIPLE
    )
    upper = upper // SLOT_NUMEL_MULTIPLE * SLOT_NUMEL_MULTIPLE
    sizes = [n for n in range(upper, 0, -step) if n >= max(upper // 8, MIN_SLOT_NUMEL)]
    wastes = {n: pack(params, n).waste for n in sizes}
    best = min(wastes.values())
    return next(n for n in sizes if wastes[n] <= best + 0.01)
