"""The page of a run: one HTML file without scripts, and without anything from elsewhere."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hetero.reporting.charts import (
    KINDS,
    draw_memory,
    draw_placement,
    draw_prediction,
    memory_finding,
    step_charts,
)
from hetero.reporting.drawing import (
    FULL_WIDTH,
    HALF_WIDTH,
    as_svg,
    new_figure,
    step_axis,
    styled,
)
from hetero.reporting.palette import (
    FAINT,
    GROUND,
    INK,
    LINK_WORDS,
    QUIET,
    TIER_PLACES,
    TIER_WORDS,
)
from hetero.reporting.run_record import RunRecord
from hetero.reporting.timeline_chart import hidden_finding, make_figure
from offload.memory.sizes import format_bytes
from offload.memory.tiers import Tier
from offload.timeline import Timeline

_LANE_HEIGHT = 0.42  # inches of a timeline's row
_STEP_CHART_HEIGHT = 2.6  # inches


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
        f"<title>{title} - hetero report</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
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
        finding = hidden_finding(record.timeline)
        yield _section(
            "timeline",
            f"A step by resource: {finding[0].lower()}{finding[1:]}",
            partial(_draw_timeline, record.timeline),
            f"{_recorded(record.timeline)}. A bar is a time in which the resource was busy;"
            " bars below one another were busy at the same time. Figures at the right are the share"
            " of the time, and the bytes that were moved.",
        )
    yield _section(
        "placement",
        f"Placement: {_homes(record)}",
        partial(draw_placement, record),
        "At the end of the run. Some chunks are named by their first parameter.",
    )
    yield _prediction(record)
    yield _progress(record)
    tiers = ", ".join(TIER_WORDS[tier] for tier in record.used_tiers)
    yield (
        f'<p class="quiet">Written by hetero. Tiers in use: {html.escape(tiers)}. GiB, MiB and KiB'
        " are powers of 1024; GB is 10<sup>9</sup> bytes.</p>"
    )


def _header(record: RunRecord) -> str:
    return (
        f"<header>\n<h1>{html.escape(record.facts.title)}</h1>\n"
        f"<p>{html.escape(_summary(record))}</p>\n</header>\n"
        f'<div class="cards">{"".join(_cards(record))}</div>\n'
        f'<table id="facts">{_table_body(_facts(record))}</table>'
    )


def _table_body(rows: Sequence[Sequence[str]], cells: str = "<td>") -> str:
    """Rows of a label and what is said of it; `cells` begins each but the first."""
    found = ""
    for label, *values in rows:
        found += f'<tr><th scope="row">{html.escape(label)}</th>'
        found += "".join(f"{cells}{html.escape(value)}</td>" for value in values) + "</tr>"
    return f"<tbody>{found}</tbody>"


def _cards(record: RunRecord) -> Iterator[str]:
    """The figures that are seen first: memory by tier, then speed and loss."""

    def card(label: str, value: str, beside: str, share: float | None = None) -> str:
        """`beside` says what to compare the value with; `share`: how much of a budget it is."""
        bar = ""
        if share is not None:
            bar = f'<div class="bar"><i style="width:{min(1.0, share):.1%}"></i></div>'
        return (
            f'<div class="card"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>'
            f"<span>{html.escape(beside)}</span>{bar}</div>"
        )

    facts = record.facts
    for tier in record.used_tiers:
        peak, budget = record.peak_bytes[tier], record.largest_budget(tier)
        share = peak / budget if budget else None
        label = f"Model state {TIER_PLACES[tier]}"
        yield card(label, format_bytes(peak), record.limit_words(tier), share)
    peak, process = record.peak_rss_bytes, facts.process_bytes
    limit = f"of {format_bytes(process)}" if process else "RAM, no limit"
    share = peak / process if process else None
    yield card("Whole process (RSS)", format_bytes(peak), limit, share)
    rate, unit = record.speed
    yield card("Speed", rate, f"{unit} per second, {record.step_s:.3g} s per step")
    losses = [point.loss for point in record.points if point.loss is not None]
    if losses:
        whose = " (of rank 0)" if facts.ranks > 1 and not facts.losses_are_means else ""
        yield card("Loss, last step", f"{losses[-1]:.4g}", f"{record.loss_words}{whose}")


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Label and value of each line of the table, in order."""
    facts = record.facts
    plain = f"{format_bytes(facts.plain_bytes)} of model state {TIER_PLACES[facts.plain_tier]}"
    table = [
        ("model", f"{facts.params:,} parameters, in {facts.dtype}, policy {facts.policy}"),
        ("plain PyTorch", f"would hold {plain}, and activations"),
        *facts.rows,
    ]
    if facts.ranks > 1:
        table.append(("ranks", f"{facts.ranks}; bytes on this page are of rank 0"))
    error = "" if record.error is None else f": {record.error}"
    table.append(("steps", f"{record.steps:,}, {record.status}{error}"))
    links = record.used_links()
    if links:
        moved = (f"{LINK_WORDS[link]} {format_bytes(record.mean(link))}" for link in links)
        table.append(("moved per step", ", ".join(moved)))
    update_s, waited_s = record.mean("update_s"), record.mean("update_wait_s")
    table.append(("updates", f"{update_s:.3g} s per step, {waited_s:.3g} s of them waited for"))
    if facts.ranks > 1:
        waited_s = record.mean("gather_wait_s")
        table.append(("waited for other ranks' parameters", f"{waited_s:.3g} s per step"))
    changes = [why for _, why in record.changes]
    table += [("placed again", why) for why in changes]
    table += [("note", note) for note in record.notes if note not in changes]
    return table


def _summary(record: RunRecord) -> str:
    """The page in one sentence."""
    facts = record.facts
    held = ", ".join(
        f"{format_bytes(record.peak_bytes[tier])} {TIER_PLACES[tier]}" for tier in record.used_tiers
    )
    has_budget = any(record.largest_budget(tier) is not None for tier in Tier)
    within = "within its budgets" if has_budget else "without a budget"
    kept = "a budget was passed" if record.passed_budgets else within
    return (
        f"Model state took at most {held}, {kept}; plain PyTorch would hold"
        f" {format_bytes(facts.plain_bytes)} of it {TIER_PLACES[facts.plain_tier]}."
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


def _draw_timeline(timeline: Timeline, narrow: bool) -> Figure | None:
    """None for narrow pages: thousands of bars are there once, and move sideways."""
    return None if narrow else make_figure(timeline, FULL_WIDTH, _LANE_HEIGHT)


def _recorded(timeline: Timeline) -> str:
    steps = sum(i.name == "optimizer" for i in timeline.of("compute"))
    count = f"{steps} step{'s' if steps != 1 else ''}" if steps else "A part of a step"
    text = f"{count} in a row, {timeline.seconds:.3g} s"
    if timeline.dropped:
        text += f" ({timeline.dropped:,} intervals found no room)"
    return text


def _homes(record: RunRecord) -> str:
    """Where each kind of state is, in one sentence."""
    parts = []
    for kind in KINDS:
        homes = Counter(c.homes[kind] for c in record.chunks if c.homes[kind] is not None)
        if homes:
            places = [f"{homes[tier]} {TIER_PLACES[tier]}" for tier in Tier if homes[tier]]
            parts.append(f"{kind.value} of {' and '.join(places)}")
    count = len(record.chunks)
    return f"{count} chunk{'s' if count != 1 else ''}: {'; '.join(parts)}"


def _prediction(record: RunRecord) -> str:
    """A step as it was predicted and as it was measured."""
    predicted = record.predicted
    if predicted is None or not predicted["step_s"]:
        return (
            '<section id="prediction">\n<h2>Nothing was predicted</h2>\n<p class="quiet">There is'
            " no profile of this machine that says what is used here (hetero profile measures one),"
            " and rates of the run's own steps are not known.</p>\n</section>"
        )
    rows = []

    def compare(words: str, wanted: float, found: float, text: Callable[[Any], str]) -> None:
        ratio = f"{found / wanted:.2f}" if wanted else "-"
        rows.append((words, text(wanted), text(found), ratio))

    compare("step", predicted["step_s"], record.step_s, lambda seconds: f"{seconds:.3f} s")
    for words, link in (("read", "disk_read"), ("written", "disk_write")):
        wanted, found = predicted[f"nvme_{words}_bytes"], record.mean(link)
        if wanted or found:
            compare(f"NVMe {words} per step", wanted, found, format_bytes)
    head = "".join(
        f'<th class="number" scope="col">{word}</th>'
        for word in ("predicted", "measured", "measured / predicted")
    )
    by = (
        "Computing was measured in this run, and transfers follow from the placement."
        if predicted.get("measured_computing")
        else "Predicted from the profile of this machine before any step was made."
    )
    ratio, cells = record.step_s / predicted["step_s"], '<td class="number">'
    return _section(
        "prediction",
        f"A step took {ratio:.2f} times as long as predicted; {predicted['bound']} bounds it",
        partial(draw_prediction, record, predicted),
        f"{by} Measured: of the steady steps, seconds as medians. Predicted bytes are of model"
        " state; measured ones have saved activations, too.",
        f'<table><thead><tr><th scope="col">of a step</th>{head}</tr></thead>'
        f"{_table_body(rows, cells)}</table>",
    )


def _progress(record: RunRecord) -> str:
    """Small charts, two in a row."""
    found = ""
    for name, chart in step_charts(record).items():
        figure = new_figure(HALF_WIDTH, _STEP_CHART_HEIGHT)
        axes = figure.add_subplot()
        step_axis(axes, *record.first_and_last)
        handles = chart.draw(axes)
        if handles:
            figure.legend(handles=handles, loc="outside upper left", ncols=2, columnspacing=1.2)
        svg = as_svg(figure, name, chart.finding)
        found += f'<div id="{name}"><h2>{html.escape(chart.finding)}</h2>'
        found += f"<figure>{svg}</figure></div>\n"
    return f'<section class="pair">\n{found}</section>'


# On a screen and in print.
_CSS = (
    """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 28px 32px 48px; max-width: 1060px; background: GROUND; color: INK;
  font: 15px/1.5 "DejaVu Sans", Verdana, Arial, sans-serif;
}
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; line-height: 1.35; margin: 0 0 4px; }
header p { margin: 0 0 4px; }
.quiet { color: QUIET; font-size: 13.5px; }
.cards { display: flex; flex-wrap: wrap; gap: 14px; margin: 20px 0; }
.card { flex: 1 1 170px; border: 1px solid FAINT; border-radius: 6px; padding: 12px 16px; }
.card b { display: block; font-size: 24px; line-height: 1.3; white-space: nowrap; }
.card span { display: block; font-size: 13.5px; }
.bar { height: 8px; border: 1px solid QUIET; border-radius: 2px; margin-top: 8px; }
.bar i { display: block; height: 100%; background: QUIET; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { padding: 5px 12px 5px 0; border-bottom: 1px solid FAINT; vertical-align: top;
  text-align: left; overflow-wrap: anywhere; }
th { font-weight: 600; }
tbody th { width: 15em; }
td.number, th.number { text-align: right; width: 10em; }
section { margin-top: 34px; }
figure { margin: 6px 0 0; }
figure svg { display: block; width: 100%; height: auto; }
.narrow { display: none; }
figcaption { color: QUIET; font-size: 13.5px; }
figure + table { margin-top: 10px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 24px 32px; }
.pair h2 { font-size: 15px; }
@media screen and (max-width: 720px) {
  body { padding: 16px; }
  .pair { grid-template-columns: 1fr; }
  .narrow { display: block; }
  figure:not(.scrolls) .wide { display: none; }
  .scrolls .wide { overflow-x: auto; }
  .scrolls svg { min-width: 760px; }
  tbody th { width: auto; min-width: 6em; }
  td.number, th.number { width: auto; overflow-wrap: normal; font-size: 12.5px; }
}
@page { size: A4; margin: 14mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  h1 { font-size: 17pt; }
  h2 { font-size: 12pt; break-after: avoid; }
  .pair h2 { font-size: 10pt; }
  .card b { font-size: 15pt; }
  .card { padding: 8px 10px; flex: 1 1 120px; }
  .card span, .quiet, figcaption { font-size: 9pt; }
  table { font-size: 9pt; }
  td, th { padding: 2px 12px 2px 0; }
  section { margin-top: 18px; }
  section, figure, .card, tr { break-inside: avoid; }
}
""".replace("GROUND", GROUND)
    .replace("INK", INK)
    .replace("QUIET", QUIET)
    .replace("FAINT", FAINT)
)
