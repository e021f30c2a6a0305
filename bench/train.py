"""Step time and memory of the main job beside its peers, in turns on one machine.

usage: python -m bench.train [options of `hetero train`] [--rounds N] [--ranks N]
                             [--variants cpu,nvme] [--peers torch,ddp,fsdp2,deepspeed] [--json]

In a round every contender runs once, each round beginning with another one. Ratios are taken
within a round and their median counts; a contender's other figures are those of its run with the
median step time.

With --ranks N every contender is N processes on this machine, each with 1/N of the threads and
with micro-batches of its own: a step takes N x batch x seq x accumulate tokens. Rank r gets the
micro-batches r, r + N, r + 2 N, ... of those that one rank would get.

A variant is a policy, and options of `hetero train` that it alone has: "nvme --commit-every 1".
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.harness.program import Program, add_options, left_out, list_of, names_of, whole
from bench.harness.ranks import run_trial
from bench.harness.rounds import ContenderError, MissingError, Rounds, Sample, run_rounds
from bench.harness.tables import number, of_figures, ranged, size
from bench.peers.workload import Workload
from bench.work.job_steps import add_job_options, job_options
from hetero.job.data import load_corpus
from hetero.job.models import model_config
from hetero.job.optimization import ADAM_BETAS, lr_factor
from hetero.job.options import POLICIES, TrainOptions

# The modes of bench/peers/train.py that a peer is measured in.
MODES = {
    "torch": ("bf16", "autocast"),
    "ddp": ("bf16", "autocast"),
    "fsdp2": ("offload",),
    "deepspeed": ("cpu", "nvme"),
}
# Peers that are one process, and that are several.
ALONE, TOGETHER = ("torch",), ("ddp", "fsdp2")
DEEPSPEED_INSTALL = (
    "python -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers psutil numpy ninja"
    " setuptools deepspeed (and the system's libaio-dev), then --peer-python VENV/bin/python"
)
SWAP = "deepspeed-swap"  # a folder
PHASES = ("step_s", "forward_s", "backward_s", "optimizer_s")
EXCHANGED = ("sent_bytes_per_step", "received_bytes_per_step", "gather_wait_s_per_step")


def options(parser: argparse.ArgumentParser) -> None:
    add_job_options(parser, steps=8, policy=None)
    python = os.environ.get("BENCH_PEER_PYTHON", sys.executable)
    add_options(
        parser.add_argument_group("benchmark"),
        ("--rounds", whole(), "1", "runs of every contender, in turns"),
        ("--ranks", whole(), "1", "processes of each contender; --threads is of each"),
        ("--variants", list_of(_variant), None, "else --policy if given, or cpu,nvme"),
        ("--skip-steps", whole(0), "2", "first steps left out of the medians"),
        ("--timeout", float, "1800", "seconds of one contender"),
        ("--peers", names_of(MODES), "none", f"of {', '.join(MODES)}; or none"),
        ("--peer-python", str, python, "Python that has DeepSpeed"),
    )


def _variant(text: str) -> str:
    policy = text.partition(" ")[0]
    if policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise argparse.ArgumentTypeError(f"{text!r} begins with no policy; known: {known}")
    return text


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all contenders.

    What contenders say stays in the run folder, in a folder per round.
    """
    options = read_options(arguments)
    folder = Path(options.run_dir or time.strftime("runs/bench-%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)
    workload = folder / "workload.json"
    made = partial(contenders, options, arguments, workload)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in made(folder)}

    def turn(name: str) -> Sample:
        round_folder = folder / f"round-{len(runs[name]) + 1}"
        round_folder.mkdir(exist_ok=True)
        command, log = made(round_folder)[name], round_folder / f"{name.replace(' ', '-')}.log"
        try:
            found = run_contender(command, log, arguments.timeout, arguments.ranks)
        finally:  # as large as the model state
            for left in (round_folder / SWAP, *round_folder.glob("*/hetero-state")):
                shutil.rmtree(left, ignore_errors=True)
        runs[name].append(found)
        return sample_of(found, arguments.skip_steps)

    write_workload(options, workload, arguments.ranks)
    turns = {name: partial(turn, name) for name in runs}
    rounds = run_rounds(turns, arguments.rounds, warm_up=False)
    summary = summarize(rounds, runs, f"hetero {arguments.main}")
    return {**summary, "rounds": arguments.rounds, "skipped_steps": arguments.skip_steps}


def read_options(arguments: argparse.Namespace) -> TrainOptions:
    """The options of every contender, with the policy of the main variant; `variants` of the
    arguments become all of them, and `main` that one."""
    given = arguments.policy
    arguments.variants = arguments.variants or ([given] if given else ["cpu", "nvme"])
    arguments.main = given if given in arguments.variants else arguments.variants[-1]
    arguments.policy = arguments.main.partition(" ")[0]
    options = job_options(arguments)
    if options.threads is None:
        options = replace(options, threads=max(1, torch.get_num_threads() // arguments.ranks))
    return options


def contenders(
    options: TrainOptions, arguments: argparse.Namespace, workload: Path, folder: Path
) -> dict[str, list[str]]:
    """Commands by contenders' names, which say what they did on stdout.

    The options of each of hetero's are in a job file in `folder`. Raises ValueError for peers that
    cannot run as that many ranks.
    """
    made = {}
    for variant in arguments.variants:
        policy, *more = shlex.split(variant)
        name = variant.replace(" ", "")
        timeline = options.timeline
        if timeline:  # one each: they would write the same file
            timeline = str(Path(timeline).with_stem(f"{Path(timeline).stem}-{name}"))
        own = replace(
            options,
            policy=policy,
            host_memory=None if policy == "cpu" else options.host_memory,
            run_dir=str(folder / f"hetero-{name}"),
            json=True,
            timeline=timeline,
        )
        job = folder / f"hetero-{name}.json"
        job.write_text(json.dumps(own.as_dict()), encoding="utf-8")
        command = [sys.executable, "-m", "hetero.cli", "train", f"--config={job}", *more]
        made[f"hetero {variant}"] = command
    for peer in arguments.peers:
        other, instead = (ALONE, TOGETHER) if arguments.ranks > 1 else (TOGETHER, ALONE)
        if peer in other:
            words = " or ".join(instead)
            raise ValueError(f"--peers {peer} cannot be {arguments.ranks} ranks; name {words}")
        deepspeed = peer == "deepspeed"
        python = arguments.peer_python if deepspeed else sys.executable
        # Where the CPU has no bf16, computing in it takes many times as long.
        for mode in ("fp32",) if options.dtype == "fp32" and not deepspeed else MODES[peer]:
            swap = [str(folder / SWAP)] if deepspeed else []
            command = [python, "-m", "bench.peers.train", peer, str(workload), mode, *swap]
            made[f"{peer} {mode}"] = command
    return made


def run_contender(
    command: Sequence[str], log: Path, timeout_s: float, ranks: int = 1
) -> dict[str, Any]:
    """Runs it to its end, and returns its figures; its ranks' logs have what they print.

    Raises ContenderError.
    """
    found = run_trial(command, timeout_s, log_path=log, ranks=ranks)
    if found["status"] == "missing":
        raise MissingError(f"{found['error']}; install: {DEEPSPEED_INSTALL}")
    if found["status"] not in ("ended", "finished"):
        raise ContenderError(f"{found['error']} (all of it in {log})")
    return found


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


def sample_of(figures: Mapping[str, Any], skip_steps: int) -> Sample:
    """The figures of a run; of seconds the medians of all steps but the first ones."""
    # At least one step stays, however many are to be left out.
    counted = slice(min(skip_steps, len(figures["step_s"]) - 1), None)
    peaks, moved = figures["peak_rss_by_rank_bytes"], figures["bytes_per_step"]
    sample = {phase: statistics.median(figures[phase][counted]) for phase in PHASES}
    return sample | {
        "peak_rss_max_bytes": max(peaks),
        "peak_rss_sum_bytes": sum(peaks),
        "read_bytes": moved["disk_read"],
        "written_bytes": moved["disk_write"],
        "loss": figures["losses"][-1],
        **{key: figures[key] for key in ("ranks", "threads", "tokens_per_s")},
        **{key: figures[key] for key in EXCHANGED if figures[key] is not None},
    }


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
    found: dict[str, dict[str, Any]] = {
        name: {"status": "missing" if name in rounds.missing else "failed", "error": error}
        for name, error in rounds.failed.items()
    }
    for name, own in rounds.figures().items():
        step_s = rounds.values(name, "step_s")
        found[name] = {
            **runs[name][step_s.index(statistics.median_low(step_s))],
            "status": "finished",
            "error": None,
            **{f"median_{phase}": own[phase]["median"] for phase in PHASES},
            "measured": own,
            "ratio_to": {peer: own[f"of {peer}"]["median"] for peer in peers if peer != name},
        }
    found = {name: found[name] for name in runs}
    notes = left_out(rounds.failed)
    return {**found[main_name], "main": main_name, "contenders": found, "notes": notes}


COLUMNS = (
    ("step s", "step_s", ranged()),
    ("fwd", "forward_s", number()),
    ("bwd", "backward_s", number()),
    ("opt", "optimizer_s", number()),
    ("peak RSS", "peak_rss_max_bytes", size),
    ("NVMe read", "read_bytes", size),
    ("written", "written_bytes", size),
    ("loss", "loss", number(3)),
)
OF_RANKS = (
    ("ranks", "ranks", number(0)),
    ("threads each", "threads", number(0)),
    ("tokens/s of all", "tokens_per_s", number(0)),
    ("peak RSS of one", "peak_rss_max_bytes", size),
    ("of all", "peak_rss_sum_bytes", size),
    ("sent", "sent_bytes_per_step", size),
    ("received", "received_bytes_per_step", size),
    ("waited for gathers s", "gather_wait_s_per_step", number()),
)


def show(result: Mapping[str, Any]) -> Iterator[str]:
    """What all did, and what ranks did, if there are several."""
    rows = {name: found.get("measured", {}) for name, found in result["contenders"].items()}
    title = f"bench.train, median of {result['rounds']} rounds (least-most)"
    yield of_figures(title, rows, [*COLUMNS, *((f"/ {n}", f"of {n}", number()) for n in rows)])
    several = {name: row for name, row in rows.items() if row and row["ranks"]["median"] > 1}
    yield of_figures("ranks; sent, received and waited in a step of one", several, OF_RANKS)
    yield from result["notes"]


def _exit_code(summary: dict[str, Any]) -> int:
    """0 if every contender that is installed ran."""
    return int(any(c["status"] == "failed" for c in summary["contenders"].values()))


PROGRAM = Program("bench.train", __doc__, options, measure, show, _exit_code)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
