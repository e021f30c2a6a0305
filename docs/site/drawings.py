"""The drawings of docs/how_it_works.md: python docs/site/drawings.py writes them."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
PARAM, GRAD, OPTIM, COMPUTE = "#56b4e9", "#f0b43c", "#3caf8c", "#c8cdd7"
INK, GREY = "#222222", "#666666"


class Drawing:
    """An SVG that grows by boxes, words and arrows; lengths are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
            f' width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            f' markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{GREY}"/></marker>'
            "</defs>",
        ]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        text: str = "",
        dashed: bool = False,
    ) -> None:
        """A rectangle with a text in its middle; a dashed one is a copy."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}"'
            f' stroke="{INK}" stroke-width="0.8"{dash}/>'
        )
        if text:
            self.words(x + width / 2, y + height / 2 + 4, text, anchor="middle", size=11)

    def band(self, y: float, height: float, width: float, fill: str) -> None:
        """The ground of a tier."""
        self._parts.append(
            f'<rect x="10" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}"/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        size: int = 13,
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        """A line of text."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"'
            f"{weight}>{text}</text>"
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line with a tip."""
        self._parts.append(
            f'<path d="M{x} {y} L{to_x} {to_y}" stroke="{GREY}" stroke-width="1.4" fill="none"'
            ' marker-end="url(#tip)"/>'
        )

    def save(self, name: str) -> None:
        """Writes the file."""
        (FOLDER / name).write_text("\n".join([*self._parts, "</svg>"]) + "\n")


def chunks_and_tiers() -> None:
    """Parameters, the chunks that they are packed into, and the homes of these."""
    drawing = Drawing(900, 500, "Parameters are packed into chunks, and chunks have homes on tiers")
    left, pitch, width = 170, 118, 106
    columns = [left + i * pitch for i in range(6)]

    drawing.words(20, 42, "parameters", bold=True)
    drawing.words(20, 60, "as the model has them", size=11, fill=GREY)
    sizes = [[106], [48, 8, 44], [60, 40], [48, 8, 44], [60, 40], [48, 8, 36]]
    attention, mlp = ["qkv", "", "proj"], ["mlp", "mlp"]
    names = [["embedding"], attention, mlp, attention, mlp, attention]
    for column, parts, labels in zip(columns, sizes, names, strict=True):
        x = column
        for part, label in zip(parts, labels, strict=True):
            drawing.box(x, 26, part, 30, "#ffffff", label)
            x += part

    drawing.words(20, 112, "chunks", bold=True)
    drawing.words(20, 130, "of equal size, in order", size=11, fill=GREY)
    for number, x in enumerate(columns):
        drawing.arrow(x + width / 2, 60, x + width / 2, 90)
        drawing.box(x, 94, width, 30, "#eef0f4", f"chunk {number}")

    drawing.band(150, 84, 880, "#f3f5fa")
    drawing.words(20, 176, "slots", bold=True)
    drawing.words(20, 194, "where compute happens:", size=11, fill=GREY)
    drawing.words(20, 209, "copies, while in use", size=11, fill=GREY)
    for number in (3, 4):
        drawing.box(columns[number] + 8, 176, width - 16, 30, PARAM, "parameters", dashed=True)
    drawing.words(columns[0], 188, "parameters in RAM are used where they are,", size=11, fill=GREY)
    drawing.words(columns[0], 203, "if the CPU computes", size=11, fill=GREY)

    drawing.band(246, 104, 880, "#eaf3ea")
    drawing.words(20, 274, "RAM", bold=True)
    drawing.words(20, 292, "never more than", size=11, fill=GREY)
    drawing.words(20, 307, "host_memory", size=11, fill=GREY)
    drawing.band(362, 126, 880, "#f6efe6")
    drawing.words(20, 392, "NVMe", bold=True)
    drawing.words(20, 410, "one scratch file, never", size=11, fill=GREY)
    drawing.words(20, 425, "above nvme_capacity", size=11, fill=GREY)
    for number, x in enumerate(columns):
        in_ram = number < 3
        y_param, y_grad = (258, 300) if in_ram else (374, 300)
        drawing.box(x + 8, y_param, width - 16, 30, PARAM, "parameters")
        drawing.box(x + 8, y_grad, width - 16, 30, GRAD, "gradients")
        drawing.box(x + 8, 440, width - 16, 30, OPTIM, "optimizer state")
    for number in (3, 4):
        x = columns[number] + 100
        drawing.arrow(x, 386, x, 210)
    drawing.save("chunks.svg")


def step() -> None:
    """What happens when in a step."""
    drawing = Drawing(1000, 330, "A step: compute, and what moves beside it")
    left, unit, chunks = 170, 30, 6
    lanes = {"compute": 62, "parameters": 118, "gradients": 174, "optimizer state": 230}
    notes = {
        "compute": "chunk by chunk",
        "parameters": "brought in ahead of use",
        "gradients": "leave when complete",
        "optimizer state": "read, updated, written",
    }
    forward_end = left + chunks * unit
    backward_end = forward_end + chunks * 2 * unit
    next_begin = backward_end + 2 * unit
    drawing.words(left, 24, "forward", bold=True)
    drawing.words(forward_end + 4, 24, "backward", bold=True)
    drawing.words(backward_end + 4, 24, "step()", bold=True)
    drawing.words(next_begin + 4, 24, "the next forward", bold=True)
    for x in (forward_end, backward_end):
        drawing.box(x, 34, 0.5, 240, GREY)
    for name, y in lanes.items():
        drawing.words(20, y + 12, name, bold=True)
        drawing.words(20, y + 28, notes[name], size=11, fill=GREY)

    for number in range(chunks):
        drawing.box(left + number * unit, lanes["compute"], unit, 28, COMPUTE, str(number))
        back = forward_end + (chunks - 1 - number) * 2 * unit
        drawing.box(back, lanes["compute"], 2 * unit, 28, COMPUTE, str(number))
        drawing.box(next_begin + number * unit, lanes["compute"], unit, 28, COMPUTE, str(number))
    waits = "waits for 0"
    drawing.words(next_begin - unit, lanes["compute"] + 18, waits, "middle", 10, GREY)
    # Chunks 0 to 2 have their parameters in RAM; the slots still have the last ones when backward
    # begins.
    for number, start in ((3, 1.2), (4, 2.4), (5, 3.6)):
        drawing.box(left + start * unit, lanes["parameters"], unit, 28, PARAM, str(number))
        drawing.box(next_begin + start * unit, lanes["parameters"], unit, 28, PARAM, str(number))
    drawing.box(forward_end + 0.4 * unit, lanes["parameters"], unit, 28, PARAM, "3")
    for number in range(chunks):
        done = forward_end + (chunks - number) * 2 * unit
        drawing.box(done - 0.2 * unit, lanes["gradients"], 0.9 * unit, 28, GRAD, str(number))
    for place, number in enumerate((5, 4, 3, 2, 1)):
        start = forward_end + (2.6 + 2 * place) * unit
        drawing.box(start, lanes["optimizer state"], 1.8 * unit, 28, OPTIM, str(number))
    drawing.box(backward_end + 0.7 * unit, lanes["optimizer state"], 1.2 * unit, 28, OPTIM, "0")
    end = next_begin + chunks * unit
    drawing.arrow(left, 290, end + 10, 290)
    drawing.words(end + 16, 294, "time", size=11, fill=GREY)
    drawing.words(
        left, 314, "Numbers are chunks. Lanes overlap; the longest one is what a step takes.",
        size=11, fill=GREY,
    )  # fmt: skip
    drawing.save("step.svg")


if __name__ == "__main__":
    chunks_and_tiers()
    step()
