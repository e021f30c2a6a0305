"""`hetero doctor`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from hetero.cli.commands.outcome import EXIT_FAILED, EXIT_OK
from hetero.cli.parser import examples

if TYPE_CHECKING:
    from hetero.cli.commands import Commands


def add_command(commands: Commands) -> None:
    """Adds `doctor`."""
    command = commands.add_parser(
        "doctor",
        help="check this machine, and say what to do about what is found",
        description="Checks what hetero needs of this machine: io_uring, locked memory, disks,"
        " memory limits, huge pages, NUMA, GPUs, and what is installed. Each finding is ok, a note"
        " (hetero works, but slower or with less) or a problem, with what to do about it. The exit"
        " code is 1 if there is a problem.",
        epilog=examples(
            ("hetero doctor", "this machine, and the folder you are in"),
            ("hetero doctor --nvme-path /tmp", "another folder, once per disk"),
            ("hetero doctor --no-disk-speed --json", "without writing, for programs"),
        ),
    )
    command.add_argument(
        "--nvme-path",
        action="append",
        metavar="DIR",
        help="folder for state files; once per disk (default: the one you are in)",
    )
    command.add_argument(
        "--no-disk-speed",
        action="store_true",
        help="do not measure disks, which writes up to 256 MiB in each folder and takes seconds",
    )
    command.add_argument(
        "--json", action="store_true", help="print findings and facts as a JSON object on stdout"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Gathers facts, checks them and prints the findings; returns 1 if one is a problem."""
    # Late, because psutil, torch and the native core take time, and other commands need less.
    from hetero.cli.doctor.facts import gather
    from hetero.cli.doctor.findings import Level, examine, show

    def tell(text: str) -> None:
        print(f"hetero doctor: {text}", file=sys.stderr)

    # Under --json nothing else may reach stdout, whatever a library prints.
    with contextlib.redirect_stdout(sys.stderr):
        facts = gather(arguments.nvme_path or ["."], not arguments.no_disk_speed, tell)
        findings = examine(facts)
    healthy = all(finding.level is not Level.PROBLEM for finding in findings)
    if arguments.json:
        found = {"ok": healthy, "findings": [vars(finding) for finding in findings]}
        print(json.dumps({**found, "facts": dataclasses.asdict(facts)}))
    else:
        show(findings)
    return EXIT_OK if healthy else EXIT_FAILED
