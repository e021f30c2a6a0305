"""The page of a run: one HTML file without scripts, and without anything from elsewhere."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from hetero.reporting.charts import draw_run
from hetero.reporting.drawing import as_svg, styled
from hetero.reporting.palette import FAINT, GROUND, INK, QUIET
from hetero.reporting.run_record import TIER_PLACES, RunRecord, rows
from hetero.reporting.timeline_chart import hidden_finding, make_figure
from offload.memory.sizes import format_bytes
from offload.timeline import Timeline

_WIDTH, _LANE_HEIGHT = 9.0, 0.42  # inches of a timeline, and of a row of it


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
        parts = "\n".join(_body(record))
    title = html.escape(record.facts.title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} - hetero report</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n{parts}\n</body>\n</html>\n"
    )


def _body(record: RunRecord) -> Iterator[str]:
    title, summary = html.escape(record.facts.title), html.escape(_summary(record))
    yield f"<header>\n<h1>{title}</h1>\n<p>{summary}</p>\n</header>"
    escaped = [(html.escape(label), html.escape(value)) for label, value in rows(record)]
    lines = "".join(f'<tr><th scope="row">{label}</th><td>{v}</td></tr>' for label, v in escaped)
    yield f'<table id="facts"><tbody>{lines}</tbody></table>'
    yield _section(
        "run",
        _memory_finding(record),
        draw_run(record),
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
            make_figure(record.timeline, _WIDTH, _LANE_HEIGHT),
            f"{_recorded(record.timeline)}. A bar is a time in which the resource was busy;"
            " bars below one another were busy at the same time. Figures at the right are the share"
            " of the time, and the bytes that were moved.",
        )
    yield (
        '<p class="quiet">Written by hetero. GiB, MiB and KiB are powers of 1024; GB is'
        " 10<sup>9</sup> bytes.</p>"
    )


def _summary(record: RunRecord) -> str:
    """The page in one sentence."""
    facts = record.facts
    held = ", ".join(
        f"{format_bytes(record.peak_bytes[tier])} {TIER_PLACES[tier]}" for tier in record.used_tiers
    )
    rate, unit = record.speed
    return (
        f"Model state took at most {held}; plain PyTorch would hold"
        f" {format_bytes(facts.plain_bytes)} of it {TIER_PLACES[facts.plain_tier]}."
        f" {rate} {unit} per second."
    )


def _memory_finding(record: RunRecord) -> str:
    """The verdict on budgets."""
    limited = [tier for tier in record.used_tiers if record.largest_budget(tier) is not None]
    if not limited:
        return "Memory: no budget was given"
    if record.passed_budgets:
        return "Memory passed a budget"
    return f"Memory stayed within its budget{'s' if len(limited) > 1 else ''}"


def _section(name: str, finding: str, figure: Figure, caption: str) -> str:
    """A chart, which is moved sideways where the page is narrow."""
    return (
        f'<section id="{name}">\n<h2>{html.escape(finding)}</h2>\n'
        f'<figure><div class="wide">{as_svg(figure, f"{name}-chart", finding)}</div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>\n</section>"
    )


def _recorded(timeline: Timeline) -> str:
    steps = sum(i.name == "optimizer" for i in timeline.of("compute"))
    count = f"{steps} step{'s' if steps != 1 else ''}" if steps else "A part of a step"
    text = f"{count} in a row, {timeline.seconds:.3g} s"
    if timeline.dropped:
        text += f" ({timeline.dropped:,} intervals found no room)"
    return text


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
h2 { font-size: 18px; line-height: 1.35; margin: 0 0 4px; break-after: avoid; }
.quiet, figcaption { color: QUIET; font-size: 13.5px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { padding: 5px 12px 5px 0; border-bottom: 1px solid FAINT; vertical-align: top;
  text-align: left; }
td { overflow-wrap: anywhere; }
th { width: 15em; font-weight: 600; }
section { margin-top: 34px; }
figure { margin: 6px 0 0; }
figure svg { display: block; width: 100%; height: auto; }
@media screen and (max-width: 720px) {
  body { padding: 16px; }
  .wide { overflow-x: auto; }
  .wide svg { min-width: 760px; }
  th { width: auto; }
}
@page { size: A4; margin: 14mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .quiet, figcaption, table { font-size: 9pt; }
  td, th { padding: 2px 12px 2px 0; }
  figure, tr { break-inside: avoid; }
}
""".replace("GROUND", GROUND)
    .replace("INK", INK)
    .replace("QUIET", QUIET)
    .replace("FAINT", FAINT)
)
