"""The table at the end of a run."""

from __future__ import annotations

import statistics
import sys

from rich.console import Console
from rich.table import Table

from hetero.cli.job.metrics import TIERS
from hetero.cli.job.result import TrainResult
from offload.memory.sizes import format_bytes


def rows(result: TrainResult) -> list[tuple[str, str]]:
    """Label and value of every line of the table, in order. The result has at least one step."""
    setting = result.setting
    steady = result.steady_steps
    step_s = statistics.median(step.step_s for step in steady)
    parts = {
        "forward": statistics.median(step.forward_s for step in steady),
        "backward": statistics.median(step.backward_s for step in steady),
        "optimizer": statistics.median(step.optimizer_s for step in steady),
    }
    split = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
    per_step, total = result.bytes_per_step, result.total_bytes
    losses = [step.loss for step in result.steps]
    made = f"{len(result.steps)} of {setting.steps}"
    table = [
        ("model", f"{setting.model}, {setting.params:,} parameters"),
        (
            "model state, usual",
            f"{format_bytes(setting.state_bytes)} (16 bytes per parameter)",
        ),
        ("policy, compute", f"{setting.policy}, {setting.dtype}, {setting.isa}"),
    ]
    if setting.ranks > 1:
        table.append(("ranks", f"{setting.ranks}; bytes below are of rank 0"))
    for tier in TIERS:
        budget, peak = setting.budget_bytes[tier], result.peak_managed_bytes[tier]
        if budget is None and peak == 0:
            continue
        limit = "no budget" if budget is None else f"budget {format_bytes(budget)}"
        table.append((f"managed peak, {tier}", f"{format_bytes(peak)}, {limit}"))
    table += [
        ("peak RSS of the process", format_bytes(result.peak_rss_bytes)),
        ("steps", made + ("" if result.status == "finished" else f", {result.status}")),
        ("step time, median", f"{step_s:.3f} s: {split}"),
        *_placed(result),
        *_predicted(result),
        ("speed", f"{result.tokens_per_s:.0f} tokens/s"),
    ]
    if setting.ranks > 1:
        sent, received = (format_bytes(per_step[link]) for link in ("sent", "received"))
        table += [
            ("sent, received", f"{sent}, {received} per step"),
            ("waited for gathers", f"{result.gather_wait_s_per_step:.3f} s per step"),
            (
                "peak RSS of all ranks",
                f"{format_bytes(sum(result.peak_rss_by_rank_bytes))},"
                f" at most {format_bytes(max(result.peak_rss_by_rank_bytes))} each",
            ),
        ]
    if per_step["h2d"] or per_step["d2h"]:
        h2d, d2h = (format_bytes(per_step[link]) for link in ("h2d", "d2h"))
        table.append(("to the device, back", f"{h2d}, {d2h} per step"))
    if setting.engine is not None:
        for verb, link in (("read", "disk_read"), ("written", "disk_write")):
            table.append(
                (
                    f"NVMe {verb}",
                    f"{format_bytes(per_step[link])} per step,"
                    f" {format_bytes(total[link])} in all by {setting.engine}",
                )
            )
    table += [
        ("loss", f"{losses[0]:.3f} at first, {losses[-1]:.3f} at last"),
        ("run folder", setting.run_dir),
    ]
    if result.timeline_paths:
        table.append(("timeline", ", ".join(result.timeline_paths)))
    return table


def _placed(result: TrainResult) -> list[tuple[str, str]]:
    """Where the state was at the end, what moved on the way, and what else came to be known."""
    if result.placed is None:
        return []
    changes = [why for _, why in result.placed.changes]
    known = {*result.setting.notes, *changes}
    return [
        ("placement", result.placed.placement),
        *(("placed again", why) for why in changes),
        *(("note", note) for note in result.placed.notes if note not in known),
    ]


def _predicted(result: TrainResult) -> list[tuple[str, str]]:
    """What a step is predicted to take, and how far that is off."""
    predicted, ratio = result.predicted, result.measured_over_predicted
    if predicted is None or ratio is None:
        return []
    split = "; ".join(f"{name} {seconds:.3f}" for name, seconds in predicted["phases_s"].items())
    return [
        (
            "predicted",
            f"{predicted['step_s']:.3f} s: {split}; bound by {predicted['bound']}; measured is"
            f" {ratio:.2f} times as much",
        )
    ]


def print_report(result: TrainResult) -> None:
    """Prints the table on stdout."""
    table = Table(title="hetero train", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows(result):
        table.add_row(label, value)
    # Where there is no terminal rich would squeeze the table into 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table, highlight=False, markup=False)
