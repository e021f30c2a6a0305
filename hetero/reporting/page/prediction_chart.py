"""What a step was predicted to take beside what it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hetero.reporting.drawing import FULL_WIDTH, HALF_WIDTH, new_figure
from hetero.reporting.palette import GROUND, PHASE_COLOURS, REST_COLOUR, ink_on
from hetero.reporting.run_record import RunRecord
from offload.memory.sizes import format_bytes

_LEAST_NAMED = 0.7  # inches
_LETTER = 0.085  # inches, about


def draw_prediction(
    record: RunRecord, predicted: Mapping[str, Any], narrow: bool = False
) -> Figure:
    """Two bars, one above the other, by phase."""
    width = HALF_WIDTH if narrow else FULL_WIDTH
    figure = new_figure(width, 1.5)
    axes = figure.add_subplot()
    measured = record.part_s
    longest = max(sum(measured.values()), predicted["step_s"])
    inch = 1.25 * longest / width
    _draw_bar(axes, 0, predicted["phases_s"], inch)
    _draw_bar(axes, 1, measured, inch)
    axes.set_yticks([0, 1], ["predicted", "measured"])
    axes.set_ylim(1.5, -0.5)
    axes.set_xlim(0, longest + 0.7 * inch)
    axes.set_xlabel("time of a step (s)")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return figure


def _draw_bar(axes: Axes, row: int, seconds: Mapping[str, float], inch: float) -> None:
    """One bar; `inch` is so many seconds."""
    begin = 0.0
    for name, length in seconds.items():
        colour = _colour(name)
        axes.barh(row, length, left=begin, height=0.7, color=colour, edgecolor=GROUND)
        if length > _LEAST_NAMED * inch:
            # A name may be longer than its part.
            room = int(length / inch / _LETTER)
            words = name if len(name) <= room else f"{name[: room - 1]}\N{HORIZONTAL ELLIPSIS}"
            middle = begin + length / 2
            axes.text(middle, row, words, ha="center", va="center", color=ink_on(colour))
        begin += length
    axes.text(begin + 0.06 * inch, row, f"{begin:.3g} s", va="center")


def _colour(name: str) -> str:
    """Of a phase; of phases together that of the first."""
    for part, colour in (*PHASE_COLOURS.items(), ("update", PHASE_COLOURS["optimizer"])):
        if name.startswith(part):
            return colour
    return REST_COLOUR


def prediction_finding(record: RunRecord, predicted: Mapping[str, Any]) -> str:
    """How far off it was, and what bounds the step."""
    ratio = record.step_s / predicted["step_s"] if predicted["step_s"] else 0.0
    return f"A step took {ratio:.2f} times as long as predicted; {predicted['bound']} bounds it"


def prediction_rows(
    record: RunRecord, predicted: Mapping[str, Any]
) -> list[tuple[str, str, str, str]]:
    """What is compared, predicted, measured, and the ratio."""
    rows = [_row("step", predicted["step_s"], record.step_s, lambda s: f"{s:.3f} s")]
    for words, key, link in (
        ("NVMe read per step", "nvme_read_bytes", "disk_read"),
        ("NVMe written per step", "nvme_written_bytes", "disk_write"),
    ):
        if predicted[key] or record.mean(link):
            rows.append(_row(words, predicted[key], record.mean(link), format_bytes))
    return rows


def _row(words: str, wanted: float, found: float, text: Any) -> tuple[str, str, str, str]:
    ratio = f"{found / wanted:.2f}" if wanted else "-"
    return words, text(wanted), text(found), ratio
