"""The pictures of docs/scaling.md, from the figures of `python -m bench.scaling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from hetero.reporting.drawing import new_figure, save, styled
from hetero.reporting.palette import INK, QUIET, SERIES_COLOURS

_BARS = (
    ("simulated_s", False, "all ranks share"),
    ("two_level_s", False, "all share, means in two levels"),
    ("simulated_s", True, "hybrid"),
)
_WIDTH = 0.26  # of a bar; three stand at each count of ranks


def draw_steps(result: Mapping[str, Any], path: Path) -> None:
    """The step over its compute by ranks, a panel per model, and latency's part of a collective."""
    models = list(dict.fromkeys(row["model"] for row in result["steps"]))
    with styled():
        figure = new_figure(10.0, 6.8)
        above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
        panels = above.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for axes, model in zip(panels, models, strict=True):
            rows = [r for r in result["steps"] if r["model"] == model and r["status"] == "planned"]
            _draw_model(axes, model, rows)
        panels[0].set_ylabel("step time / compute alone")
        handles, labels = panels[0].get_legend_handles_labels()
        above.legend(handles, labels, loc="outside upper left", ncols=len(handles))
        _draw_latency(below.add_subplot(), result["collectives"])
        save(figure, path)


def draw_stragglers(result: Mapping[str, Any], path: Path) -> None:
    """The step compared with the undisturbed one, by kind of disturbance."""
    about = (
        ("slower", "One rank is slower", "slower by (%)", "step longer by (%)"),
        ("jitter", "Jitter of all ranks", "standard deviation of a use (%)", "step longer by (%)"),
        ("stall_s", "One rank stands still once", "for (s)", "step longer by (s)"),
    )
    with styled():
        figure = new_figure(11.0, 4.1)
        panels = figure.subplots(1, 3)
        for axes, (kind, title, below, beside) in zip(panels, about, strict=True):
            rows = [row for row in result["stragglers"] if row["kind"] == kind]
            series = _series(rows)
            for row in rows:
                first, scale = row["seconds"][0], 1.0 if kind == "stall_s" else 100.0
                whole = 1.0 if kind == "stall_s" else first
                colour, marker = series[row["ranks"]]
                axes.plot(
                    [amount * scale for amount in row["amounts"]],
                    [(seconds - first) / whole * scale for seconds in row["seconds"]],
                    marker=marker,
                    markersize=5,
                    color=colour,
                    linestyle="--" if row["hybrid"] else "-",
                    label=f"{row['ranks']} ranks{', hybrid' if row['hybrid'] else ''}",
                )
            _finish(axes, title, below, beside)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=max(1, len(handles)))
        if result["stragglers"]:
            model = result["stragglers"][0]["model"]
            figure.suptitle(f"{model}, simulated", x=0.01, ha="left", fontweight="bold")
        save(figure, path)


def _draw_model(axes: Axes, model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bars of what was simulated; lines across them: predicted."""
    ranks = sorted({row["ranks"] for row in rows})
    predicted: tuple[list[float], list[float]] = [], []
    for number, (name, hybrid, words) in enumerate(_BARS):
        mine = [row for row in rows if row["hybrid"] is hybrid]
        at = [ranks.index(row["ranks"]) + (number - 1) * _WIDTH for row in mine]
        heights = [row[name] / row["computing_s"] for row in mine]
        axes.bar(at, heights, _WIDTH, color=SERIES_COLOURS[number], label=words)
        if name == "simulated_s":
            predicted[0].extend(at)
            predicted[1].extend(row["predicted_s"] / row["computing_s"] for row in mine)
    axes.plot(*predicted, "_", color=INK, markersize=16, markeredgewidth=2, label="predicted")
    axes.axhline(1, color=QUIET, linestyle=":", linewidth=1.3, label="compute alone")
    axes.set_xticks(range(len(ranks)), [str(count) for count in ranks])
    _finish(axes, model, "ranks")


def _draw_latency(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    series = _series(rows)
    for row in rows:
        colour, marker = series[row["ranks"]]
        axes.plot(
            [nbytes / (1 << 20) for nbytes in row["bytes"]],
            [share * 100 for share in row["latency_share"]],
            color=colour,
            marker=marker,
            markersize=4,
            linestyle="-" if row["name"] == "all-gather" else ":",
            label=f"{row['name']}, {row['ranks']} ranks",
        )
    axes.set_xscale("log", base=2)
    marks = [1, 4, 16, 64, 256, 1024, 4096]
    axes.set_xticks(marks, [str(mark) for mark in marks])
    _finish(axes, "Latency's part of a collective", "chunk size (MiB)", "latency (%)")
    axes.set_ylim(0, 100)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, str]]:
    """Colour and marker of each count of ranks."""
    counts = sorted({row["ranks"] for row in rows})
    looks = list(zip(SERIES_COLOURS, "os^Dv", strict=True))
    return {count: looks[place % len(looks)] for place, count in enumerate(counts)}


def _finish(axes: Axes, title: str, below: str, beside: str = "") -> None:
    axes.set_title(title)
    axes.set_xlabel(below)
    if beside:
        axes.set_ylabel(beside)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
