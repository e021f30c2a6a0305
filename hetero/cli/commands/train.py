"""`hetero train`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from hetero.cli.commands.outcome import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    print_error,
)
from hetero.cli.job.options import TrainOptions, add_train_arguments
from hetero.cli.parser import examples

if TYPE_CHECKING:
    from hetero.cli.commands import Commands
    from hetero.cli.job.job import Task
    from hetero.cli.job.ranks import Ranks


def add_command(commands: Commands) -> None:
    """Adds `train`."""
    command = commands.add_parser(
        "train",
        usage="hetero train [OPTION ...]",
        help="train a language model within budgets of RAM and device memory",
        description="Trains a language model on the bytes of a text. Without options: 304M"
        " parameters, four minutes on two CPU cores, on the source text of Python's standard"
        " library. Sizes are bytes, or like 600MiB and 4GiB; budgets are never exceeded, and one"
        " that is too small is refused with the smallest that works. Under torchrun the ranks shard"
        " the model state.",
        epilog=examples(
            ("hetero train --max-steps 20", "two minutes of the model of 304M parameters"),
            (
                "hetero train --model gpt2 --vocab-size 50257 --host-memory 600MiB",
                "another shape, within a budget of RAM; the rest of its state is on NVMe",
            ),
            (
                "hetero train --data README.md --nvme-path /tmp --json",
                "another text, another disk, and a JSON object as the report",
            ),
            (
                "hetero train --policy cpu --process-memory auto",
                "all in RAM, and within what a container allows",
            ),
            (
                "hetero train --config runs/first --max-steps 80",
                "the options of an earlier run, or of a YAML file, and more steps",
            ),
            (
                "torchrun --nproc-per-node 2 -m hetero.cli train --max-steps 20",
                "two ranks, each with half of the model state",
            ),
        ),
    )
    add_train_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trains, and prints a report."""
    return run_training("train", TrainOptions.from_namespace(arguments))


def run_training(
    command: str,
    options: TrainOptions,
    make_task: Callable[[Ranks], tuple[TrainOptions, Task]] | None = None,
) -> int:
    """Trains, prints a report, and returns the exit code.

    `make_task`, which is called on all ranks, makes what is trained, and the options of the run.
    None: both are what `options` say.
    """
    # Late, because transformers and matplotlib take seconds and belong to the extra `train`.
    from hetero.cli.job.checkpoints import run_folder_to_resume
    from hetero.cli.job.loop import train
    from hetero.cli.job.ranks import joined_ranks
    from hetero.cli.job.run_folder import RunFolder
    from hetero.cli.show.figure import draw_figure
    from hetero.cli.show.observers import make_observer
    from hetero.cli.show.report import print_report
    from hetero.cli.show.step_timeline import (
        draw_steps,
        last_steps_title,
        trace_path,
        wanted_picture,
    )
    from hetero.reporting.page.page import write_page

    # Under --json nothing else may reach stdout, whatever a library prints.
    with (
        contextlib.redirect_stdout(sys.stderr),
        joined_ranks() as ranks,
        RunFolder(run_folder_to_resume(options), ranks, options.resume is not None) as folder,
    ):
        # Here, because the run folder may be the picture's.
        picture = wanted_picture(options, ranks)
        task: Task | None = None
        if make_task is not None:
            options, task = make_task(ranks)
        observer = make_observer(options.log_every, ranks, options.live)
        result = train(options, folder, observer, ranks, task)
        if picture is not None and result.timeline is not None:
            result.timeline_paths = [str(picture), str(trace_path(picture))]
        summary = result.as_dict()
        if result.steps and ranks.leads:
            folder.write_json("config.json", options.as_dict())
            folder.write_json("summary.json", summary)
            draw_figure(result, folder.figure_path)
            if result.record is not None:
                write_page(result.record, folder.report_path)
            if picture is not None and result.timeline is not None:
                draw_steps(result.timeline, picture, last_steps_title(result))
    if result.failure is not None:
        print_error(command, result.failure)
        return EXIT_FAILED
    if not ranks.leads:
        pass  # rank 0 speaks for all
    elif options.json:
        print(json.dumps(summary))
    elif result.steps:
        print_report(result, command)
    ended = {"interrupted": EXIT_INTERRUPTED, "terminated": EXIT_TERMINATED}
    return ended.get(result.status, EXIT_OK)
