"""The picture of a run: loss, memory per tier, and the time of a step, over the same steps."""

from __future__ import annotations

from pathlib import Path

from hetero.job.result import TrainResult
from hetero.reporting.drawing import FULL_WIDTH, key, new_figure, save, step_axis, styled
from hetero.reporting.page.memory_chart import draw_tier
from hetero.reporting.page.progress_charts import draw_loss, draw_step_time, step_time_finding


def draw_figure(result: TrainResult, path: Path) -> None:
    """Writes the picture as PNG. The result has at least one step."""
    record, setting = result.record, result.setting
    assert record is not None
    tiers = record.used_tiers
    with styled():
        figure = new_figure(FULL_WIDTH, 4.6 + 2.2 * len(tiers))
        figure.suptitle(
            f"{setting.title}: {setting.params / 1e6:.0f}M parameters, policy {setting.policy},"
            f" {setting.dtype}, {result.tokens_per_s:.0f} tokens/s",
            fontsize=12,
            fontweight="bold",
        )
        loss, *memory, time = figure.subplots(2 + len(tiers), 1, sharex=True)
        draw_loss(loss, record, " (nats per token)")
        loss.set_title(f"Loss: {record.loss_words}")
        key(loss, [(0, handle) for handle in loss.get_legend_handles_labels()[0]])
        for axes, tier in zip(memory, tiers, strict=True):
            draw_tier(axes, record, tier)
        key(time, list(enumerate(draw_step_time(time, record))))
        time.set_title(step_time_finding(record))
        for axes in (loss, *memory, time):
            axes.label_outer()
            axes.grid(axis="y")
        step_axis(time, *record.first_and_last)
        save(figure, path)
