"""The table at the end of a run."""

from __future__ import annotations

from hetero.job.result import Setting, TrainResult
from hetero.reporting.palette import TIER_PLACES
from hetero.text_table import columns, terminal_width
from offload.memory.sizes import format_bytes


def rows(result: TrainResult) -> list[tuple[str, str]]:
    """Label and value of every line of the table, in order. The result has at least one step."""
    setting, record = result.setting, result.record
    assert record is not None
    per_step, total = result.bytes_per_step, result.total_bytes
    made = f"{len(result.steps)} of {setting.steps}"
    table = [
        ("model", f"{setting.title}, {_parameters(setting)}"),
        (
            "plain PyTorch's model state",
            f"{format_bytes(setting.plain_bytes)}"
            f" ({setting.plain_bytes / setting.params:.3g} bytes per parameter)",
        ),
        ("policy, compute", f"{setting.policy}, {setting.dtype}, {setting.isa}"),
    ]
    if setting.ranks > 1:
        table.append(("ranks", f"{setting.ranks}; bytes below are of rank 0"))
    for tier in record.used_tiers:
        peak = f"at most {format_bytes(record.peak_bytes[tier])}, {record.limit_words(tier)}"
        table.append((f"model state {TIER_PLACES[tier]}", peak))
    limit = record.facts.process_bytes
    table += [
        ("whole process (RSS)", f"at most {format_bytes(record.peak_rss_bytes)}{_of(limit)}"),
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
        ("loss", record.loss_words),
        *_eval_rows(result),
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


def _of(limit: int | None) -> str:
    return "" if limit is None else f", of process_memory {format_bytes(limit)}"


def _parameters(setting: Setting) -> str:
    trained = setting.trained_params
    every = trained is None or trained == setting.params
    return f"{setting.params:,} parameters" + ("" if every else f", {trained:,} trained")


def _eval_rows(result: TrainResult) -> list[tuple[str, str]]:
    if not result.eval_losses:
        return []
    best_step, best = min(result.eval_losses, key=lambda each: each[1])
    last = result.eval_losses[-1][1]
    return [("evaluation loss", f"{best:.3f} at best, after step {best_step}, {last:.3f} at last")]


def _step_rows(result: TrainResult) -> list[tuple[str, str]]:
    """The seconds of a step, where the state was, and what was predicted for that."""
    assert result.record is not None
    step_s, parts = result.record.step_s, result.record.part_s
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
