"""`hetero train`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from hetero.cli.commands.outcome import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    print_error,
)
from hetero.cli.parser import examples
from hetero.job.options import TrainOptions, add_train_arguments

if TYPE_CHECKING:
    from hetero.cli.commands import Commands
    from hetero.job.loop import Observer
    from hetero.job.ranks import Ranks
    from hetero.job.result import TrainResult
    from hetero.job.run_folder import RunFolder


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
    options = TrainOptions.from_namespace(arguments)
    # Late, because transformers and matplotlib take seconds and belong to the extra `train`.
    from hetero.job.loop import train

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
    from hetero.cli.show.figure import draw_figure
    from hetero.cli.show.observers import make_observer
    from hetero.cli.show.report import print_report
    from hetero.cli.show.step_timeline import (
        draw_steps,
        last_steps_title,
        trace_path,
        wanted_picture,
    )
    from hetero.job.checkpoints import run_folder_to_resume
    from hetero.job.ranks import joined_ranks
    from hetero.job.run_folder import RunFolder
    from hetero.reporting.page.page import write_page

    # Under --json nothing else may reach stdout, whatever a library prints.
    with (
        contextlib.redirect_stdout(sys.stderr),
        joined_ranks(backend) as ranks,
        RunFolder(run_folder_to_resume(options), ranks, options.resume is not None) as folder,
    ):
        # Here, because the run folder may be the picture's.
        picture = wanted_picture(options, ranks)
        observer = make_observer(options.log_every, ranks, options.live)
        result = train(folder, observer, ranks)
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
