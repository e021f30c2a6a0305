"""The page of a run: one HTML file without scripts, and without anything from elsewhere."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hetero.reporting.drawing import FULL_WIDTH, as_svg, styled
from hetero.reporting.page.headline import cards, rows, summary
from hetero.reporting.page.memory_chart import draw_memory, memory_finding
from hetero.reporting.page.placement_chart import draw_placement, placement_finding
from hetero.reporting.page.prediction_chart import (
    draw_prediction,
    prediction_finding,
    prediction_rows,
)
from hetero.reporting.page.progress_charts import (
    draw_loss,
    draw_step_time,
    draw_throughput,
    draw_traffic,
    half_figure,
    step_time_finding,
    throughput_finding,
    traffic_finding,
)
from hetero.reporting.page.style import CSS
from hetero.reporting.palette import TIER_WORDS
from hetero.reporting.run_record import RunRecord
from hetero.reporting.timeline_chart import hidden_finding, make_figure
from offload.timeline import Timeline

_LANE_HEIGHT = 0.42  # inches of a timeline's row
_OTHER_RANKS = ("sent", "received")
_OWN_LINKS = ("disk_read", "disk_write", "h2d", "d2h")


def write_page(record: RunRecord, path: Path) -> None:
    """Writes the page, whole or not at all. The record has at least one step. Raises OSError."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(make_page(record), encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def make_page(record: RunRecord) -> str:
    """The page's text. The record has at least one step. Needs matplotlib."""
    with styled():
        parts = list(_body(record))
    title = html.escape(record.facts.title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} - hetero report</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _body(record: RunRecord) -> Iterator[str]:
    yield _header(record)
    yield _section(
        "memory",
        memory_finding(record),
        partial(draw_memory, record),
        "Model state that hetero holds, stacked by kind, after each forward, backward and step."
        " Figures of kinds are the most at any of these moments. Dotted: parameters, gradients and"
        " optimizer state of plain PyTorch in fp32, frozen parameters in the dtype of compute. The"
        " whole process includes activations and libraries; its peak is the kernel's.",
    )
    if record.timeline is not None and record.timeline.intervals:
        yield _section(
            "timeline",
            f"A step by resource: {_lower(hidden_finding(record.timeline))}",
            partial(_timeline, record.timeline),
            f"{_recorded(record)}. A bar is a time in which the resource was busy;"
            " bars below one another were busy at the same time. Figures at the right are the share"
            " of the time, and the bytes that were moved.",
        )
    yield _section(
        "placement",
        f"Placement: {placement_finding(record)}",
        partial(draw_placement, record),
        "At the end of the run. Some chunks are named by their first parameter.",
    )
    yield from _prediction(record)
    yield _progress(record)
    yield _footer(record)


def _header(record: RunRecord) -> str:
    shown = []
    for card in cards(record):
        bar = ""
        if card.share is not None:
            used = f"{min(1.0, card.share):.1%}"
            bar = f'<div class="bar"><i style="width:{used}"></i></div>'
        shown.append(
            f'<div class="card"><span>{html.escape(card.label)}</span>'
            f"<b>{html.escape(card.value)}</b><span>{html.escape(card.beside)}</span>{bar}</div>"
        )
    table = "".join(
        f'<tr><th scope="row">{html.escape(label)}</th><td>{html.escape(value)}</td></tr>'
        for label, value in rows(record)
    )
    return (
        f"<header>\n<h1>{html.escape(record.facts.title)}</h1>\n"
        f"<p>{html.escape(summary(record))}</p>\n</header>\n"
        f'<div class="cards">{"".join(shown)}</div>\n'
        f'<table id="facts"><tbody>{table}</tbody></table>'
    )


def _section(
    name: str, finding: str, draw: Callable[..., Figure | None], caption: str, more: str = ""
) -> str:
    """A chart for wide pages, and as narrow=True for narrow ones, where the other is hidden."""
    charts = []
    for width in ("wide", "narrow"):
        figure = draw(narrow=width == "narrow")
        if figure is not None:
            svg = as_svg(figure, f"{name}-{width}", finding)
            charts.append(f'<div class="{width}">{svg}</div>')
    scrolls = ' class="scrolls"' if len(charts) == 1 else ""
    return (
        f'<section id="{name}">\n<h2>{html.escape(finding)}</h2>\n'
        f"<figure{scrolls}>{''.join(charts)}"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>{more}\n</section>"
    )


def _timeline(timeline: Timeline, narrow: bool) -> Figure | None:
    """None for narrow pages: thousands of bars are there once, and move sideways."""
    return None if narrow else make_figure(timeline, FULL_WIDTH, _LANE_HEIGHT)


def _recorded(record: RunRecord) -> str:
    assert record.timeline is not None
    steps = sum(i.name == "optimizer" for i in record.timeline.of("compute"))
    count = f"{steps} step{'s' if steps != 1 else ''}" if steps else "A part of a step"
    text = f"{count} in a row, {record.timeline.seconds:.3g} s"
    if record.timeline.dropped:
        text += f" ({record.timeline.dropped:,} intervals found no room)"
    return text


def _prediction(record: RunRecord) -> Iterator[str]:
    predicted = record.predicted
    if predicted is None or not predicted["step_s"]:
        yield (
            '<section id="prediction">\n<h2>Nothing was predicted</h2>\n<p class="quiet">There is'
            " no profile of this machine that says what is used here (hetero profile measures one),"
            " and rates of the run's own steps are not known.</p>\n</section>"
        )
        return
    body = "".join(
        f'<tr><th scope="row">{html.escape(words)}</th>'
        + "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for words, *cells in prediction_rows(record, predicted)
    )
    head = "".join(
        f'<th class="number" scope="col">{word}</th>'
        for word in ("predicted", "measured", "measured / predicted")
    )
    by = (
        "Computing was measured in this run, and transfers follow from the placement."
        if predicted.get("measured_computing")
        else "Predicted from the profile of this machine before any step was made."
    )
    yield _section(
        "prediction",
        prediction_finding(record, predicted),
        partial(draw_prediction, record, predicted),
        f"{by} Measured: of the steady steps, seconds as medians. Predicted bytes are of model"
        " state; measured ones have saved activations, too.",
        f'<table><thead><tr><th scope="col">of a step</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>",
    )


def _progress(record: RunRecord) -> str:
    """Small charts, two in a row."""
    made: list[tuple[str, str, Figure]] = []

    def add(name: str, finding: str, draw: Callable[..., Any], *arguments: Any) -> None:
        figure, axes = half_figure(record)
        handles = draw(axes, record, *arguments) or axes.get_legend_handles_labels()[0]
        if handles:
            figure.legend(handles=handles, loc="outside upper left", ncols=2, columnspacing=1.2)
        made.append((name, finding, figure))

    if record.loss_words:
        add("loss", f"Loss: {record.loss_words}", draw_loss)
    add("speed", throughput_finding(record), draw_throughput)
    add("step-time", step_time_finding(record), draw_step_time)
    for name, among in (("moved", _OWN_LINKS), ("ranks", _OTHER_RANKS)):
        if links := record.used_links(among):
            add(name, traffic_finding(record, links), draw_traffic, links)
    charts = "".join(
        f'<div id="{name}"><h2>{html.escape(finding)}</h2>'
        f"<figure>{as_svg(figure, name, finding)}</figure></div>\n"
        for name, finding, figure in made
    )
    return f'<section class="pair">\n{charts}</section>'


def _footer(record: RunRecord) -> str:
    tiers = ", ".join(TIER_WORDS[tier] for tier in record.used_tiers)
    return (
        f'<p class="quiet">Written by hetero. Tiers in use: {html.escape(tiers)}. GiB, MiB and KiB'
        " are powers of 1024; GB is 10<sup>9</sup> bytes.</p>"
    )


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
