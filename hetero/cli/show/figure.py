"""The picture of a run: loss, memory per tier, and where the time of a step went."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hetero.cli.job.metrics import TIERS
from hetero.cli.job.result import TrainResult
from hetero.reporting.page import palette
from hetero.reporting.page.labels import label_right
from offload.memory.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIER_COLOURS = {tier.value: colour for tier, colour in palette.TIER_COLOURS.items()}
TIER_WORDS = {"device": "device", "host": "host RAM", "disk": "NVMe file"}
QUIET_COLOUR, LOSS_COLOUR = palette.QUIET_COLOUR, palette.LOSS_COLOUR
PART_COLOURS = palette.PART_COLOURS
GIB = float(1 << 30)


def draw_figure(result: TrainResult, path: Path) -> None:
    """Writes the picture as PNG. The result has at least one step."""
    figure = Figure(figsize=(11, 10.5), layout="constrained")
    FigureCanvasAgg(figure)
    setting = result.setting
    figure.suptitle(
        f"{setting.model}: {setting.params / 1e6:.0f}M parameters, policy {setting.policy},"
        f" {setting.dtype}, {result.tokens_per_s:.0f} tokens/s",
        fontsize=14,
        fontweight="bold",
    )
    loss, memory, time = figure.subplots(3, 1, height_ratios=[1, 1.25, 1])
    for axes in (loss, memory, time):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_loss(loss, result)
    _draw_memory(memory, result)
    _draw_time(time, result)
    figure.savefig(path, dpi=110)


def _draw_loss(axes: Axes, result: TrainResult) -> None:
    steps = [step.step for step in result.steps]
    losses = [step.loss for step in result.steps]
    chance = math.log(result.setting.vocab_size)
    axes.plot(steps, losses, color=LOSS_COLOUR, linewidth=2, marker="o", markersize=3)
    axes.axhline(chance, color=QUIET_COLOUR, linestyle=":", linewidth=1.4)
    axes.set_title("Loss", loc="left")
    axes.set_ylabel("loss (nats per token)")
    _step_axis(axes, steps)
    axes.set_ylim(0, 1.08 * max([chance, *losses]))
    label_right(
        axes,
        [
            (chance, f"guessing: ln({result.setting.vocab_size}) = {chance:.2f}", QUIET_COLOUR),
            (losses[-1], f"last step: {losses[-1]:.2f}", LOSS_COLOUR),
        ],
    )


def _draw_memory(axes: Axes, result: TrainResult) -> None:
    setting = result.setting
    times = [step.memory[-1].time_s for step in result.steps]
    # The highest sample of every step: what the machine must have.
    rss = [max(m.rss_bytes for m in step.memory) / GIB for step in result.steps]
    axes.plot(times, rss, color=QUIET_COLOUR, linewidth=1.5)
    usual = setting.state_bytes / GIB
    axes.axhline(usual, color=LOSS_COLOUR, linestyle=":", linewidth=1.8)
    labels = [
        (rss[-1], f"whole process (RSS): {format_bytes(rss[-1] * GIB)}", QUIET_COLOUR),
        (
            usual,
            f"usual model state,\n16 B/param: {format_bytes(setting.state_bytes)}",
            LOSS_COLOUR,
        ),
    ]
    if setting.process_bytes is not None:
        limit = setting.process_bytes / GIB
        axes.axhline(limit, color=QUIET_COLOUR, linestyle="-.", linewidth=1.8)
        words = f"process_memory: {format_bytes(setting.process_bytes)}"
        labels.append((limit, words, QUIET_COLOUR))
    for tier in TIERS:
        colour, word = TIER_COLOURS[tier], TIER_WORDS[tier]
        budgets = [step.memory[-1].budget_bytes[tier] for step in result.steps]
        budget = budgets[-1]
        held = [max(m.managed_bytes[tier] for m in step.memory) / GIB for step in result.steps]
        if not any(held):
            continue
        axes.plot(times, held, color=colour, linewidth=2.4)
        label = f"state in {word}: {format_bytes(held[-1] * GIB)}"
        # A budget far above all else would flatten what there is to see; its number is enough.
        if budget is not None and budget / GIB > 2 * max(usual, *rss, *held):
            label += f"\nof a budget of {format_bytes(budget)}"
        elif budget is not None:
            steps = [math.nan if each is None else each / GIB for each in budgets]
            axes.step(times, steps, where="post", color=colour, linestyle="--", linewidth=1.8)
            labels.append((budget / GIB, f"{word} budget: {format_bytes(budget)}", colour))
        labels.append((held[-1], label, colour))
    axes.set_title("Memory: model state by tier, and the whole process", loc="left")
    axes.set_ylabel("GiB")
    axes.set_xlabel("time since the first step (s)")
    axes.set_xlim(0, max(times))
    axes.set_ylim(0, 1.08 * max(value for value, _, _ in [*labels, (max(rss), "", "")]))
    label_right(axes, labels)


def _draw_time(axes: Axes, result: TrainResult) -> None:
    numbers = [step.step for step in result.steps]
    totals = [step.step_s for step in result.steps]
    typical_s = statistics.median(totals)
    base = [0.0] * len(numbers)
    labels = []
    for name, colour in PART_COLOURS.items():
        seconds = [getattr(step, f"{name}_s") for step in result.steps]
        axes.bar(numbers, seconds, bottom=base, width=1.0, color=colour)
        middle = statistics.median(b + s / 2 for b, s in zip(base, seconds, strict=True))
        median_s = statistics.median(seconds)
        words = f"{name}: {median_s:.2f} s, {median_s / typical_s:.0%}"
        labels.append((middle, words, colour))
        base = [b + s for b, s in zip(base, seconds, strict=True)]
    axes.set_title(f"Time of a step, median {typical_s:.2f} s", loc="left")
    axes.set_ylabel("seconds")
    _step_axis(axes, numbers)
    # One slow step, like the first, must not flatten all others.
    axes.set_ylim(0, 1.1 * min(max(totals), 3 * typical_s))
    label_right(axes, labels)


def _step_axis(axes: Axes, steps: list[int]) -> None:
    axes.set_xlabel("step")
    axes.set_xlim(0.5, max(steps) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
