"""Disk traffic of a step against the budget for buffers: measured, and the line of the theory.

A step moves each optimizer state that no buffer keeps twice, so traffic falls by two bytes for each
byte of budget, in a straight line to nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.pictures import Chart, Points, draw
from bench.work.step_model import HeteroStep, curve_chunk_numel, make_plan

POINTS = 8
FEWEST_BUFFERS = 4


def measure_curve(
    numel: int, directory: str, chunk_numel: int | None, steps: int
) -> list[dict[str, Any]]:
    """One point per budget, from a few buffers to one for each optimizer state; all with the same
    chunks."""
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
    from hetero.reporting.palette import INK, QUIET

    budgets = [point["host_memory"] / 1e9 for point in points]
    theory = [point["theory_bytes"] / 1e9 for point in points]
    moved = [(point["read_bytes"] + point["written_bytes"]) / 1e9 for point in points]
    dots = {"marker": "o", "linestyle": "", "markersize": 7, "clip_on": False, "color": INK}
    chart = Chart(
        f"Disk traffic of an optimizer step, {params / 1e6:.0f}M parameters",
        "RAM for optimizer state (GB)",
        "read and written per step (GB)",
        (
            Points("theory: state in no buffer, moved twice", budgets, theory, {"color": QUIET}),
            Points("measured: read + written", budgets, moved, dots),
        ),
        key=False,
        change=lambda axes: (axes.set_xlim(left=0), axes.legend()),
    )
    draw(Path(path), (7.0, 4.2), {"curve": chart}, [["curve"]])
