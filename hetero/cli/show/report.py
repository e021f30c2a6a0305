"""The table at the end of a run."""

from __future__ import annotations

import statistics

from hetero.cli.job.metrics import TIERS
from hetero.cli.job.result import Setting, TrainResult
from hetero.text_table import columns, terminal_width
from offload.memory.sizes import format_bytes


def rows(result: TrainResult) -> list[tuple[str, str]]:
    """Label and value of every line of the table, in order. The result has at least one step."""
    setting = result.setting
    per_step, total = result.bytes_per_step, result.total_bytes
    losses = [step.loss for step in result.steps]
    made = f"{len(result.steps)} of {setting.steps}"
    table = [
        ("model", f"{setting.model}, {_parameters(setting)}"),
        ("model state, usual", f"{format_bytes(setting.state_bytes)} ({_bytes_each(setting)})"),
        ("policy, compute", f"{setting.policy}, {setting.dtype}, {setting.isa}"),
    ]
    if setting.ranks > 1:
        table.append(("ranks", f"{setting.ranks}; bytes below are of rank 0"))
    for tier in TIERS:
        budget, peak = setting.budget_bytes[tier], result.peak_managed_bytes[tier]
        if budget is not None or peak:
            limit = "no budget" if budget is None else f"budget {format_bytes(budget)}"
            largest = result.largest_budget_bytes.get(tier)
            if budget is not None and largest is not None and largest != budget:
                limit += f", at most {format_bytes(largest)}"
            table.append((f"managed peak, {tier}", f"{format_bytes(peak)}, {limit}"))
    table += [
        ("peak RSS of the process", format_bytes(result.peak_rss_bytes)),
        ("steps", made + ("" if result.status == "finished" else f", {result.status}")),
        *_step_rows(result),
        ("speed", f"{result.tokens_per_s:.0f} tokens/s"),
    ]

    def pair(links: tuple[str, str]) -> str:
        return f"{', '.join(format_bytes(per_step[link]) for link in links)} per step"

    if setting.ranks > 1:
        rss = result.peak_rss_by_rank_bytes
        all_rss = f"{format_bytes(sum(rss))}, at most {format_bytes(max(rss))} each"
        table += [
            ("sent, received", pair(("sent", "received"))),
            ("waited for gathers", f"{result.per_step('gather_wait_s'):.3f} s per step"),
            ("peak RSS of all ranks", all_rss),
        ]
    if per_step["h2d"] or per_step["d2h"]:
        table.append(("to the device, back", pair(("h2d", "d2h"))))
    if setting.engine is not None:
        for verb, link in (("read", "disk_read"), ("written", "disk_write")):
            moved = f"{format_bytes(per_step[link])} per step, {format_bytes(total[link])} in all"
            table.append((f"NVMe {verb}", f"{moved} by {setting.engine}"))
    table += [
        ("loss", f"{losses[0]:.3f} at first, {losses[-1]:.3f} at last"),
        ("run folder", setting.run_dir),
        ("report", f"{setting.run_dir}/report.html, for a browser"),
    ]
    if result.checkpoint is not None:
        table.append(("checkpoint", result.checkpoint))
    if result.model_folder is not None:
        table.append(("trained model", result.model_folder))
    if result.timeline_paths:
        table.append(("timeline", ", ".join(result.timeline_paths)))
    return table


def _parameters(setting: Setting) -> str:
    trained = setting.trained_params
    every = trained is None or trained == setting.params
    return f"{setting.params:,} parameters" + ("" if every else f", {trained:,} trained")


def _bytes_each(setting: Setting) -> str:
    every = setting.trained_params in (None, setting.params)
    return f"16 bytes per {'' if every else 'trained '}parameter" + (
        "" if every else ", 2 per other"
    )


def _step_rows(result: TrainResult) -> list[tuple[str, str]]:
    """The seconds of a step, where the state was, and what was predicted for that."""
    parts = {
        part: statistics.median(getattr(step, f"{part}_s") for step in result.steady_steps)
        for part in ("step", "forward", "backward", "optimizer")
    }
    step_s = parts.pop("step")
    split = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
    table = [("step time, median", f"{step_s:.3f} s: {split}")]
    update_s, waited_s = result.per_step("update_s"), result.per_step("update_wait_s")
    saved_s = max(0.0, update_s - waited_s)
    words = f"{update_s:.3f} s per step, {waited_s:.3f} of them waited for"
    table.append(("updates", f"{words}: overlap saved {saved_s:.3f} s per step"))
    if result.placement is not None:
        changes = [why for _, why in result.changes]
        known = {*result.setting.notes, *changes}
        table += [
            ("placement", result.placement),
            *(("placed again", why) for why in changes),
            *(("note", note) for note in result.notes if note not in known),
        ]
    predicted, ratio = result.predicted, result.measured_over_predicted
    if predicted is not None and ratio is not None:
        split = "; ".join(f"{name} {s:.3f}" for name, s in predicted["phases_s"].items())
        words = f"{predicted['step_s']:.3f} s: {split}; bound by {predicted['bound']}; measured is"
        table.append(("predicted", f"{words} {ratio:.2f} times as much"))
    return table


def print_report(result: TrainResult, command: str) -> None:
    """Prints the table of a run of the command on stdout."""
    print("\n".join([f"hetero {command}", *columns(rows(result), terminal_width())]))
