"""A large batch, recomputed and offloaded, beside as many tokens in micro-batches.

usage: python -m bench.activations.large_batch [--seq-len 256] [--batch-size 1] [--factor 8]
                                               [--host-memory 1GiB] [--activation-memory 384MiB]
                                               [--recompute auto] [--steps N] [--skip-steps N]
                                               [--rounds N] [--policy nvme] [--layers N]
                                               [--width N] [--heads N] [--vocabulary N]
                                               [--path DIR] [--json]

hetero trains a GPT-2 in bf16 (by default 354 M) with its state on NVMe, in processes of their own,
in turns and with the same budgets: one micro-batch of --batch-size sequences a step, --factor of
them, and one batch that is --factor times as large. The latter two see the same tokens.

Parameters and gradients that are on NVMe move for each micro-batch, optimizer state once a step. So
the bytes of state by which --factor micro-batches exceed one micro-batch, over --factor - 1, are
those of the parameters and gradients of one, and what one moves beside them is optimizer state.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.activations.options import add_counts, add_model_arguments, model_shape, turn
from bench.activations.training import Spec
from bench.activations.trial import run_trial, tell
from bench.harness.machine import describe_machine
from bench.harness.program import (
    add_json_argument,
    command_line,
    parse_size,
    print_header,
    program_parser,
    run_program,
)
from offload.memory.sizes import format_bytes

NAME = "bench.activations.large_batch"
ONE, MICRO_BATCHES, LARGE = "one micro-batch", "micro-batches", "large batch"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    arguments = _parser().parse_args(argv)
    command = command_line(NAME, argv)
    return run_program(NAME, lambda: run(arguments, command), show, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = program_parser(NAME, __doc__)
    add_counts(
        parser,
        ("--seq-len", 256, "tokens of a sequence"),
        ("--batch-size", 1, "sequences of a micro-batch"),
        ("--factor", 8, "micro-batches of a step"),
        ("--steps", 2, "that count, of each process"),
        ("--skip-steps", 3, "before them, after which what is recomputed is chosen"),
        ("--rounds", 1, "turns of each contender"),
    )
    parser.add_argument(
        "--host-memory", default="1GiB", metavar="SIZE", help="activations included"
    )
    parser.add_argument("--activation-memory", default="384MiB", metavar="SIZE")
    parser.add_argument("--recompute", choices=("auto", "none", "all"), default="auto")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="of a process"
    )
    add_model_arguments(parser)
    add_json_argument(parser)
    return parser


def run(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """All figures. Raises ValueError for input that cannot be measured, or a failed contender."""
    for option, least in (
        *(("seq_len", 2), ("batch_size", 1), ("factor", 2), ("steps", 1)),
        *(("skip_steps", 0), ("rounds", 1)),
    ):
        if getattr(arguments, option) < least:
            raise ValueError(f"--{option.replace('_', '-')} must be {least} or more")
    specs = _specs(arguments)
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(dir=arguments.path, prefix="bench-large-batch-") as folder:
        for number in range(arguments.rounds):
            order = turn(list(specs), number)
            rounds.append({name: _sample(name, specs[name], folder, arguments) for name in order})
    return {
        "machine": describe_machine(),
        "command": command,
        "shape": specs[LARGE].shape | {"vocabulary": arguments.vocabulary},
        "factor": arguments.factor,
        "host_memory": specs[LARGE].options["host_memory"],
        "activation_memory": specs[LARGE].options["activation_memory"],
        "results": summarize(rounds, arguments.factor),
        "samples": rounds,
    }


def _specs(arguments: argparse.Namespace) -> dict[str, Spec]:
    options = {
        "recompute": arguments.recompute,
        "placement_policy": arguments.policy,
        "host_memory": parse_size("--host-memory", arguments.host_memory),
        "activation_memory": parse_size("--activation-memory", arguments.activation_memory),
    }
    specs = {}
    for name, batches, micro_batches in (
        (ONE, 1, 1),
        (MICRO_BATCHES, arguments.factor, arguments.factor),
        (LARGE, arguments.factor, 1),
    ):
        specs[name] = Spec(
            "hetero",
            vars(model_shape(arguments, arguments.seq_len, arguments.batch_size * batches)),
            arguments.vocabulary,
            options,
            micro_batches=micro_batches,
            steps=arguments.steps + arguments.skip_steps,
            skip_steps=arguments.skip_steps,
        )
    return specs


def _sample(name: str, spec: Spec, folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    sample = run_trial(spec, folder, arguments.timeout)
    if sample["status"] != "trained":
        raise ValueError(f"{name}: {sample['status']}: {sample['error']}")
    peak = format_bytes(sample["peak_bytes"])
    tell(NAME, f"{name}: {sample['step_s']:.2f} s a step, peak {peak}, {sample['seconds']:.0f} s")
    return sample


def summarize(rounds: Sequence[Mapping[str, Any]], factor: int) -> dict[str, dict[str, Any]]:
    """Medians over the rounds; ratios to the micro-batches are taken within each round."""
    results: dict[str, dict[str, Any]] = {}
    for name in (ONE, MICRO_BATCHES, LARGE):
        samples = [each[name] for each in rounds]
        moved = {
            key: statistics.median(sample["bytes_per_step"][key] for sample in samples)
            for key in samples[0]["bytes_per_step"]
        }
        activations = moved["activations_read"] + moved["activations_written"]
        results[name] = {
            "step_s": statistics.median(sample["step_s"] for sample in samples),
            "of_micro_batches": statistics.median(
                each[name]["step_s"] / each[MICRO_BATCHES]["step_s"] for each in rounds
            ),
            "peak_bytes": max(sample["peak_bytes"] for sample in samples),
            "bytes_per_step": moved,
            "activation_bytes": activations,
            "state_bytes": moved["disk_read"] + moved["disk_write"] - activations,
            "losses": samples[0]["losses"],
        }
    one = results[ONE]["state_bytes"]
    of_a_micro_batch = (results[MICRO_BATCHES]["state_bytes"] - one) / (factor - 1)
    for figures in results.values():
        optimizer = one - of_a_micro_batch
        figures["param_and_grad_bytes"] = figures["state_bytes"] - optimizer
    return results


def show(result: dict[str, Any], console: Console) -> None:
    """The table for people."""
    print_header(result, console)
    shape, size = result["shape"], format_bytes
    table = Table(
        title=f"{NAME}: {shape['layers']} layers of {shape['width']}, {shape['batch_size']} x"
        f" {shape['seq_len']:,} tokens a step ({ONE}: a part of {result['factor']}); host_memory"
        f" {size(result['host_memory'])}, of it activations {size(result['activation_memory'])}",
        title_justify="left",
    )
    for title in ("", "step, s", "/ micro-batches", "peak", "state moved",
                  "of it params and grads", "activations moved"):  # fmt: skip
        table.add_column(title, justify="right" if title else "left")
    for name, figures in result["results"].items():
        table.add_row(
            f"{result['factor']} {name}" if name == MICRO_BATCHES else name,
            f"{figures['step_s']:.2f}",
            f"{figures['of_micro_batches']:.2f}",
            size(figures["peak_bytes"]),
            size(figures["state_bytes"]),
            size(max(0, figures["param_and_grad_bytes"])),
            size(figures["activation_bytes"]),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
