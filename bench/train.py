"""Step time and memory of the main job beside its peers, in turns on one machine.

usage: python -m bench.train [options of `hetero train`] [--rounds N] [--ranks N]
                             [--hosts N [--rate 1gbit]]
                             [--variants cpu,nvme] [--peers torch,ddp,fsdp2,deepspeed] [--json]

In a round every contender runs once, each round beginning with another one. Ratios are taken
within a round and their median counts; a contender's other figures are those of its run with the
median step time.

With --ranks N every contender is N processes on this machine, each with 1/N of the threads and
with micro-batches of its own: a step takes N x batch x seq x accumulate tokens. Rank r gets the
micro-batches r, r + N, r + 2 N, ... of those that one rank would get. With --hosts they are spread
over network namespaces, with links of --rate between them (as root).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.harness.contenders import (
    PEERS,
    Contender,
    hetero_contender,
    peer_contenders,
    run_contender,
)
from bench.harness.hosts import Hosts, parse_rate
from bench.harness.program import Kind, Program, left_out, names, options, peer_options
from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.harness.tables import Column, Table, number, ranged, shown, size
from bench.peers.workload import Workload
from hetero.job.data import load_corpus
from hetero.job.models import model_config
from hetero.job.optimization import ADAM_BETAS, lr_factor
from hetero.job.options import TrainOptions, add_train_arguments, config_path

# The shape of docs/benchmarks.md: 354M parameters with GPT-2's own vocabulary.
DEFAULTS = {
    "model": "gpt2-medium",
    "seq_len": 256,
    "batch_size": 1,
    "steps": 8,
    "lr": 1e-4,
    "warmup": 0,
    "schedule": "constant",
    "policy": None,
    "backend": "cpu",
    "save_model": False,
}
VOCAB_SIZE = 50257


OPTIONS = options(
    """
    --rounds      N        1      runs of every contender, in turns
    --ranks       N        1      processes of each contender; --threads is of each
    --hosts       N        -      network namespaces that share the ranks evenly (default: ranks
                                  of one machine)
    --rate        RATE     1gbit  of each host's link: a number of mbit or gbit per second
    --variants    TEXT     -      policies to run (default: --policy if given, else cpu,nvme)
    --skip-steps  N>=0     2      first steps left out of the medians
    --timeout     SECONDS  1800   limit of one contender
    """,
    rate=Kind("RATE", lambda option, text: parse_rate(text)),
) + peer_options(PEERS, default="none")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all contenders.

    What contenders write stays in the run folder, in a folder per round.
    """
    options, variants = _options(arguments)
    folder = Path(options.run_dir or time.strftime("runs/bench-%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)
    workload = folder / "workload.json"
    made = partial(_contenders, options, variants, arguments, workload)
    places = {contender.name: place for place, contender in enumerate(made(folder))}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in places}
    with ExitStack() as stack:
        hosts = None
        if arguments.hosts is not None:
            hosts = stack.enter_context(Hosts(arguments.hosts, arguments.rate))

        def turn(name: str) -> Sample:
            round_folder = folder / f"round-{len(runs[name]) + 1}"
            round_folder.mkdir(exist_ok=True)
            contender = made(round_folder)[places[name]]
            runs[name].append(run_contender(contender, arguments.timeout, hosts=hosts))
            return sample_of(runs[name][-1], arguments.skip_steps)

        write_workload(options, workload, arguments.ranks)
        turns = {name: partial(turn, name) for name in places}
        rounds = run_rounds(turns, arguments.rounds, warm_up=False)
    summary = summarize(rounds, runs, f"hetero {options.policy}")
    return {**summary, "rounds": arguments.rounds, "skipped_steps": arguments.skip_steps}


def _options(arguments: argparse.Namespace) -> tuple[TrainOptions, list[str]]:
    """The options of every contender, with the policy of the main variant, and all variants."""
    given = arguments.policy
    variants = names(arguments.variants or given or "cpu,nvme")
    if not variants:
        raise ValueError("--variants names no policy")
    arguments.policy = given if given in variants else variants[-1]
    if config_path(arguments.model, arguments.config) is None and arguments.vocab_size is None:
        arguments.vocab_size = VOCAB_SIZE
    options = TrainOptions.from_namespace(arguments)
    if options.threads is None:
        options = replace(options, threads=max(1, torch.get_num_threads() // arguments.ranks))
    return options, variants


def _contenders(
    options: TrainOptions,
    variants: list[str],
    arguments: argparse.Namespace,
    workload: Path,
    folder: Path,
) -> list[Contender]:
    """Raises ValueError for peers that are unknown or cannot run as that many ranks."""
    ranks = arguments.ranks
    contenders = [hetero_contender(options, name, folder, ranks) for name in variants]
    for peer in arguments.peers:
        python = arguments.peer_python
        contenders += peer_contenders(peer, workload, folder, python, ranks, options.dtype)
    return contenders


def write_workload(options: TrainOptions, path: Path, ranks: int = 1) -> None:
    """Writes what `hetero train` would do with these options, batches and rates included."""
    corpus = load_corpus(options.data, options.seq_len, options.seed)
    tokens_path = path.with_name("tokens.bin")
    with tokens_path.open("wb") as stream:
        for _ in range(options.steps * options.accumulate * ranks):
            batch = corpus.batch(options.batch_size).to(torch.uint8)
            stream.write(batch.numpy().tobytes())
    Workload(
        model_config=model_config(options).to_diff_dict(),
        tokens_file=str(tokens_path),
        lrs=[
            options.lr * lr_factor(step, options.warmup, options.steps, options.schedule)
            for step in range(options.steps)
        ],
        accumulate=options.accumulate,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        betas=ADAM_BETAS,
        weight_decay=options.weight_decay,
        clip=options.clip,
        seed=options.seed,
        threads=options.threads or max(1, torch.get_num_threads() // ranks),
        ranks=ranks,
        shard_ranks=options.shard_ranks,
    ).write(path)


PHASES = ("step_s", "forward_s", "backward_s", "optimizer_s")


def sample_of(figures: Mapping[str, Any], skip_steps: int) -> Sample:
    """The figures of a run; of seconds the medians of all steps but the first ones."""
    # At least one step stays, however many are to be left out.
    counted = slice(min(skip_steps, len(figures["step_s"]) - 1), None)
    peaks, moved = figures["peak_rss_by_rank_bytes"], figures["bytes_per_step"]
    sample = {phase: statistics.median(figures[phase][counted]) for phase in PHASES}
    sample |= {
        "peak_rss_max_bytes": max(peaks),
        "peak_rss_sum_bytes": sum(peaks),
        "read_bytes": moved["disk_read"],
        "written_bytes": moved["disk_write"],
        "loss": figures["losses"][-1],
        **{key: figures[key] for key in ("ranks", "threads", "tokens_per_s")},
        **{key: figures[key] for key in EXCHANGED if figures[key] is not None},
    }
    if "sent_bytes_per_host" in figures:  # of the busiest, its start included
        sent = max(figures["sent_bytes_per_host"])
        sample["host_sent_bytes_per_step"] = sent // len(figures["step_s"])
    return sample


EXCHANGED = ("sent_bytes_per_step", "received_bytes_per_step", "gather_wait_s_per_step")


def summarize(
    rounds: Rounds, runs: Mapping[str, Sequence[Mapping[str, Any]]], main_name: str
) -> dict[str, Any]:
    """The keys of `hetero train --json` for the main variant, and every contender's figures.

    A contender's figures are those of its run with the median step time (of an even number of runs
    the faster one of the two in the middle), with the medians of all runs in "measured"; its
    `ratio_to` is its step time over that of each peer that finished: the median of the rounds'.
    """
    peers = [name for name in rounds.samples if not name.startswith("hetero ")]
    for peer in peers:
        rounds.compare(peer, "step_s", f"of {peer}")
    contenders: dict[str, dict[str, Any]] = {
        name: {"status": "missing" if name in rounds.missing else "failed", "error": error}
        for name, error in rounds.failed.items()
    }
    for name, own in rounds.figures().items():
        step_s = rounds.values(name, "step_s")
        contenders[name] = {
            "status": "finished",
            "error": None,
            **runs[name][step_s.index(statistics.median_low(step_s))],
            **{f"median_{phase}": own[phase]["median"] for phase in PHASES},
            "measured": own,
            "ratio_to": {peer: own[f"of {peer}"]["median"] for peer in peers if peer != name},
        }
    contenders = {name: contenders[name] for name in runs}
    notes = left_out(rounds.failed)
    return {**contenders[main_name], "main": main_name, "contenders": contenders, "notes": notes}


def _title(result: Mapping[str, Any]) -> str:
    return f"bench.train, median of {result['rounds']} rounds (least-most)"


def _rows(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: found.get("measured", {}) for name, found in result["contenders"].items()}


def _rows_of_ranks(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    rows = {name: row for name, row in _rows(result).items() if row}
    return rows if any(row["ranks"]["median"] > 1 for row in rows.values()) else {}


def show(result: Mapping[str, Any]) -> Iterator[str]:
    """What all did, and what ranks did, if there are several."""
    names = list(_rows(result))
    peers = [Column(f"/ {name}", f"of {name}", number()) for name in names]
    return shown(Table(_title, _rows, (*COLUMNS, *peers)), OF_RANKS)(result)


COLUMNS = (
    Column("step s", "step_s", ranged()),
    Column("fwd", "forward_s", number()),
    Column("bwd", "backward_s", number()),
    Column("opt", "optimizer_s", number()),
    Column("peak RSS", "peak_rss_max_bytes", size),
    Column("NVMe read", "read_bytes", size),
    Column("written", "written_bytes", size),
    Column("loss", "loss", number(3)),
)
OF_RANKS = Table(
    lambda _: "ranks; sent, received and waited in a step of one",
    _rows_of_ranks,
    (
        Column("ranks", "ranks", number(0)),
        Column("threads each", "threads", number(0)),
        Column("tokens/s of all", "tokens_per_s", number(0)),
        Column("peak RSS of one", "peak_rss_max_bytes", size),
        Column("of all", "peak_rss_sum_bytes", size),
        Column("sent", "sent_bytes_per_step", size),
        Column("received", "received_bytes_per_step", size),
        Column("a host sent", "host_sent_bytes_per_step", size),
        Column("waited for gathers s", "gather_wait_s_per_step", number()),
    ),
)


def _exit_code(summary: dict[str, Any]) -> int:
    """0 if every contender that is installed ran."""
    return int(any(c["status"] == "failed" for c in summary["contenders"].values()))


PROGRAM = Program(
    "bench.train",
    __doc__,
    OPTIONS,
    measure,
    show,
    lambda parser: add_train_arguments(parser, DEFAULTS),
    _exit_code,
)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
