"""The map of chunks: which kind of each chunk's state is where."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from hetero.reporting.drawing import FONT_SIZE, FULL_WIDTH, HALF_WIDTH, new_figure
from hetero.reporting.palette import (
    FAINT,
    GROUND,
    KIND_COLOURS,
    QUIET,
    TIER_COLOURS,
    TIER_PLACES,
    TIER_WORDS,
    ink_on,
)
from hetero.reporting.run_record import ChunkHomes, MemoryKind, RunRecord
from offload.memory.tiers import Tier

KINDS = (MemoryKind.PARAM, MemoryKind.GRAD, MemoryKind.OPTIM_STATE)
_MOST_EDGED = 120  # chunks: with more, edges would hide the colours
_NAME_WIDTH = 2.2  # inches for the name of a chunk's first parameter
_LEAST_NAMED = 0.6  # inches: narrower runs have no room for a word
_LONGEST_NAME = 26
_BAND = 0.84


def draw_placement(record: RunRecord, narrow: bool = False) -> Figure:
    """A row for each kind of state, and the model's chunks from left to right."""
    chunks = record.chunks
    width = HALF_WIDTH if narrow else FULL_WIDTH
    figure = new_figure(width, 2.5)
    axes = figure.add_subplot()
    ends = list(accumulate(chunk.nbytes for chunk in chunks))
    begins = [0, *ends[:-1]]
    for row, kind in enumerate(KINDS):
        _draw_row(axes, chunks, begins, row, kind, _LEAST_NAMED / width)
        # The kind's colour in front of its row, as all pictures have it.
        stripe = (-0.012, row - _BAND / 2), 0.008, _BAND
        axes.add_patch(
            Rectangle(
                *stripe,
                color=KIND_COLOURS[kind],
                transform=axes.get_yaxis_transform(),
                clip_on=False,
            )
        )
    _name_chunks(axes, chunks, begins, int(width / _NAME_WIDTH))
    axes.set_yticks(range(len(KINDS)), [kind.value for kind in KINDS])
    axes.set_ylim(len(KINDS) - 0.5, -0.5)
    axes.set_xlim(0, ends[-1])
    axes.tick_params(axis="y", length=0, pad=10)
    axes.set_xlabel("chunks in the model's order; width: bytes")
    axes.spines[["left", "bottom"]].set_visible(False)
    used = [tier for tier in Tier if any(tier in c.homes.values() for c in chunks)]
    handles = [Patch(color=TIER_COLOURS[tier], label=TIER_WORDS[tier]) for tier in used]
    if any(home is None for c in chunks for home in c.homes.values()):
        handles.append(Patch(facecolor=GROUND, edgecolor=QUIET, hatch="///", label="frozen: none"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def _draw_row(
    axes: Axes,
    chunks: tuple[ChunkHomes, ...],
    begins: list[int],
    row: int,
    kind: MemoryKind,
    least_named: float,
) -> None:
    edged = len(chunks) <= _MOST_EDGED
    total = begins[-1] + chunks[-1].nbytes
    pairs = list(zip(chunks, begins, strict=True))
    for home, run in groupby(pairs, key=lambda pair: pair[0].homes[kind]):
        some = list(run)
        begin, end = some[0][1], some[-1][1] + some[-1][0].nbytes
        cells = [(at, chunk.nbytes) for chunk, at in some] if edged else [(begin, end - begin)]
        axes.broken_barh(
            cells,
            (row - _BAND / 2, _BAND),
            facecolors=GROUND if home is None else TIER_COLOURS[home],
            edgecolors=FAINT if home is None else GROUND,
            hatch="///" if home is None else None,
            linewidth=0.6 if edged else 0,
        )
        if home is not None and end - begin > least_named * total:
            words, middle, ink = TIER_WORDS[home], (begin + end) / 2, ink_on(TIER_COLOURS[home])
            axes.text(middle, row, words, ha="center", va="center", color=ink, weight="bold")


def _name_chunks(axes: Axes, chunks: tuple[ChunkHomes, ...], begins: list[int], count: int) -> None:
    """Names the first parameter of some chunks, about as far from one another."""
    total = begins[-1] + chunks[-1].nbytes
    ticks: list[tuple[int, str]] = []
    for chunk, begin in zip(chunks, begins, strict=True):
        if begin >= len(ticks) * total / count and len(ticks) < count:
            name = chunk.name.split(" ")[0]
            if len(name) > _LONGEST_NAME:
                name = f"\N{HORIZONTAL ELLIPSIS}{name[-_LONGEST_NAME + 1 :]}"
            ticks.append((begin, name))
    axes.set_xticks([at for at, _ in ticks], [name for _, name in ticks], ha="left")
    axes.tick_params(axis="x", labelsize=FONT_SIZE - 2, length=4)


def placement_finding(record: RunRecord) -> str:
    """Where each kind of state is, in one sentence."""
    parts = []
    for kind in KINDS:
        homes = Counter(c.homes[kind] for c in record.chunks if c.homes[kind] is not None)
        if homes:
            places = " and ".join(
                f"{homes[tier]} {TIER_PLACES[tier]}" for tier in Tier if homes[tier]
            )
            parts.append(f"{kind.value} of {places}")
    count = len(record.chunks)
    return f"{count} chunk{'s' if count != 1 else ''}: {'; '.join(parts)}"
