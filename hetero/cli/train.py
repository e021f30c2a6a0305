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
from hetero.reporting import charts, page, table
from hetero.reporting.drawing import check_picture
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
    facts = result.facts
    lines = table.rows(result)
    if facts.ranks > 1:
        rss = result.rss_by_rank_bytes
        words = f"{format_bytes(sum(rss))}, at most {format_bytes(max(rss))} each"
        lines.append(("peak RSS of all ranks", words))
    if result.eval_losses:
        step, best = min(result.eval_losses, key=lambda each: each[1])
        last = f"{result.eval_losses[-1][1]:.3f} at last"
        lines.append(("evaluation loss", f"{best:.3f} at best, after step {step}, {last}"))
    left = {
        "report": f"{facts.run_dir}/report.html, for a browser",
        "checkpoint": result.checkpoint,
        "trained weights": result.model_folder,
        "timeline": ", ".join(result.timeline_paths),
    }
    return lines + [(label, path) for label, path in left.items() if path]
