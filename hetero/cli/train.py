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
    check_file,
    print_error,
)
from hetero.job.loop import train
from hetero.job.options import TrainOptions
from hetero.job.ranks import Ranks, joined_ranks
from hetero.job.resume import run_folder_to_resume
from hetero.job.run import Observer
from hetero.job.run_folder import SUMMARY_NAME, RunFolder
from hetero.reporting import charts, page, run_record
from hetero.reporting.run_record import RunRecord
from hetero.text_table import columns, terminal_width

_EXITS = {"interrupted": EXIT_INTERRUPTED, "terminated": EXIT_TERMINATED}


def run(arguments: argparse.Namespace) -> int:
    """Trains, and prints a report."""
    options = TrainOptions.from_namespace(arguments)
    return run_training("train", options, partial(train, options))


def run_training(
    command: str,
    options: TrainOptions,
    train: Callable[[RunFolder, Observer, Ranks], RunRecord],
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
        trace = None if options.timeline is None else Path(options.timeline)
        if trace is not None:  # here, because it may be in the run folder
            ranks.from_first(lambda: check_file(trace, "--timeline"))
        result = train(folder, make_observer(options.log_every, ranks, options.live), ranks)
        try:
            if trace is not None and result.timeline is not None:
                result.timeline.save_trace(trace)
                result.timeline_path = str(trace)
            summary = result.as_dict()
            if result.points and ranks.leads:
                folder.write_json(SUMMARY_NAME, summary)
                charts.draw_picture(result, folder.path / "figure.png")
                page.write_page(result, folder.path / "report.html")
        except OSError as error:  # a failure of the run, as a full disk before its last step is
            result.failure = result.failure or error
    if result.failure is not None:
        print_error(command, result.failure)
        return EXIT_FAILED
    if not ranks.leads:
        pass  # rank 0 speaks for all
    elif options.json:
        print(json.dumps(summary))
    elif result.points:
        lines = columns(run_record.rows(result), terminal_width())
        print("\n".join([f"hetero {command}", *lines]))
    return _EXITS.get(result.status, EXIT_OK)
