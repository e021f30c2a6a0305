"""The drawings of the documents: python docs/site/drawings.py writes them."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hetero.reporting.palette import (
    FAINT,
    GROUND,
    INK,
    KIND_COLOURS,
    PHASE_COLOURS,
    QUIET,
    TIER_COLOURS,
    ink_on,
)
from hetero.reporting.run_record import TIER_WORDS, MemoryKind
from offload.memory.tiers import Tier

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
PARAM, GRAD, OPTIM = (
    (KIND_COLOURS[kind], kind.value)
    for kind in (MemoryKind.PARAM, MemoryKind.GRAD, MemoryKind.OPTIM_STATE)
)


class Drawing:
    """An SVG that grows by boxes, words and arrows; lengths are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
            f' width="{width}" height="{height}" font-family="sans-serif" font-size="14">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="{GROUND}"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            f' markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker>'
            "</defs>",
        ]

    def box(
        self, x: float, y: float, width: float, fill: str, text: str = "", dashed: bool = False
    ) -> None:
        """A rectangle with a text in its middle; a dashed one is a copy."""
        dash = ' stroke-dasharray="5 3" stroke-width="2"' if dashed else ' stroke-width="0.8"'
        opacity = ' fill-opacity="0.35"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="30" rx="3" fill="{fill}"'
            f' stroke="{INK}"{dash}{opacity}/>'
        )
        ink = INK if dashed else ink_on(fill)
        self.words(x + width / 2, y + 20, text, anchor="middle", fill=ink, size=13)

    def frame(self, y: float, height: float, width: float, tier: Tier) -> None:
        """The ground of a tier, with its grey at the left."""
        for x, across, fill in ((10, width, "none"), (10, 6, TIER_COLOURS[tier])):
            self._parts.append(
                f'<rect x="{x}" y="{y}" width="{across}" height="{height}" fill="{fill}"'
                f' stroke="{TIER_COLOURS[tier]}" stroke-width="1.5"/>'
            )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        size: int = 14,
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        """A line of text."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"'
            f"{weight}>{text}</text>"
        )

    def label(self, y: float, text: str, *notes: str) -> None:
        """Names a row at the left, with lines of notes below."""
        self.words(26, y, text, bold=True)
        for number, note in enumerate(notes, start=1):
            self.words(26, y + 17 * number, note, size=13, fill=QUIET)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line with a tip."""
        self._parts.append(
            f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{INK}" stroke-width="1.5"'
            ' fill="none" marker-end="url(#tip)"/>'
        )

    def rule(self, x: float, y: float, to_y: float) -> None:
        """A thin line from top to bottom."""
        path = f"M{x:g} {y:g} L{x:g} {to_y:g}"
        self._parts.append(f'<path d="{path}" stroke="{QUIET}" stroke-width="0.6"/>')

    @property
    def text(self) -> str:
        """The file."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def chunks_and_tiers() -> Drawing:
    """Parameters, the chunks that they are packed into, and the homes of these."""
    drawing = Drawing(980, 494, "Parameters are packed into chunks, and chunks have homes on tiers")
    left, pitch, width = 200, 128, 116
    columns = [left + i * pitch for i in range(6)]

    drawing.label(30, "model", "parameters in order")
    attention, mlp = ((52, "qkv"), (10, ""), (54, "proj")), ((66, "mlp"), (50, "mlp"))
    parts = (((width, "embedding"),), attention, mlp, attention, mlp, attention)
    for x, inside in zip(columns, parts, strict=True):
        at = x
        for part, label in inside:
            drawing.box(at, 16, part, GROUND, label)
            at += part

    drawing.label(96, "chunks", "of equal size")
    for number, x in enumerate(columns):
        drawing.arrow(x + width / 2, 48, x + width / 2, 78)
        drawing.box(x, 80, width, FAINT, f"chunk {number}")

    drawing.frame(130, 190, 960, Tier.HOST)
    drawing.label(152, "RAM", "homes and slots", "together at most", "host_memory")
    drawing.frame(362, 122, 960, Tier.DISK)
    drawing.label(384, "NVMe", "a scratch file of", "at most", "nvme_capacity")
    for number, x in enumerate(columns):
        drawing.box(x, 144 if number < 3 else 376, width, *PARAM)
        drawing.box(x, 186, width, *GRAD)
        drawing.box(x, 440, width, *OPTIM)
    drawing.label(264, "slots", "copies while in use", "(on a GPU: its memory)")
    for number, (fill, words), y in ((1, OPTIM, 440), (3, PARAM, 376), (4, PARAM, 376)):
        x = columns[number]
        drawing.box(x, 276, width, fill, words, dashed=True)
        drawing.arrow(x + width / 2 - 14, y, x + width / 2 - 14, 309)
        if number == 1:
            drawing.arrow(x + width / 2 + 14, 307, x + width / 2 + 14, y - 2)
    drawing.words(
        columns[1] + width / 2 + 26, 346, "read, updated, written back", size=13, fill=QUIET
    )
    drawing.words(columns[4] + width / 2, 346, "read ahead of use", size=13, fill=QUIET)
    return drawing


def step() -> Drawing:
    """When what happens in a step."""
    drawing = Drawing(1024, 366, "A step: compute, and transfers and updates at the same time")
    left, unit, chunks = 200, 30, 6
    lanes = {
        "compute": (62, "chunk by chunk"),
        "parameters": (122, "read ahead of use;", "0 to 2 are in RAM"),
        "gradients": (190, "leave when complete"),
        "optimizer state": (250, "read, updated, written"),
    }
    forward_end = left + chunks * unit
    backward_end = forward_end + chunks * 2 * unit
    next_begin = backward_end + 1.9 * unit
    begins = (left, forward_end, backward_end, next_begin)
    for x, words in zip(begins, ("forward", "backward", "step()", "next forward"), strict=True):
        drawing.words(x, 24, words, bold=True)
        drawing.rule(x, 34, 306)
    for name, (y, *notes) in lanes.items():
        drawing.label(y + 12, name, *notes)

    rows = {name: float(y) for name, (y, *_) in lanes.items()}
    forward, backward, optimizer = PHASE_COLOURS.values()
    next_chunk = next_begin + 1.4 * unit
    drawing.box(backward_end, rows["compute"], next_begin - backward_end, optimizer)
    drawing.box(next_begin, rows["compute"], 1.4 * unit, GROUND, "wait", dashed=True)
    for number in range(chunks):
        drawing.box(left + number * unit, rows["compute"], unit, forward, str(number))
        back = forward_end + (chunks - 1 - number) * 2 * unit
        drawing.box(back, rows["compute"], 2 * unit, backward, str(number))
        drawing.box(next_chunk + number * unit, rows["compute"], unit, forward, str(number))
    # The slots still have the last chunks when backward begins.
    for number, start in ((3, 1.2), (4, 2.4), (5, 3.6)):
        for begin in (left, next_chunk):
            drawing.box(begin + start * unit, rows["parameters"], unit, PARAM[0], str(number))
    drawing.box(forward_end + 0.4 * unit, rows["parameters"], unit, PARAM[0], "3")
    for number in range(chunks):
        done = forward_end + (chunks - number) * 2 * unit
        drawing.box(done - 0.2 * unit, rows["gradients"], 0.9 * unit, GRAD[0], str(number))
    for place, number in enumerate((5, 4, 3, 2, 1)):
        start = forward_end + (2.6 + 2 * place) * unit
        drawing.box(start, rows["optimizer state"], 1.8 * unit, OPTIM[0], str(number))
    start = backward_end + 0.7 * unit
    drawing.box(start, rows["optimizer state"], next_chunk - start, OPTIM[0], "0")
    drawing.arrow(left, 316, 1004, 316)
    drawing.words(1004, 336, "time", anchor="end", size=13, fill=QUIET)
    drawing.words(
        left,
        350,
        "Numbers are chunks. The next forward waits for the update of chunk 0 alone.",
        size=13,
        fill=QUIET,
    )
    return drawing


def card() -> Figure:
    """The picture that other sites show with a link to these documents: 1200 x 630 pixels."""
    figure = Figure(figsize=(12, 6.3), facecolor=GROUND)
    figure.text(0.06, 0.76, "hetero", fontsize=76, fontweight="bold", color=INK)
    words = (
        "Trains PyTorch models that do not fit in memory:",
        "chunks on a device, in RAM and on NVMe",
    )
    figure.text(0.06, 0.53, "\n".join(words), fontsize=29, color=QUIET, linespacing=1.4)
    axes = figure.add_axes((0.06, 0.08, 0.88, 0.36), xlim=(0, 12), ylim=(0, 3))
    axes.axis("off")
    counts = (3, 3, 0), (0, 5, 2), (0, 0, 11)  # chunks of each kind in each tier
    for row, (tier, shares) in enumerate(zip(Tier, counts, strict=True)):
        y = 2.15 - row
        axes.text(0, y + 0.32, TIER_WORDS[tier], fontsize=22, color=INK, va="center")
        colours = [
            fill
            for (fill, _), n in zip((PARAM, GRAD, OPTIM), shares, strict=True)
            for _ in range(n)
        ]
        for place, colour in enumerate(colours):
            axes.add_patch(Rectangle((1.5 + 0.95 * place, y), 0.85, 0.66, color=colour))
    return figure


DRAWINGS = {"chunks.svg": chunks_and_tiers, "step.svg": step}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw().text)
    card().savefig(FOLDER / "card.png", dpi=100, metadata={"Software": None})
