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
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

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
    add_peer_arguments,
    chosen_peers,
    names,
    program_parser,
    wide_console,
)
from bench.peers.training.workload import Workload
from hetero.cli.job.data import load_corpus
from hetero.cli.job.models import model_config
from hetero.cli.job.optimization import ADAM_BETAS, lr_factor
from hetero.cli.job.options import TrainOptions, add_train_arguments, config_path
from offload.errors import HeteroError
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


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every contender that is installed ran."""
    arguments = _parser().parse_args(argv)
    try:
        options, variants = _options(arguments)
        rounds = run(options, variants, arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, HeteroError, OSError) as error:
        print(f"bench.train: error: {error}", file=sys.stderr)
        return 2
    summary = summarize(rounds, f"hetero {options.policy}", arguments.skip_steps)
    if arguments.json:
        print(json.dumps(summary))
    else:
        print_table(summary)
    return 1 if any(c["status"] == "failed" for c in summary["contenders"].values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("bench.train", __doc__)
    add_train_arguments(parser, DEFAULTS)
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="runs of every contender, in turns (default: %(default)s)",
    )
    group.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="processes of each contender; --threads is of each (default: %(default)s)",
    )
    group.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="network namespaces that share the ranks evenly (default: ranks of one machine)",
    )
    group.add_argument(
        "--rate",
        type=parse_rate,
        default="1gbit",
        help="of each host's link: a number of mbit or gbit per second (default: %(default)s)",
    )
    group.add_argument(
        "--variants",
        metavar="LIST",
        help="policies of hetero to run (default: --policy if given, else cpu,nvme)",
    )
    add_peer_arguments(group, PEERS, default="none")
    group.add_argument(
        "--skip-steps",
        type=int,
        default=2,
        metavar="N",
        help="first steps left out of the medians (default: %(default)s)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="limit of one contender (default: %(default).0f)",
    )
    return parser


def _options(arguments: argparse.Namespace) -> tuple[TrainOptions, list[str]]:
    """The options of every contender, with the policy of the main variant, and all variants."""
    given = arguments.policy
    variants = names(arguments.variants or given or "cpu,nvme")
    if arguments.skip_steps < 0:
        raise ValueError(f"--skip-steps must be 0 or more, got {arguments.skip_steps}")
    for name in ("ranks", "rounds"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be 1 or more, got {getattr(arguments, name)}")
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
    for peer in chosen_peers(arguments.peers, PEERS):
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


def print_table(summary: dict[str, Any]) -> None:
    """Prints one line per contender on stdout, and another about its ranks if there are several."""
    contenders = summary["contenders"]
    peers = [name for name, c in contenders.items() if not name.startswith("hetero ")
             and c["status"] == "finished"]  # fmt: skip
    title = "bench.train"
    if summary["rounds"] > 1:
        title += f", {summary['rounds']} rounds; step s: the median round (all of them)"
    table = Table(title=title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("step s", "fwd", "bwd", "opt", "peak RSS", "NVMe read", "written", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for peer in peers:
        table.add_column(f"x {peer}", justify="right")
    notes = []
    for name, figures in contenders.items():
        if figures["status"] != "finished":
            table.add_row(name, figures["status"])
            notes.append(f"{name}: {figures['error']}")
            continue
        moved = figures["bytes_per_step"]
        every = figures["round_step_s"]
        table.add_row(
            name,
            f"{figures['median_step_s']:.2f}"
            + (f" ({', '.join(f'{s:.2f}' for s in every)})" if len(every) > 1 else ""),
            *(f"{figures[f'median_{part}_s']:.2f}" for part in ("forward", "backward",
                                                                "optimizer")),
            format_bytes(figures["peak_rss_max_bytes"]),
            format_bytes(moved["disk_read"]),
            format_bytes(moved["disk_write"]),
            f"{figures['losses'][-1]:.3f}",
            *(f"{figures['ratio_to'][peer]:.2f}" if peer in figures["ratio_to"] else ""
              for peer in peers),
        )  # fmt: skip
    console = wide_console()
    console.print(table)
    finished = {name: c for name, c in contenders.items() if c["status"] == "finished"}
    if any(figures["ranks"] > 1 for figures in finished.values()):
        console.print(_ranks_table(finished))
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _ranks_table(finished: dict[str, dict[str, Any]]) -> Table:
    """What all ranks did together, and what one exchanged in a step as far as it is known."""
    table = Table(title="ranks; sent, received and waited in a step of one", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("ranks", "threads each", "tokens/s of all", "peak RSS of one", "of all",
                    "sent", "received", "a host sent", "waited for gathers s"):  # fmt: skip
        table.add_column(heading, justify="right")
    for name, figures in finished.items():
        wait_s = figures["gather_wait_s_per_step"]
        moved = (figures[f"{verb}_bytes_per_step"] for verb in ("sent", "received"))
        table.add_row(
            name,
            str(figures["ranks"]),
            str(figures["threads"]),
            f"{figures['tokens_per_s']:.0f}",
            format_bytes(figures["peak_rss_max_bytes"]),
            format_bytes(figures["peak_rss_sum_bytes"]),
            *("" if nbytes is None else format_bytes(nbytes) for nbytes in moved),
            _per_step(figures.get("sent_bytes_per_host", ()), len(figures["step_s"])),
            "" if wait_s is None else f"{wait_s:.2f}",
        )
    return table


def _per_step(sent_bytes: Sequence[int], steps: int) -> str:
    """Bytes that the busiest host sent, its start included, for each step."""
    return format_bytes(max(sent_bytes) // steps) if sent_bytes else ""


if __name__ == "__main__":
    sys.exit(main())
