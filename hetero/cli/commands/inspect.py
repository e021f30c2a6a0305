"""`hetero inspect`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.cli.commands.outcome import EXIT_FAILED, EXIT_OK, print_error
from hetero.cli.parser import examples
from offload.errors import CheckpointError
from offload.memory.sizes import format_bytes

if TYPE_CHECKING:
    from hetero.checkpoint.stored_checkpoint import StoredCheckpoint
    from hetero.cli.commands import Commands

_LISTED = 20  # damaged pieces


def add_command(commands: Commands) -> None:
    """Adds `inspect`."""
    command = commands.add_parser(
        "inspect",
        help="show what is in a checkpoint",
        description="Shows what a checkpoint has: steps, parameters, optimizers, files. It may be"
        " hetero's, the last commit of a durable state, a folder of Hugging Face's or a"
        " .safetensors file, one of torch.distributed.checkpoint (DCP), or DeepSpeed's"
        " universal format. Values are not read, and nothing of a file is run.",
        epilog=examples(
            ("hetero inspect runs/first", "the latest checkpoint of a run, or else its weights"),
            ("hetero inspect runs/first/step-100 --verify", "compare all checksums"),
            ("hetero inspect model.safetensors --json", "every parameter, for programs"),
        ),
    )
    command.add_argument(
        "path",
        help="the checkpoint, or the run folder; of several checkpoints in a folder the latest one",
    )
    command.add_argument(
        "--verify",
        action="store_true",
        help="read every byte of a hetero checkpoint and compare checksums; exit code 1, and the"
        " names of what is damaged, if one is another",
    )
    command.add_argument(
        "--json", action="store_true", help="print a JSON object with all parameters on stdout"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints what the checkpoint has; returns 1 if it was verified and is damaged."""
    # Late, because other commands need none of it.
    from hetero.cli.show.contents import as_dict, lines
    from hetero.cli.stored import open_left
    from hetero.text_table import terminal_width

    with open_left(Path(arguments.path)) as stored:
        verified = _verify(stored) if arguments.verify else None
        if arguments.json:
            found = as_dict(stored)
            print(json.dumps(found if verified is None else {**found, "verified": verified}))
        else:
            print("\n".join(lines(stored, terminal_width())))
    if verified is None:
        return EXIT_OK
    damaged: list[str] = verified["damaged"]
    for each in damaged[:_LISTED]:
        print_error("inspect", CheckpointError(each))
    if len(damaged) > _LISTED:
        print(f"hetero inspect: error: and {len(damaged) - _LISTED} more", file=sys.stderr)
    if damaged:
        return EXIT_FAILED
    if not arguments.json:
        nbytes = verified["verified_bytes"]
        print(
            f"\nverified: {nbytes} bytes ({format_bytes(nbytes)}) in {verified['pieces']} pieces"
            f" have their checksums"
        )
    return EXIT_OK


def _verify(stored: StoredCheckpoint) -> dict[str, Any]:
    """How much is good, and what is damaged. Raises ValueError where there are no checksums."""
    from hetero.checkpoint.hetero_checkpoint import HeteroCheckpoint

    if not isinstance(stored, HeteroCheckpoint):
        raise ValueError(f"--verify is for hetero checkpoints; a {stored.kind} has no checksums")
    damaged: list[str] = []
    nbytes = pieces = 0
    try:
        for piece, error in stored.verify():
            if error is None:
                nbytes += piece.nbytes
                pieces += 1
            else:
                damaged.append(str(error))
    except CheckpointError as error:  # a file is missing, or its header is another one
        damaged.append(str(error))
    return {"verified_bytes": nbytes, "pieces": pieces, "damaged": damaged}
