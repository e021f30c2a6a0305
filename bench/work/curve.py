"""Disk traffic of a step against the budget for buffers: measured, and the line of the theory.

A step moves each optimizer state that no buffer keeps twice, so traffic falls by two bytes for each
byte of budget, in a straight line to nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.work.step_model import HeteroStep, curve_chunk_numel, make_plan

POINTS = 8
FEWEST_BUFFERS = 4


def measure_curve(
    numel: int, directory: str, chunk_numel: int | None, steps: int
) -> list[dict[str, Any]]:
    """One point per budget, from a few buffers to one for each optimizer state; all with the same
    chunks.
    """
    chunk_numel = chunk_numel or curve_chunk_numel(numel)
    points = []
    # With a budget beyond any need the plan says how many optimizer states there are, and how
    # large.
    whole = make_plan(numel, 16 * numel + (1 << 30), directory, chunk_numel)
    for buffers in buffer_counts(whole.optim_states):
        budget = buffers * whole.optim_state_bytes
        plan = make_plan(numel, budget, directory, chunk_numel)
        with HeteroStep(numel, plan) as step:
            step.sample(1)  # fills the buffers
            sample = step.sample(steps)
        points.append(
            {"host_memory": budget, "buffers": plan.buffers, "theory_bytes": plan.streamed_bytes}
            | {key: sample[key] for key in ("read_bytes", "written_bytes", "step_s")}
        )
        print(f"curve  {buffers}/{whole.optim_states} buffers", file=sys.stderr, flush=True)
    return points


def buffer_counts(optim_states: int) -> list[int]:
    """About POINTS counts, evenly from FEWEST_BUFFERS to one for each optimizer state."""
    least = min(FEWEST_BUFFERS, optim_states)
    return sorted({least + (optim_states - least) * i // (POINTS - 1) for i in range(POINTS)})


def draw_curve(points: Sequence[Mapping[str, Any]], params: int, path: str) -> None:
    """Writes the picture to `path`, in the format of its suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    budgets = [point["host_memory"] / 1e9 for point in points]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        budgets,
        [point["theory_bytes"] / 1e9 for point in points],
        color="0.55",
        linewidth=1.5,
        label="theory: what no buffer keeps, read and written once",
    )
    for key, label, marker, color in (
        ("moved", "measured: read + written", "o", "#1f5fa8"),
        ("read_bytes", "measured: read", "^", "#2f8f5b"),
        ("written_bytes", "measured: written", "x", "#c0502a"),
    ):
        values = [
            (p["read_bytes"] + p["written_bytes"] if key == "moved" else p[key]) / 1e9
            for p in points
        ]
        axes.plot(budgets, values, marker, color=color, markersize=7, label=label)
    axes.set_title(f"Disk traffic of one optimizer step, {params / 1e6:.0f}M parameters")
    axes.set_xlabel("RAM for optimizer states (GB)")
    axes.set_ylabel("disk traffic per step (GB)")
    axes.margins(x=0.04, y=0.08)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
