"""Update kernels and norms beside the limit of memory, torch and DeepSpeed, in one run.

usage: python -m bench.adam [--numel 64Mi] [--tiles 256Ki,4Mi] [--threads T] [--rounds N]
                            [--peers torch,deepspeed] [--peer-python PY] [--json]

One contender after the other takes a turn; a turn is one update of warm-up and --repeats timed
ones. GB/s counts the bytes that an update has to read and write, once each; the stream is 4 reads
and 3 writes of fp32 by the same threads, which is what memory gives.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from bench.harness.peer_process import DEEPSPEED_INSTALL, PeerProcess
from bench.harness.program import (
    COUNT,
    Option,
    Program,
    left_out,
    list_of,
    peer_options,
    ranged,
    titled,
    whole,
)
from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.peers.adam_timing import huge_page_share
from bench.work.beside_torch import measure_beside_torch
from bench.work.updates import Updates, update_name
from offload import _native
from offload._native import UpdateKind
from offload.memory.sizes import format_bytes

PEERS = ("torch", "deepspeed")

MAIN_KIND = UpdateKind("bf16", "bf16")

BESIDE_NUMEL = 16 << 20  # the most for the update beside torch: some milliseconds long

DEEPSPEED_STEP = "deepspeed step"

# Peers that wait for their turn sleep, and their arrays get huge pages, as hetero's do.
PEER_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}


@dataclass(frozen=True)
class PeerKind:
    """A peer's way to update and its traffic per parameter."""

    name: str
    module: str
    kind: str
    bytes_per_param: float  # read and written
    memory_bytes: int  # allocated, per parameter


PEER_KINDS = {
    "torch": (
        PeerKind("torch fused AdamW fp32", "adam_torch", "fp32", 28, 16),
        PeerKind("torch fused AdamW bf16, no master", "adam_torch", "bf16", 14, 8),
    ),
    "deepspeed": (
        PeerKind("deepspeed kernel fp32", "adam_deepspeed", "fp32", 28, 16),
        PeerKind("deepspeed kernel bf16, no master", "adam_deepspeed", "bf16", 22, 12),
        # 2 + 4 for the gradient's cast, 28 for the update, 4 + 2 for the parameter's cast.
        PeerKind(DEEPSPEED_STEP, "adam_deepspeed", "step", 40, 20),
    ),
}


OPTIONS = (
    Option("--numel", "64Mi", "elements of each array", COUNT),
    Option(
        "--tiles",
        None,
        "instead of the kernels measure Adam in tiles of so many elements, each a task of a step"
        " pipeline: a tile is a slot divided by the ranks",
        list_of(COUNT),
    ),
    Option("--threads", None, "of every contender (default: the usable CPUs)", whole()),
    Option("--rounds", "5", "after one of warm-up", whole()),
    Option("--repeats", "3", "timed updates per turn", whole()),
    Option("--matmul", "2048", "rows of torch's matrices in beside_torch", whole()),
    *peer_options(PEERS),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures. Raises ValueError for what cannot be measured."""
    numel = arguments.numel
    threads = arguments.threads or _native.usable_cpus()
    kinds = [kind for peer in arguments.peers for kind in PEER_KINDS[peer]]
    _check_memory(numel, kinds)
    _native.set_threads(threads)
    # Fills the arrays alone: no thread of torch's may be about when hetero's turn is timed.
    torch.set_num_threads(1)
    notes = [
        "deepspeed step: bf16 gradient cast to fp32, the kernel on an fp32 master, the master cast"
        " to the bf16 parameter; without ZeRO-Offload's passes for unscaling and clipping",
        "peers run as processes of their own with OMP_WAIT_POLICY=passive and"
        " THP_MEM_ALLOC_ENABLE=1 (torch's huge pages)",
    ]
    updates = Updates(numel, arguments.repeats)
    variants = [updates.stream()]
    if arguments.tiles is None:
        variants += [*updates.updates(), *updates.norms()]
    else:
        tiles = (updates.tiles(size) for size in arguments.tiles)
        variants += [updates.update(MAIN_KIND), *tiles]
    bytes_per_param = {variant.name: variant.bytes_per_param for variant in variants}
    turns: dict[str, Callable[[], Sample]] = {variant.name: variant.sample for variant in variants}
    with contextlib.ExitStack() as stack:
        processes = {}
        for kind in kinds:
            process = stack.enter_context(
                _process(kind, numel, threads, arguments.repeats, arguments.peer_python)
            )
            processes[kind.name] = process
            bytes_per_param[kind.name] = kind.bytes_per_param
            turns[kind.name] = _peer_turn(process, kind.bytes_per_param)
        rounds = run_rounds(turns, arguments.rounds)
        pages = {"hetero": huge_page_share()} | {
            name: process.info["huge_page_share"]
            for name, process in processes.items()
            if "huge_page_share" in process.info
        }
    del turns, variants, updates
    notes += left_out(rounds.failed)
    beside = measure_beside_torch(
        Updates(min(numel, BESIDE_NUMEL), arguments.repeats),
        arguments.matmul,
        threads,
        arguments.rounds,
    )
    return {
        **summarize(rounds, bytes_per_param, {kind.name for kind in kinds}),
        "beside_torch": beside,
        "huge_page_share": pages,
        "threads": threads,
        "isa": _native.isa(),
        "numel": numel,
        "rounds": arguments.rounds,
        "repeats": arguments.repeats,
        "notes": notes,
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


def _process(
    kind: PeerKind, numel: int, threads: int, repeats: int, peer_python: str
) -> PeerProcess:
    python = peer_python if kind.module == "adam_deepspeed" else sys.executable
    setup = {"numel": numel, "threads": threads, "kind": kind.kind, "repeats": repeats}
    return PeerProcess(
        (python, "-m", f"bench.peers.{kind.module}"), setup, DEEPSPEED_INSTALL, PEER_ENVIRONMENT
    )


def _peer_turn(process: PeerProcess, bytes_per_param: float) -> Callable[[], Sample]:
    def turn() -> Sample:
        rate = process.sample()["params_per_s"]
        return {"params_per_s": rate, "gbps": rate * bytes_per_param / 1e9}

    return turn


def summarize(
    rounds: Rounds, bytes_per_param: Mapping[str, float], peers: set[str]
) -> dict[str, Any]:
    """Medians and shares of the stream; the speed-up is null where DeepSpeed was left out."""
    main = update_name(MAIN_KIND)
    entries = [
        {
            "name": name,
            "params_per_s": rounds.median(name, "params_per_s"),
            "params_per_s_min": rounds.spread(name, "params_per_s")["min"],
            "params_per_s_max": rounds.spread(name, "params_per_s")["max"],
            "bytes_per_param": bytes_per_param[name],
            "gbps": rounds.median(name, "gbps"),
            "share_of_stream": rounds.ratio(name, "stream", "gbps"),
        }
        for name in rounds.samples
        if name != "stream"
    ]
    return {
        "stream_gbps": rounds.median("stream", "gbps"),
        "variants": [entry for entry in entries if entry["name"] not in peers],
        "peers": [entry for entry in entries if entry["name"] in peers],
        "speedup_vs_deepspeed_step": (
            rounds.ratio(main, DEEPSPEED_STEP, "params_per_s")
            if DEEPSPEED_STEP in rounds.samples
            else None
        ),
    }


def show(result: dict[str, Any]) -> Iterator[str]:
    """One line per kernel and peer, then the ratios."""
    rows = [["update", "G params/s", "B/param", "GB/s", "of stream"]]
    for entry in (*result["variants"], *result["peers"]):
        rates = {key: entry[f"params_per_s{end}"] / 1e9
                 for key, end in (("median", ""), ("min", "_min"), ("max", "_max"))}  # fmt: skip
        rows.append(
            [
                entry["name"],
                ranged(rates),
                f"{entry['bytes_per_param']:g}",
                f"{entry['gbps']:.1f}",
                f"{entry['share_of_stream']:.2f}",
            ]
        )
    yield titled(
        f"bench.adam: {result['numel']:,} elements, {result['threads']} threads, stream"
        f" {result['stream_gbps']:.1f} GB/s, median of {result['rounds']} (least-most)",
        rows,
    )
    for key, label in (
        ("matmul_fp32", "torch fp32 product beside hetero's idle pool / alone"),
        ("matmul_bf16", "torch bf16 product beside hetero's idle pool / alone"),
        ("adam_after_torch", "update right after a product of torch / alone"),
    ):
        yield f"{label}: {result['beside_torch'][key]:.3f}"
    if result["speedup_vs_deepspeed_step"] is not None:
        yield (
            f"{update_name(MAIN_KIND)} / {DEEPSPEED_STEP}, parameters per second:"
            f" {result['speedup_vs_deepspeed_step']:.2f}"
        )
    yield from result["notes"]


PROGRAM = Program("bench.adam", __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
