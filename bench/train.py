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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.harness.contenders import (
    PEERS,
    Contender,
    Outcome,
    hetero_contender,
    peer_contenders,
    run_contender,
)
from bench.harness.hosts import Hosts, parse_rate
from bench.harness.program import (
    SECONDS,
    Kind,
    Option,
    Program,
    names,
    peer_options,
    titled,
    whole,
)
from bench.peers.training.workload import Workload
from hetero.cli.job.data import load_corpus
from hetero.cli.job.models import model_config
from hetero.cli.job.optimization import ADAM_BETAS, lr_factor
from hetero.cli.job.options import TrainOptions, add_train_arguments, config_path
from offload.memory.sizes import format_bytes

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


OPTIONS = (
    Option("--rounds", "1", "runs of every contender, in turns", whole()),
    Option("--ranks", "1", "processes of each contender; --threads is of each", whole()),
    Option(
        "--hosts",
        None,
        "network namespaces that share the ranks evenly (default: ranks of one machine)",
        whole(),
    ),
    Option(
        "--rate",
        "1gbit",
        "of each host's link: a number of mbit or gbit per second",
        Kind("RATE", lambda option, text: parse_rate(text)),
    ),
    Option("--variants", None, "policies to run (default: --policy if given, else cpu,nvme)"),
    *peer_options(PEERS, default="none"),
    Option("--skip-steps", "2", "first steps left out of the medians", whole(0)),
    Option("--timeout", "1800", "limit of one contender", SECONDS),
)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all contenders."""
    options, variants = _options(arguments)
    rounds = run(options, variants, arguments)
    return summarize(rounds, f"hetero {options.policy}", arguments.skip_steps)


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


def run(
    options: TrainOptions, variants: list[str], arguments: argparse.Namespace
) -> list[list[Outcome]]:
    """The outcomes of each round, in one order; a contender that failed once is not run again.

    Its last outcome then stands for it in the rounds to come. What contenders write stays in the
    run folder, in a folder per round.
    """
    folder = Path(options.run_dir or time.strftime("runs/bench-%Y%m%d-%H%M%S"))
    with ExitStack() as stack:
        hosts = None
        if arguments.hosts is not None:
            hosts = stack.enter_context(Hosts(arguments.hosts, arguments.rate))
        return _rounds(options, variants, arguments, folder, hosts)


def _rounds(
    options: TrainOptions,
    variants: list[str],
    arguments: argparse.Namespace,
    folder: Path,
    hosts: Hosts | None,
) -> list[list[Outcome]]:
    workload = folder / "workload.json"
    rounds: list[list[Outcome]] = []
    for number in range(1, arguments.rounds + 1):
        round_folder = folder / f"round-{number}"
        contenders = _contenders(options, variants, arguments, workload, round_folder)
        round_folder.mkdir(parents=True, exist_ok=True)
        if number == 1:
            write_workload(options, workload, arguments.ranks)
        outcomes = {}
        first = (number - 1) % len(contenders)
        for place in (*range(first, len(contenders)), *range(first)):
            contender = contenders[place]
            if rounds and rounds[-1][place].status != "finished":
                outcomes[place] = rounds[-1][place]
                continue
            print(f"[round {number}/{arguments.rounds}] {contender.name}", end=": ",
                  file=sys.stderr, flush=True)  # fmt: skip
            outcome = run_contender(contender, arguments.timeout, hosts=hosts)
            said = outcome.error
            if said is None:
                said = f"{_steady_s(outcome, 'step_s', arguments.skip_steps):.3f} s per step"
            print(outcome.status, said, sep=", ", file=sys.stderr, flush=True)
            outcomes[place] = outcome
        rounds.append([outcomes[place] for place in range(len(contenders))])
    return rounds


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


def write_workload(options: TrainOptions, path: Path, ranks: int = 1, lean: bool = False) -> None:
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
        lean=lean,
    ).write(path)


def _steady_s(outcome: Outcome, key: str, skip_steps: int) -> float:
    """The median of a list of seconds per step, without the first ones."""
    seconds: list[float] = outcome.figures[key]
    # At least one step stays, however many are to be left out.
    return statistics.median(seconds[min(skip_steps, len(seconds) - 1) :])


def summarize(rounds: Sequence[list[Outcome]], main_name: str, skip_steps: int) -> dict[str, Any]:
    """The keys of `hetero train --json` for the main variant, and every contender's figures.

    `rounds` have the same contenders in the same order. A contender's figures are those of its run
    with the median step time (of an even number of runs the faster one of the two in the middle),
    its `round_step_s` the median step time of each of its runs. Its `ratio_to` is its median step
    time over that of each peer that finished in all rounds: the median of the rounds' ratios.
    """
    contenders: dict[str, dict[str, Any]] = {}
    for runs in zip(*rounds, strict=True):
        broken = next((outcome for outcome in runs if outcome.status != "finished"), None)
        if broken is not None:
            contenders[broken.name] = {"status": broken.status, "error": broken.error}
            continue
        step_s = [_steady_s(outcome, "step_s", skip_steps) for outcome in runs]
        middle = runs[step_s.index(statistics.median_low(step_s))]
        peaks = middle.figures["peak_rss_by_rank_bytes"]
        contenders[middle.name] = {
            "status": "finished",
            "error": None,
            **middle.figures,
            **{
                f"median_{key}": _steady_s(middle, key, skip_steps)
                for key in ("step_s", "forward_s", "backward_s", "optimizer_s")
            },
            "round_step_s": step_s,
            "peak_rss_max_bytes": max(peaks),
            "peak_rss_sum_bytes": sum(peaks),
        }
    finished = {name: c for name, c in contenders.items() if c["status"] == "finished"}
    for name, figures in finished.items():
        figures["ratio_to"] = {
            peer: statistics.median(
                own / theirs
                for own, theirs in zip(
                    figures["round_step_s"], finished[peer]["round_step_s"], strict=True
                )
            )
            for peer in finished
            if peer != name and not peer.startswith("hetero ")
        }
    return {
        **contenders[main_name],
        "main": main_name,
        "rounds": len(rounds),
        "skipped_steps": skip_steps,
        "contenders": contenders,
    }


def show(summary: dict[str, Any]) -> Iterator[str]:
    """One line per contender, and another about its ranks if there are several."""
    finished = {n: c for n, c in summary["contenders"].items() if c["status"] == "finished"}
    peers = [name for name in finished if not name.startswith("hetero ")]
    title = "bench.train"
    if summary["rounds"] > 1:
        title += f", {summary['rounds']} rounds; step s: the median round (all of them)"
    rows = [["contender", "step s", "fwd", "bwd", "opt", "peak RSS", "NVMe read", "written",
             "loss", *(f"x {peer}" for peer in peers)]]  # fmt: skip
    notes = []
    for name, figures in summary["contenders"].items():
        if figures["status"] != "finished":
            rows.append([name, figures["status"], *[""] * (len(rows[0]) - 2)])
            notes.append(f"{name}: {figures['error']}")
            continue
        moved, every = figures["bytes_per_step"], figures["round_step_s"]
        all_of_them = f" ({', '.join(f'{s:.2f}' for s in every)})" if len(every) > 1 else ""
        rows.append(
            [
                name,
                f"{figures['median_step_s']:.2f}{all_of_them}",
                *(f"{figures[f'median_{p}_s']:.2f}" for p in ("forward", "backward", "optimizer")),
                format_bytes(figures["peak_rss_max_bytes"]),
                format_bytes(moved["disk_read"]),
                format_bytes(moved["disk_write"]),
                f"{figures['losses'][-1]:.3f}",
                *(f"{r:.2f}" if (r := figures["ratio_to"].get(p)) else "" for p in peers),
            ]
        )
    yield titled(title, rows)
    if any(figures["ranks"] > 1 for figures in finished.values()):
        yield titled("ranks; sent, received and waited in a step of one", _of_ranks(finished))
    yield from notes


def _of_ranks(finished: dict[str, dict[str, Any]]) -> list[list[str]]:
    """What all ranks did together, and what one exchanged in a step as far as it is known."""
    rows = [["contender", "ranks", "threads each", "tokens/s of all", "peak RSS of one", "of all",
             "sent", "received", "a host sent", "waited for gathers s"]]  # fmt: skip
    for name, figures in finished.items():
        wait_s = figures["gather_wait_s_per_step"]
        moved = (figures[f"{verb}_bytes_per_step"] for verb in ("sent", "received"))
        # Bytes that the busiest host sent, its start included.
        hosts = figures.get("sent_bytes_per_host")
        rows.append(
            [
                name,
                str(figures["ranks"]),
                str(figures["threads"]),
                f"{figures['tokens_per_s']:.0f}",
                format_bytes(figures["peak_rss_max_bytes"]),
                format_bytes(figures["peak_rss_sum_bytes"]),
                *("" if nbytes is None else format_bytes(nbytes) for nbytes in moved),
                format_bytes(max(hosts) // len(figures["step_s"])) if hosts else "",
                "" if wait_s is None else f"{wait_s:.2f}",
            ]
        )
    return rows


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
