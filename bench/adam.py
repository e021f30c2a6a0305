"""Update kernels and norms beside the limit of memory, torch and DeepSpeed, in one run.

usage: python -m bench.adam [--numel 64Mi] [--threads T] [--rounds N]
                            [--peers torch,deepspeed] [--peer-python PY] [--json]

One contender after the other takes a turn; a turn is one update of warm-up and --repeats timed
ones. GB/s counts the bytes that an update has to read and write, once each; the stream is 4 reads
and 3 writes of fp32 by the same threads, which is what memory gives.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch

from bench.harness.peer_process import PeerProcess
from bench.harness.program import Program, left_out, options, peer_options
from bench.harness.rounds import Sample, run_rounds
from bench.harness.tables import Column, Table, number, ranged, shown
from bench.peers.timing import huge_page_share
from bench.work.updates import Updates
from offload import _native
from offload.memory.sizes import format_bytes

PEERS = ("torch", "deepspeed")

DEEPSPEED_STEP = "deepspeed step"

# Peers that wait for their turn sleep, and their arrays get huge pages, as hetero's do.
PEER_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}


class PeerKind(NamedTuple):
    """A peer's way to update and its traffic per parameter."""

    name: str
    kind: str  # of bench.peers.adam
    bytes_per_param: float  # read and written
    memory_bytes: int  # allocated, per parameter


PEER_KINDS = {
    "torch": (
        PeerKind("torch fused AdamW fp32", "torch fp32", 28, 16),
        PeerKind("torch fused AdamW bf16, no master", "torch bf16", 14, 8),
    ),
    "deepspeed": (
        PeerKind("deepspeed kernel fp32", "deepspeed fp32", 28, 16),
        PeerKind("deepspeed kernel bf16, no master", "deepspeed bf16", 22, 12),
        # 2 + 4 for the gradient's cast, 28 for the update, 4 + 2 for the parameter's cast.
        PeerKind(DEEPSPEED_STEP, DEEPSPEED_STEP, 40, 20),
    ),
}
NOTES = [
    "deepspeed step: bf16 gradient cast to fp32, the kernel on an fp32 master, the master cast"
    " to the bf16 parameter; without ZeRO-Offload's passes for unscaling and clipping",
    "peers run as processes of their own with OMP_WAIT_POLICY=passive and"
    " THP_MEM_ALLOC_ENABLE=1 (torch's huge pages)",
]

OPTIONS = options(
    """
    --numel    COUNT  64Mi  elements of each array
    --threads  N      -     of every contender (default: the usable CPUs)
    --rounds   N      5     after one of warm-up
    --repeats  N      3     timed updates per turn
    """
) + peer_options(PEERS)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures. Raises ValueError for what cannot be measured."""
    numel = arguments.numel
    threads = arguments.threads or _native.usable_cpus()
    kinds = [kind for peer in arguments.peers for kind in PEER_KINDS[peer]]
    _check_memory(numel, kinds)
    _native.set_threads(threads)
    # Fills the arrays alone: no thread of torch's may be about when hetero's turn is timed.
    torch.set_num_threads(1)
    updates = Updates(numel, arguments.repeats)
    variants = [updates.stream(), *updates.updates(), *updates.norms()]
    turns: dict[str, Callable[[], Sample]] = {variant.name: variant.sample for variant in variants}
    with contextlib.ExitStack() as stack:
        processes = {}
        for kind in kinds:
            python = arguments.peer_python if "deepspeed" in kind.kind else sys.executable
            setup = {"numel": numel, "threads": threads, "repeats": arguments.repeats}
            process = stack.enter_context(
                PeerProcess(
                    (python, "-m", "bench.peers.adam"),
                    setup | {"kind": kind.kind},
                    environment=PEER_ENVIRONMENT,
                )
            )
            processes[kind.name] = process
            turns[kind.name] = partial(_peer_sample, process, kind.bytes_per_param)
        rounds = run_rounds(turns, arguments.rounds)
        pages = {"hetero": huge_page_share()} | {
            name: process.info["huge_page_share"]
            for name, process in processes.items()
            if "huge_page_share" in process.info
        }
    rounds.compare("stream", "gbps", "of_stream")
    rounds.compare(DEEPSPEED_STEP, "params_per_s", "of_deepspeed_step")
    return {
        "updates": rounds.figures(),
        "huge_page_share": pages,
        "threads": threads,
        "isa": _native.isa(),
        "numel": numel,
        "rounds": arguments.rounds,
        "repeats": arguments.repeats,
        "notes": NOTES + left_out(rounds.failed),
    }


def _check_memory(numel: int, kinds: Sequence[PeerKind]) -> None:
    """All arrays exist at once, those of peers in their own processes."""
    needed = Updates.needed_bytes(numel) + numel * sum(kind.memory_bytes for kind in kinds)
    available = psutil.virtual_memory().available
    if needed > available:
        raise ValueError(
            f"--numel {numel} needs {format_bytes(needed)} with these peers, but"
            f" {format_bytes(available)} are available; lower --numel or name fewer --peers"
        )


def _peer_sample(process: PeerProcess, bytes_per_param: float) -> Sample:
    rate = process.sample()["params_per_s"]
    gbps = rate * bytes_per_param / 1e9
    return {"params_per_s": rate, "gbps": gbps, "bytes_per_param": bytes_per_param}


def _title(result: Mapping[str, Any]) -> str:
    return (
        f"bench.adam: {result['numel']:,} elements, {result['threads']} threads,"
        f" median of {result['rounds']} (least-most)"
    )


TABLE = Table(
    _title,
    "updates",
    (
        Column("G params/s", "params_per_s", ranged(2, 1e-9)),
        Column("B/param", "bytes_per_param", number(2)),
        Column("GB/s", "gbps", number(1)),
        Column("of stream", "of_stream", number()),
        Column(f"/ {DEEPSPEED_STEP}", "of_deepspeed_step", number()),
    ),
)
PROGRAM = Program("bench.adam", __doc__, OPTIONS, run, shown(TABLE))
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
