"""`hetero train`; and how a run of it, or of `hetero finetune`, is shown and kept."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hetero.cli.observers import make_observer
from hetero.cli.outcome import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    print_error,
)
from hetero.job.checkpoints import run_folder_to_resume
from hetero.job.loop import PICTURED_STEPS, Observer, train
from hetero.job.options import TrainOptions
from hetero.job.ranks import Ranks, joined_ranks
from hetero.job.result import TrainResult
from hetero.job.run_folder import RunFolder
from hetero.reporting import charts, page
from hetero.reporting.drawing import check_picture
from hetero.reporting.palette import TIER_PLACES
from hetero.reporting.timeline_chart import draw_timeline, trace_path
from hetero.text_table import columns, terminal_width
from offload.memory.sizes import format_bytes

_EXITS = {"interrupted": EXIT_INTERRUPTED, "terminated": EXIT_TERMINATED}


def run(arguments: argparse.Namespace) -> int:
    """Trains, and prints a report."""
    options = TrainOptions.from_namespace(arguments)
    return run_training("train", options, partial(train, options))


def run_training(
    command: str,
    options: TrainOptions,
    train: Callable[[RunFolder, Observer, Ranks], TrainResult],
    backend: str = "gloo",
) -> int:
    """Trains, prints a report, and returns the exit code.

    `train` is called on all ranks, which torch.distributed connects over `backend`.
    """
    # Under --json nothing else may reach stdout, whatever a library prints.
    with (
        contextlib.redirect_stdout(sys.stderr),
        joined_ranks(backend) as ranks,
        RunFolder(run_folder_to_resume(options), ranks, options.resume is not None) as folder,
    ):
        picture = None if options.timeline is None else Path(options.timeline)
        if picture is not None:  # here, because the run folder may be the picture's
            trace = trace_path(picture)
            ranks.from_first(lambda: check_picture("--timeline", picture, trace))
        result = train(folder, make_observer(options.log_every, ranks, options.live), ranks)
        if picture is not None and result.timeline is not None:
            result.timeline_paths = [str(picture), str(trace)]
        summary = result.as_dict()
        if result.every_step and ranks.leads:
            folder.write_json("config.json", options.as_dict())
            folder.write_json("summary.json", summary)
            charts.draw_picture(result, folder.path / "figure.png")
            page.write_page(result, folder.path / "report.html")
            if picture is not None and result.timeline is not None:
                last = result.every_step[-1].last
                steps = f"steps {max(1, last - PICTURED_STEPS + 1)} to {last}"
                title = f"{result.facts.title}, policy {result.facts.policy}, {steps}"
                draw_timeline(result.timeline, picture, title)
    if result.failure is not None:
        print_error(command, result.failure)
        return EXIT_FAILED
    if not ranks.leads:
        pass  # rank 0 speaks for all
    elif options.json:
        print(json.dumps(summary))
    elif result.every_step:
        lines = columns(rows(result), terminal_width())
        print("\n".join([f"hetero {command}", *lines]))
    return _EXITS.get(result.status, EXIT_OK)


def rows(result: TrainResult) -> list[tuple[str, str]]:
    """Label and value of every line of the table, in order. The result has at least one step."""
    facts, per_step, total = result.facts, result.bytes_per_step, result.total_bytes

    def moved(*links: str) -> str:
        return f"{', '.join(format_bytes(per_step[link]) for link in links)} per step"

    trained = facts.params if facts.trained_params is None else facts.trained_params
    params = f"{facts.params:,} parameters"
    if trained != facts.params:
        params += f", {trained:,} trained"
    ended = "" if result.status == "finished" else f", {result.status}"
    limit = facts.process_bytes
    of_limit = "" if limit is None else f", of process_memory {format_bytes(limit)}"
    plain = f"{facts.plain_bytes / facts.params:.3g} bytes per parameter"
    table = [
        ("model", f"{facts.title}, {params}"),
        ("plain PyTorch's model state", f"{format_bytes(facts.plain_bytes)} ({plain})"),
        ("policy, compute", f"{facts.policy}, {facts.dtype}, {facts.isa}"),
    ]
    if facts.ranks > 1:
        table.append(("ranks", f"{facts.ranks}; bytes below are of rank 0"))
    for tier in result.used_tiers:
        peak = f"at most {format_bytes(result.peak_bytes[tier])}, {result.limit_words(tier)}"
        table.append((f"model state {TIER_PLACES[tier]}", peak))
    table += [
        ("whole process (RSS)", f"at most {format_bytes(result.peak_rss_bytes)}{of_limit}"),
        ("steps", f"{len(result.every_step)} of {facts.steps}{ended}"),
        *_step_rows(result),
        ("speed", f"{result.tokens_per_s or 0:.0f} tokens/s"),
    ]
    if facts.ranks > 1:
        rss = result.rss_by_rank_bytes
        table += [
            ("sent, received", moved("sent", "received")),
            ("waited for gathers", f"{result.mean('gather_wait_s'):.3f} s per step"),
            (
                "peak RSS of all ranks",
                f"{format_bytes(sum(rss))}, at most {format_bytes(max(rss))} each",
            ),
        ]
    if per_step["h2d"] or per_step["d2h"]:
        table.append(("to the device, back", moved("h2d", "d2h")))
    if facts.engine is not None:
        for verb, link in (("read", "disk_read"), ("written", "disk_write")):
            in_all = f"{format_bytes(total[link])} in all by {facts.engine}"
            table.append((f"NVMe {verb}", f"{moved(link)}, {in_all}"))
    table.append(("loss", result.loss_words))
    if result.eval_losses:
        step, best = min(result.eval_losses, key=lambda each: each[1])
        last = f"{result.eval_losses[-1][1]:.3f} at last"
        table.append(("evaluation loss", f"{best:.3f} at best, after step {step}, {last}"))
    table += [
        ("run folder", facts.run_dir),
        ("report", f"{facts.run_dir}/report.html, for a browser"),
    ]
    left = {"checkpoint": result.checkpoint, "trained model": result.model_folder}
    left["timeline"] = ", ".join(result.timeline_paths)
    return table + [(label, path) for label, path in left.items() if path]


def _step_rows(result: TrainResult) -> list[tuple[str, str]]:
    """The seconds of a step, where the state was, and what was predicted for that."""
    split = ", ".join(f"{name} {seconds:.3f}" for name, seconds in result.part_s.items())
    table = [("step time, median", f"{result.step_s:.3f} s: {split}")]
    update_s, waited_s = result.mean("update_s"), result.mean("update_wait_s")
    words = f"{update_s:.3f} s per step, {waited_s:.3f} of them waited for: overlap saved"
    table.append(("updates", f"{words} {max(0.0, update_s - waited_s):.3f} s per step"))
    if result.placement is not None:
        changes = [why for _, why in result.changes]
        known = {*result.facts.notes, *changes}
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
