"""What a step was predicted to take beside what it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hetero.reporting.page.palette import PART_COLOURS
from hetero.reporting.page.progress_charts import part_seconds, step_seconds
from hetero.reporting.page.svg import FONT_SIZE, FULL_WIDTH, new_figure, quiet_grid
from hetero.reporting.run_record import RunRecord
from offload.memory.sizes import format_bytes

_LEAST_NAMED = 0.09  # of the width


def draw_prediction(record: RunRecord, predicted: Mapping[str, Any]) -> Figure:
    """Two bars, one above the other, by phase."""
    figure = new_figure(FULL_WIDTH, 1.5)
    axes = figure.add_subplot()
    measured = part_seconds(record)
    longest = max(sum(measured.values()), predicted["step_s"])
    _draw_bar(axes, 0, predicted["phases_s"], longest)
    _draw_bar(axes, 1, measured, longest)
    axes.set_yticks([0, 1], ["predicted", "measured"])
    axes.set_ylim(1.5, -0.5)
    axes.set_xlim(0, 1.08 * longest)
    axes.set_xlabel("seconds of a step")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    quiet_grid(axes, "x")
    return figure


def _draw_bar(axes: Axes, row: int, seconds: Mapping[str, float], longest: float) -> None:
    begin = 0.0
    for name, length in seconds.items():
        colour, ink = _colours(name)
        axes.barh(row, length, left=begin, height=0.7, color=colour, edgecolor="white")
        if length > _LEAST_NAMED * longest:
            # A name may be longer than its part.
            room = int(length / longest * 95)
            words = (
                name if len(name) <= room else f"{name[: max(1, room - 1)]}\N{HORIZONTAL ELLIPSIS}"
            )
            middle = begin + length / 2
            axes.text(middle, row, words, ha="center", va="center", color=ink)
        begin += length
    axes.text(begin + 0.008 * longest, row, f"{begin:.3g} s", va="center", fontsize=FONT_SIZE)


def _colours(name: str) -> tuple[str, str]:
    """Of a phase, and of its name on it; of phases together that of the first."""
    for part, colour in (*PART_COLOURS.items(), ("update", PART_COLOURS["optimizer"])):
        if name.startswith(part):
            return colour, "white" if part == "backward" else "black"
    return "#DDDDDD", "black"


def prediction_finding(record: RunRecord, predicted: Mapping[str, Any]) -> str:
    """How far off it was, and what bounds the step."""
    ratio = step_seconds(record) / predicted["step_s"] if predicted["step_s"] else 0.0
    return f"A step took {ratio:.2f} times as long as predicted; {predicted['bound']} bounds it"


def prediction_rows(
    record: RunRecord, predicted: Mapping[str, Any]
) -> list[tuple[str, str, str, str]]:
    """What is compared, predicted, measured, and the ratio."""
    rows = [_row("step", predicted["step_s"], step_seconds(record), lambda s: f"{s:.3f} s")]
    for words, key, link in (
        ("NVMe read per step", "nvme_read_bytes", "disk_read"),
        ("NVMe written per step", "nvme_written_bytes", "disk_write"),
    ):
        if predicted[key] or record.per_step(link):
            rows.append(_row(words, predicted[key], record.per_step(link), format_bytes))
    return rows


def _row(words: str, wanted: float, found: float, text: Any) -> tuple[str, str, str, str]:
    ratio = f"{found / wanted:.2f}" if wanted else "-"
    return words, text(wanted), text(found), ratio
