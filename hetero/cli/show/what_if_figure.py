"""The picture of `hetero plan --what-if`: the step's seconds against each budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from hetero.cli.show.what_if import NVME_RATE, Case
from hetero.reporting.drawing import new_figure, save, styled
from hetero.reporting.palette import INK, QUIET, SERIES_COLOURS

_PANEL_WIDTH, _HEIGHT = 4.2, 3.4  # inches
_GIB = float(1 << 30)


def draw_what_if(cases: Sequence[Case], path: Path, title: str) -> None:
    """Writes the picture, in the format of the path's suffix. Raises OSError."""
    kinds = list(dict.fromkeys(case.of for case in cases))
    bounds = list(dict.fromkeys(case.step.bound for case in cases if case.step is not None))
    colour_of = {
        bound: SERIES_COLOURS[number % len(SERIES_COLOURS)] for number, bound in enumerate(bounds)
    }
    with styled():
        figure = new_figure(_PANEL_WIDTH * len(kinds), _HEIGHT)
        figure.suptitle(f"{title}: one change at a time", fontweight="bold")
        panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for axes, kind in zip(panels, kinds, strict=True):
            _draw_panel(axes, kind, [case for case in cases if case.of == kind], colour_of)
        panels[0].set_ylabel("expected step time (s)")
        handles = [
            panels[0].plot([], [], "o", color=colour, label=f"bound by {bound}")[0]
            for bound, colour in colour_of.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        save(figure, path)


def _draw_panel(axes: Axes, kind: str, cases: Sequence[Case], colour_of: dict[str, str]) -> None:
    known = [(case, case.step) for case in cases if case.step is not None]
    values = [case.value / _GIB for case, _ in known]
    seconds = [step.seconds for _, step in known]
    axes.plot(values, seconds, color=QUIET, linewidth=1.2, zorder=1)
    colours = [colour_of[step.bound] for _, step in known]
    axes.scatter(values, seconds, c=colours, s=36, zorder=2, clip_on=False)
    for case, step in known:
        if case.is_given:
            axes.axvline(case.value / _GIB, color=INK, linestyle="--", linewidth=1.2, zorder=0)
            words = f"given: {case.words}\n{step.seconds:.3g} s"
            # On the side on which there is room.
            right = case.value / _GIB < sum((min(values), max(values))) / 2
            axes.annotate(
                words,
                (case.value / _GIB, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(5 if right else -5, -4),
                textcoords="offset points",
                ha="left" if right else "right",
                va="top",
            )
    axes.set_xlim(0, 1.05 * max(values))
    axes.set_ylim(0, 1.35 * max(seconds))
    axes.set_title("NVMe that is slower or faster" if kind == NVME_RATE else f"budget of {kind}")
    axes.set_xlabel("read bandwidth (GiB/s)" if kind == NVME_RATE else f"{kind} (GiB)")
    axes.grid(axis="y")
