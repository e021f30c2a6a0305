"""The pictures of docs/scaling.md, from the figures of `python -m bench.scaling`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people who see fewer colours can tell apart.
_ALL, _HYBRID, _LEVELS, _GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
_OF_RANKS = ("#56B4E9", "#0072B2", "#000000", "#CC79A7")


def draw_steps(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Seconds of a step by ranks, a panel per model, and what latency is of a collective."""
    models = list(dict.fromkeys(row["model"] for row in result["steps"]))
    rows_of_panels = -(-(len(models) + 1) // 2)
    figure = _figure(10.0, 3.9 * rows_of_panels)
    panels = figure.subplots(rows_of_panels, 2, squeeze=False).flatten()
    for unused in panels[len(models) : -1]:
        unused.set_visible(False)
    for axes, model in zip(panels, models, strict=False):
        rows = [r for r in result["steps"] if r["model"] == model and r["status"] == "planned"]
        _draw_model(axes, model, rows)
        axes.set_ylabel("seconds of a step")
    panels[0].legend(fontsize=8, frameon=False, loc="upper left")
    _draw_latency(panels[-1], result["collectives"])
    figure.savefig(path, dpi=100)


def draw_stragglers(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """The step beside the undisturbed one, by kind of disturbance."""
    figure = _figure(11.0, 3.8)
    panels = figure.subplots(1, 3)
    about = (
        ("slower", "one rank is slower", "slower by, %", "step longer by, %"),
        ("jitter", "jitter of all ranks", "standard deviation of a use, %", "step longer by, %"),
        ("stall_s", "one rank stands still once", "for seconds", "step longer by, seconds"),
    )
    for axes, (kind, title, below, beside) in zip(panels, about, strict=True):
        rows = [row for row in result["stragglers"] if row["kind"] == kind]
        colours = _colours(rows)
        for row in rows:
            first, scale = row["seconds"][0], 1.0 if kind == "stall_s" else 100.0
            whole = 1.0 if kind == "stall_s" else first
            axes.plot(
                [amount * scale for amount in row["amounts"]],
                [(seconds - first) / whole * scale for seconds in row["seconds"]],
                marker="o",
                markersize=4,
                color=colours[row["ranks"]],
                linestyle="--" if row["hybrid"] else "-",
                label=f"{row['ranks']} ranks{', hybrid' if row['hybrid'] else ''}",
            )
        _finish(axes, title, below)
        axes.set_ylabel(beside)
    panels[0].legend(fontsize=8, frameon=False, loc="upper left")
    if result["stragglers"]:
        figure.suptitle(result["stragglers"][0]["model"], x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=100)


def _draw_model(axes: Axes, model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    ranks = sorted({row["ranks"] for row in rows})
    compute = [next(r["computing_s"] for r in rows if r["ranks"] == n) for n in ranks]
    axes.plot(ranks, compute, color=_GREY, linestyle="--", label="compute alone")
    for hybrid, colour, name in ((False, _ALL, "all ranks share"), (True, _HYBRID, "hybrid")):
        mine = [row for row in rows if row["hybrid"] is hybrid]
        at = [row["ranks"] for row in mine]
        axes.plot(at, [r["predicted_s"] for r in mine], color=colour, label=f"{name}, predicted")
        axes.plot(
            at,
            [row["simulated_s"] for row in mine],
            color=colour,
            linestyle="none",
            marker="o",
            label=f"{name}, simulated",
        )
        if not hybrid:
            axes.plot(
                at,
                [row["two_level_s"] for row in mine],
                color=_LEVELS,
                linestyle=":",
                marker="s",
                markersize=4,
                label="all share, means in two levels",
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.minorticks_off()
    _finish(axes, model, "ranks")
    # Room for the legend above the lines.
    axes.set_ylim(0, 1.35 * max(row["predicted_s"] for row in rows))


def _draw_latency(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    colours = _colours(rows)
    for row in rows:
        axes.plot(
            [nbytes / (1 << 20) for nbytes in row["bytes"]],
            [share * 100 for share in row["latency_share"]],
            color=colours[row["ranks"]],
            linestyle="-" if row["name"] == "all-gather" else ":",
            label=f"{row['name']}, {row['ranks']} ranks",
        )
    axes.set_xscale("log", base=2)
    marks = [1, 4, 16, 64, 256, 1024, 4096]
    axes.set_xticks(marks, [str(mark) for mark in marks])
    _finish(axes, "latency, % of a collective", "MiB of the chunk")
    axes.set_ylim(0, 100)
    axes.legend(fontsize=8, frameon=False, loc="upper right")


def _colours(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    counts = sorted({row["ranks"] for row in rows})
    return {count: _OF_RANKS[place % len(_OF_RANKS)] for place, count in enumerate(counts)}


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finish(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(below)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
