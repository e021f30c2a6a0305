"""The largest model that trains within a budget for the whole process, everything else on NVMe.

usage: python -m bench.ladder [--budgets 1GiB,2GiB,4GiB,8GiB] [--nvme-path DIR] [--json]
                              [--peers deepspeed] [--peer-python PY]
       python -m bench.ladder --only-rss 3GiB --model gpt2-1.3b
       python -m bench.ladder --beyond-ram 2

Shapes are GPT-2's, from one to the next at most 15 % larger (bench/largest_model/shapes.py), as far
as the disk holds them: 18 bytes a parameter while the model is built, 14 then. Each try trains one
of them for some steps, in a process of its own that the operating system limits; it is proven if
the peak of resident memory, construction included, is within the budget. The first one tried is the
largest for which hetero's placement says that the budget is enough, beside the framework as
measured and activations by a formula. From there tries go up or down until one works and one does
not, and halve what is between. Embeddings are in tiles (hetero.tile_embeddings).
(bench.largest_model.rungs.MALLOC says what glibc is told, here and for peers.)

DeepSpeed's ZeRO-3, with parameters and optimizer on NVMe, is searched for with --peers deepspeed,
along the line through the runs nearest to a budget. A try that is not done after --timeout counts
as one that does not fit in time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.harness.program import (
    FOLDER,
    NUMBER,
    SECONDS,
    SIZE,
    Option,
    Program,
    list_of,
    one_of,
    peer_options,
    titled,
    whole,
)
from bench.largest_model.limited_train import LIMITS
from bench.largest_model.peer_rungs import MissingPeer, PeerRungs
from bench.largest_model.rungs import LIMIT_PER_BUDGET, MALLOC, Rungs, run_child
from hetero.cli.job.models import GPT2_VOCAB_SIZE, MODEL_NAMES
from offload.disk.directories import free_bytes
from offload.memory.sizes import format_bytes

PEERS = ("deepspeed",)


OPTIONS = (
    Option(
        "--budgets",
        "1GiB,2GiB,4GiB,8GiB",
        "peaks of the whole process's resident memory",
        list_of(SIZE),
    ),
    Option("--only-rss", None, "one budget, for one --model, or with --beyond-ram", SIZE),
    Option("--model", None, "of --only-rss", one_of(MODEL_NAMES)),
    Option(
        "--beyond-ram",
        None,
        "one model whose state, at 16 bytes a parameter, is so many times this machine's RAM;"
        " within --only-rss (default: a third of RAM)",
        NUMBER,
    ),
    Option("--most-params", None, "of shapes, as 2e9 (default: what the disk holds)", NUMBER),
    Option("--nvme-path", ".", "folder on NVMe", FOLDER),
    Option("--vocab-size", str(GPT2_VOCAB_SIZE), "of the shapes", whole()),
    Option("--seq-len", "128", "tokens per sequence", whole()),
    Option("--batch-size", "1", "sequences per step", whole()),
    Option("--steps", "3", "of each model", whole()),
    Option("--tries", "4", "shapes that are trained for a budget, at most", whole()),
    Option(
        "--limit",
        "data",
        f"what the operating system limits, to {LIMIT_PER_BUDGET} times the budget: data is"
        " RLIMIT_DATA, address RLIMIT_AS",
        one_of((*LIMITS, "none")),
    ),
    Option("--timeout", "3600", "of one training; a longer one does not fit in time", SECONDS),
    *peer_options(PEERS, default="none"),
)


def _add_checkpointing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="backward computes forward once more (default: on)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rungs. Raises ValueError for options that cannot work."""
    if arguments.vocab_size < 256 or arguments.seq_len < 2:
        raise ValueError("--vocab-size must be at least 256 and --seq-len at least 2")
    if (arguments.model is not None) and arguments.only_rss is None:
        raise ValueError("--model is for --only-rss BYTES; give that too")
    if arguments.only_rss is not None and arguments.model is None and arguments.beyond_ram is None:
        raise ValueError("--only-rss needs --model NAME or --beyond-ram FACTOR")
    if not Path(arguments.nvme_path).is_dir():
        raise ValueError(f"--nvme-path {arguments.nvme_path} is not a folder")
    with tempfile.TemporaryDirectory(prefix="hetero-ladder-", dir=arguments.nvme_path) as folder:
        ladder = Rungs(arguments, Path(folder), lambda spec: run_child(spec, arguments, folder))
        if arguments.model is not None:
            rungs = [ladder.only(arguments.model, arguments.only_rss)]
        elif arguments.beyond_ram is not None:
            rungs = [ladder.beyond_ram(arguments.beyond_ram)]
        else:
            rungs = list(ladder.all(sorted(set(arguments.budgets))))
        peer = PeerRungs(arguments, Path(folder), ladder.shapes)
        missing = None
        for rung in rungs:
            rung["peer"] = None
        try:
            for rung in rungs if arguments.peers else []:
                rung["peer"] = peer.rung(rung["budget_bytes"])
        except MissingPeer as error:
            missing = str(error)
    return {
        "rungs": rungs,
        "peer_runs": peer.runs,
        "peer_missing": missing,
        "framework_bytes": ladder.framework_bytes,
        "limit": arguments.limit,
        "environment": MALLOC,
        "disk_free_bytes": free_bytes(arguments.nvme_path),
        "checkpointing": arguments.checkpointing,
        "tokens": [arguments.batch_size, arguments.seq_len],
    }


def show(result: dict[str, Any]) -> Iterator[str]:
    """A line per budget, then what did not train."""
    batch, seq_len = result["tokens"]
    rows = [["budget", "layers x width", "parameters", "16 B each", "peak RSS", "for state",
             "built s", "step s", "NVMe a step", "limited by", "DeepSpeed"]]  # fmt: skip
    notes = []
    for rung in result["rungs"]:
        peer = rung["peer"]
        theirs = "" if not result["peer_runs"] else "none"
        if peer is not None:
            theirs = f"{peer['params'] / 1e6:.0f}M"
        budget = format_bytes(rung["budget_bytes"])
        if rung["status"] != "trained":
            rows.append([budget, rung["status"], *[""] * 8, theirs])
            notes += [f"{budget}: {rung['error']}"] if rung.get("error") else []
        else:
            rows.append(
                [
                    budget,
                    rung["shape"],
                    f"{rung['params'] / 1e6:,.0f}M",
                    *(
                        format_bytes(rung[key])
                        for key in ("state_bytes", "peak_rss_bytes", "host_memory")
                    ),
                    f"{rung['constructed_s']:.0f}",
                    f"{min(rung['step_s']):.1f}",
                    format_bytes(rung["nvme_bytes_per_step"]),
                    rung.get("limited_by", ""),
                    theirs,
                ]
            )
        notes += [f"{budget}: not {_why_not(one)}" for one in rung.get("tries", [])
                  if one["status"] != "trained"]  # fmt: skip
    yield titled(
        f"bench.ladder: peak RSS of the whole process, limit {result['limit']}; {batch} x"
        f" {seq_len} tokens{', checkpointing' if result['checkpointing'] else ''}; the framework"
        f" takes {format_bytes(result['framework_bytes'])}",
        rows,
    )
    yield from notes
    for rung in result["rungs"]:
        if "factor" in rung and rung["status"] == "trained":
            share = rung["state_bytes"] / rung["ram_bytes"]
            yield f"the state is {share:.2f} times the machine's RAM"
    for one in result["peer_runs"]:
        peak = format_bytes(one["peak_rss_bytes"]) if one["status"] == "trained" else one["error"]
        yield f"DeepSpeed, {one['shape']}, {one['params'] / 1e6:.0f}M: {peak}"
    if result["peer_missing"] is not None:
        yield f"no DeepSpeed: {result['peer_missing']}"


def _why_not(one: Mapping[str, Any]) -> str:
    return f"{one['shape']}, {one['params'] / 1e6:.0f}M: {one['error']}"


PROGRAM = Program("bench.ladder", __doc__, OPTIONS, run, show, _add_checkpointing)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
