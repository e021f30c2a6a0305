"""`hetero plan`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hetero.cli.commands.outcome import EXIT_OK, EXIT_USAGE
from hetero.cli.parser import examples
from hetero.job.options import DEFAULT_DISK_SHARE, DEFAULT_SHARE, add_train_arguments
from hetero.planning.profiles import shipped_profiles
from offload.profile.machine_profile import default_path

if TYPE_CHECKING:
    from hetero.cli.commands import Commands

# The options that are those of `hetero train`, and their help where it is another one here.
_DEFAULT_BYTES = f"for model state (default: {DEFAULT_SHARE:.0%}% of what there is)"
_TRAIN_OPTIONS = {
    "vocab_size": "of a model by name (default: as published)",
    "host_memory": f"RAM, {_DEFAULT_BYTES}",
    "process_memory": "of the whole process, where compute happens in RAM (default: no limit)",
    "activation_memory": "part of --host-memory for what autograd saves, as `hetero train` says",
    "device_memory": "memory of a device, where the profile has one that is not RAM,"
    f" {_DEFAULT_BYTES}",
    "nvme_path": "folder on NVMe, once per disk; with --profile it need not exist (default: none)",
    "nvme_capacity": f"file space there (default: {DEFAULT_DISK_SHARE:.0%}% of what is free)",
    "dtype": "bf16, fp16 or fp32",
    "batch_size": "sequences per micro-batch of a rank",
    "accumulate": "micro-batches of a rank per step",
    "zero_stage": "what ranks share, as `hetero train` says",
    "overlap_updates": "what updates overlap with, as `hetero train` says",
    **dict.fromkeys(("model", "config", "policy", "state_dtype", "chunk_numel", "seq_len")),
    **dict.fromkeys(("gradient_checkpointing", "optimizer", "json")),
}


def add_command(commands: Commands) -> None:
    """Adds `plan`."""
    command = commands.add_parser(
        "plan",
        usage="hetero plan [OPTION ...]",
        help="say where a model's state would live, and what a step would take",
        description="Places a model's state without building it, and predicts a step by a machine's"
        " profile: this one's, as `hetero profile` measured it, or another's. Budgets are of one"
        " rank.",
        epilog=examples(
            ("hetero plan", "the model that `hetero train` takes, on this machine"),
            (
                "hetero plan --machine rtx4090-nvme --model llama-7b --nvme-path /nvme",
                "on another one; the folder need not exist",
            ),
            (
                "hetero plan --machine 8xh200-node --model llama-70b --ranks 64 --nodes 8",
                "on several; --machine list says which there are",
            ),
        ),
    )
    add_train_arguments(command, {"dtype": "bf16"}, _TRAIN_OPTIONS)
    for name, what in (
        ("--ranks", "ranks in all"),
        ("--nodes", "machines, with as many ranks each"),
    ):
        command.add_argument(
            name, type=int, default=1, metavar="N", help=f"{what} (default: %(default)s)"
        )
    command.add_argument(
        "--shard-ranks",
        type=int,
        metavar="N",
        help="hybrid sharding: so many ranks in a row share each chunk, parts of a machine or whole"
        " machines, and the others are replicas of them (default: all ranks share)",
    )
    command.add_argument(
        "--share-gpu", action="store_true", help="a machine may have more ranks than GPUs"
    )
    command.add_argument(  # the name of 0.1
        "--checkpointing",
        dest="gradient_checkpointing",
        action="store_true",
        help=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
    )
    command.add_argument(
        "--lora-rank",
        type=int,
        default=0,
        metavar="N",
        help="a LoRA adapter of this rank on all linear layers but the head is trained, and the"
        " rest is frozen, as `hetero finetune` does it (default: all is trained)",
    )
    command.add_argument(
        "--machine",
        "--profile",
        dest="profile",
        metavar="FILE",
        help="another machine: a profile's file, or a name of those that come along, which are"
        f" {', '.join(shipped_profiles())}; list says what they are (default: {default_path()})",
    )
    command.add_argument(
        "--what-if",
        metavar="FILE",
        help="also predict the step with other budgets of RAM and of the device, from the smallest"
        " that works to all state, and with faster and slower NVMe: a table, and a picture of it"
        " (.png, .svg or .pdf)",
    )
    command.set_defaults(run=run, clip=0.0)  # predictions leave clipping out


def run(arguments: argparse.Namespace) -> int:
    """Prints where the state would live and what a step is predicted to take."""
    from hetero.cli.planner import plan

    return EXIT_OK if plan(arguments) else EXIT_USAGE
