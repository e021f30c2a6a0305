"""The largest model that trains within a budget for the whole process, everything else on NVMe.

usage: python -m bench.ladder [--budgets 1GiB,2GiB,4GiB,8GiB] [--nvme-path DIR] [--json]
                              [--peers deepspeed] [--peer-python PY]
       python -m bench.ladder --only-rss 3GiB --model gpt2-1.3b
       python -m bench.ladder --beyond-ram 2

Shapes are GPT-2's, 64 elements a head, with more and wider layers. Of those that the disk holds
(18 bytes a parameter while the model is built, 14 then) and for which the placement says that the
budget is enough, the largest are trained for some steps, each in a process of its own that the
operating system limits, until one's peak of resident memory, construction included, is within the
budget. (MALLOC says what glibc is told, here and for peers.) That of DeepSpeed's ZeRO-3 with
parameters and optimizer on NVMe is taken for growing shapes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from bench.contenders import peer_contenders, run_contender
from bench.limited_train import LIMITS, MARGIN_BYTES, Spec, outside_bytes
from bench.machine import ROOT, describe_machine
from bench.program import (
    add_json_argument,
    add_peer_arguments,
    chosen_peers,
    command_line,
    names,
    parse_size,
    print_header,
    run_program,
)
from bench.train import write_workload
from hetero.arrangement import arrange
from hetero.config import Config
from hetero.training.job import make_optimizer
from hetero.training.models import (
    GPT2_VOCAB_SIZE,
    MODEL_NAMES,
    build_model,
    model_config,
)
from hetero.training.options import TrainOptions
from offload.directories import free_bytes
from offload.errors import BudgetError
from offload.sizes import format_bytes

PEERS = ("deepspeed",)

WIDTHS = (256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096, 5120)
LAYERS = (2, 4, 6, 8, 12, 18, 24, 30, 36, 48, 60, 72, 84, 96)  # GPT-3 has 96
WIDTH_PER_LAYER = (8, 128)  # GPT-2's are 33 to 64, GPT-3's 64 to 128
HEAD_WIDTH = 64

# Bytes a parameter: fp32 until it finds its place, and bf16 parameter, gradient and record.
BUILDING_BYTES, TRAINING_BYTES = 4, 14
USUAL_STATE_BYTES = 16
DISK_SHARE = 0.95  # of what is free

# The estimate of what is beside the engine may be too high by this share of it; a run decides.
OUTSIDE_SLACK = 0.25
# Limits count what is mapped and not touched, too: while a model is built its arenas are there
# whole, and its parameters still where they were. So a limit guards against what gets out of hand;
# what proves the budget is the peak of resident memory, which the kernel keeps.
LIMIT_PER_BUDGET = 2
ATTEMPTS = 3  # at one shape, each with less for the engine by what was too much

# glibc would keep blocks of up to 32 MiB in heaps of several threads, where what is freed between
# others stays resident: parameters that leave RAM while a model is built, gradients. Peers get the
# same.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}

# Small enough that the least that DeepSpeed takes is found.
PEER_SHAPES = (
    (2, 64),
    (4, 128),
    (4, 256),
    (6, 512),
    (12, 512),
    (12, 768),
    (18, 768),
    (24, 768),
    (24, 1024),
    (36, 1024),
    (36, 1280),
    (24, 2048),
)

RunChild = Callable[[Spec], dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A GPT-2."""

    layers: int
    width: int

    def config(self, vocab_size: int, seq_len: int) -> dict[str, Any]:
        """What transformers' configuration takes."""
        return {
            "model_type": "gpt2",
            "n_layer": self.layers,
            "n_embd": self.width,
            "n_head": max(1, self.width // HEAD_WIDTH),
            "vocab_size": vocab_size,
            "n_positions": seq_len,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


def params_of(config: Mapping[str, Any]) -> int:
    """Parameters of a GPT-2 configuration, the tied embedding once."""
    w, layers = int(config["n_embd"]), int(config["n_layer"])
    rows = int(config["vocab_size"]) + int(config["n_positions"])
    return rows * w + layers * (12 * w * w + 13 * w) + 2 * w


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 when something about the input is wrong."""
    arguments = _parser().parse_args(argv)

    def measure() -> dict[str, Any]:
        result = run(arguments)
        return {
            "machine": describe_machine(),
            "command": command_line("bench.ladder", argv),
            **result,
        }

    return run_program("bench.ladder", measure, show, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ladder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--budgets",
        default="1GiB,2GiB,4GiB,8GiB",
        metavar="LIST",
        help="peaks of the whole process's resident memory (default: %(default)s)",
    )
    parser.add_argument(
        "--only-rss",
        metavar="BYTES",
        help="one budget, for one model (--model), or with --beyond-ram",
    )
    parser.add_argument("--model", choices=MODEL_NAMES, metavar="NAME", help="of --only-rss")
    parser.add_argument(
        "--beyond-ram",
        type=float,
        metavar="FACTOR",
        help="one model whose state, at 16 bytes a parameter, is FACTOR times this machine's RAM;"
        " within --only-rss (default: a third of RAM)",
    )
    parser.add_argument(
        "--most-params", metavar="N", help="of shapes, such as 2e9 (default: what the disk holds)"
    )
    parser.add_argument(
        "--nvme-path", default=".", metavar="DIR", help="folder on NVMe (default: this one)"
    )
    for name, default, what in (
        ("--vocab-size", GPT2_VOCAB_SIZE, "of the shapes"),
        ("--seq-len", 128, "tokens per sequence"),
        ("--batch-size", 1, "sequences per step"),
        ("--steps", 3, "of each model"),
        ("--tries", 4, "shapes that are trained for a budget, at most"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="backward computes forward once more (default: on)",
    )
    parser.add_argument(
        "--limit",
        choices=(*LIMITS, "none"),
        default="data",
        help=f"what the operating system limits, to {LIMIT_PER_BUDGET} times the budget: data is"
        " RLIMIT_DATA, address RLIMIT_AS (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="of one training (default: %(default).0f)",
    )
    add_peer_arguments(parser, PEERS, default="none")
    add_json_argument(parser)
    return parser


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rungs. Raises ValueError for options that cannot work."""
    for name in ("vocab_size", "batch_size", "steps", "tries"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
    if arguments.vocab_size < 256 or arguments.seq_len < 2:
        raise ValueError("--vocab-size must be at least 256 and --seq-len at least 2")
    if (arguments.model is not None) and arguments.only_rss is None:
        raise ValueError("--model is for --only-rss BYTES; give that too")
    if arguments.only_rss is not None and arguments.model is None and arguments.beyond_ram is None:
        raise ValueError("--only-rss needs --model NAME or --beyond-ram FACTOR")
    if not Path(arguments.nvme_path).is_dir():
        raise ValueError(f"--nvme-path {arguments.nvme_path} is not a folder")
    peers = chosen_peers(arguments.peers, PEERS)
    with tempfile.TemporaryDirectory(prefix="hetero-ladder-", dir=arguments.nvme_path) as folder:
        ladder = Ladder(arguments, Path(folder), lambda spec: _run_child(spec, arguments, folder))
        if arguments.model is not None:
            rungs = [ladder.only(arguments.model, parse_size("--only-rss", arguments.only_rss))]
        elif arguments.beyond_ram is not None:
            rungs = [ladder.beyond_ram(arguments.beyond_ram)]
        else:
            budgets = sorted(parse_size("--budgets", b) for b in names(arguments.budgets))
            rungs = list(ladder.rungs(budgets))
        found = peer_runs(arguments, folder, max(r["budget_bytes"] for r in rungs)) if peers else []
    for rung in rungs:
        within = [p for p in found if p["peak_rss_bytes"] <= rung["budget_bytes"]]
        rung["peer"] = max(within, key=lambda p: p["params"], default=None)
    return {
        "rungs": rungs,
        "peer_runs": found,
        "framework_bytes": ladder.framework_bytes,
        "limit": arguments.limit,
        "environment": MALLOC,
        "disk_free_bytes": free_bytes(arguments.nvme_path),
        "checkpointing": arguments.checkpointing,
        "tokens": [arguments.batch_size, arguments.seq_len],
    }


class Ladder:
    """Finds and proves the rungs; `run_child` trains what a Spec says, in a process of its own."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, run_child: RunChild) -> None:
        self._arguments = arguments
        self._run_child = run_child
        self._disk_bytes = int(free_bytes(str(folder)) * DISK_SHARE)
        self._most_params = math.inf
        if arguments.most_params is not None:
            self._most_params = float(arguments.most_params)
        self._spec = Spec(
            model_config={},
            rss_bytes=0,
            nvme_path=str(folder),
            steps=arguments.steps,
            seq_len=arguments.seq_len,
            batch_size=arguments.batch_size,
            checkpointing=arguments.checkpointing,
        )
        _tell("what the framework takes")
        small = Shape(1, HEAD_WIDTH).config(256, arguments.seq_len)
        found = run_child(replace(self._spec, model_config=small, rss_bytes=4 << 30, steps=1))
        if found["status"] != "trained":
            raise ValueError(f"the smallest of models does not train here: {found['error']}")
        self.framework_bytes = int(found["framework_bytes"])

    def rungs(self, budgets: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The largest model of each budget, from the smallest budget on."""
        last: dict[str, Any] | None = None
        for budget in budgets:
            best = next(self.candidates(budget), None)
            if last is not None and best == last.get("config"):
                yield {**last, "budget_bytes": budget, "proven_at_bytes": last["proven_at_bytes"]}
                continue
            rung = self.rung(budget)
            if rung["status"] == "trained":
                last = rung
            yield rung

    def rung(self, budget: int) -> dict[str, Any]:
        """The largest model that trains within `budget`."""
        refused: list[str] = []
        too_wide = math.inf  # memory is a matter of width: more layers take disk
        for config in self.candidates(budget):
            if len(refused) == self._arguments.tries:
                break
            if config["n_embd"] >= too_wide:
                continue
            rung = self.prove(config, budget)
            if rung["status"] == "trained":
                return {**rung, "limited_by": self._limit_of(config), "refused": refused}
            refused.append(f"{_shape_name(config)}: {rung['error']}")
            too_wide = config["n_embd"]
        return {"budget_bytes": budget, "status": "none", "refused": refused}

    def only(self, model: str, budget: int) -> dict[str, Any]:
        """A model by name."""
        options = TrainOptions(
            model=model, vocab_size=self._arguments.vocab_size, seq_len=self._arguments.seq_len
        )
        config = model_config(options).to_diff_dict()
        if config.get("model_type") != "gpt2":
            raise ValueError(f"--model {model}: only GPT-2's shapes have a formula of memory here")
        return self.prove(config, budget)

    def beyond_ram(self, factor: float) -> dict[str, Any]:
        """The smallest shape whose usual state is `factor` times RAM."""
        ram = psutil.virtual_memory().total
        given = self._arguments.only_rss
        budget = ram // 3 if given is None else parse_size("--only-rss", given)
        least = factor * ram / USUAL_STATE_BYTES
        found = list(takewhile(lambda c: params_of(c) >= least, self.candidates(budget)))
        if not found:
            need = (BUILDING_BYTES + TRAINING_BYTES) * least
            raise ValueError(
                f"--beyond-ram {factor}: no shape of {least / 1e9:.1f}G parameters trains within"
                f" {format_bytes(budget)} and the {format_bytes(self._disk_bytes)} of disk that"
                f" there are; it takes {format_bytes(int(need))} of disk"
            )
        return {**self.prove(found[-1], budget), "ram_bytes": ram, "factor": factor}

    def prove(self, config: dict[str, Any], budget: int) -> dict[str, Any]:
        """Trains it, with less for the engine each time the process took too much."""
        kind = self._arguments.limit
        limits = {} if kind == "none" else {kind: LIMIT_PER_BUDGET * budget}
        spec = replace(self._spec, model_config=config, rss_bytes=budget, limits=limits)
        result: dict[str, Any] = {}
        for _ in range(ATTEMPTS):
            _tell(f"{_shape_name(config)}, {params_of(config):,} parameters in"
                  f" {format_bytes(budget)}")  # fmt: skip
            result = self._run_child(spec)
            over = int(result.get("peak_rss_bytes", 0)) - budget
            if result["status"] == "trained" and over <= 0:
                break
            if result["status"] == "refused" or "host_memory" not in result:
                break
            if result["status"] == "trained":
                error = f"the peak was {format_bytes(over)} above the budget"
                result |= {"status": "failed", "error": error}
            _tell(f"  {result['error']}")
            less = max(over, 0) + MARGIN_BYTES
            spec = replace(spec, host_memory=int(result["host_memory"]) - less)
            if spec.host_memory is not None and spec.host_memory <= 0:
                break
        return {
            "budget_bytes": budget,
            "proven_at_bytes": budget,
            "config": config,
            "shape": _shape_name(config),
            "params": params_of(config),
            "state_bytes": USUAL_STATE_BYTES * params_of(config),
            **result,
        }

    def candidates(self, budget: int) -> Iterator[dict[str, Any]]:
        """Shapes that the placement says fit, the largest first."""
        for config in self._shapes():
            spec = replace(self._spec, model_config=config)
            outside = int(outside_bytes(spec) * (1 - OUTSIDE_SLACK))
            host = budget - self.framework_bytes - outside
            if host > 0 and fits(config, host, self._disk_bytes, self._spec):
                yield config

    def _shapes(self) -> list[dict[str, Any]]:
        """All that the disk holds, the largest first."""
        arguments = self._arguments
        made = [
            Shape(layers, width).config(arguments.vocab_size, arguments.seq_len)
            for width in WIDTHS
            for layers in LAYERS
            if WIDTH_PER_LAYER[0] <= width / layers <= WIDTH_PER_LAYER[1]
        ]
        per_param = BUILDING_BYTES + TRAINING_BYTES
        held = [c for c in made if params_of(c) <= min(self._most_params,
                                                       self._disk_bytes / per_param)]  # fmt: skip
        return sorted(held, key=params_of, reverse=True)

    def _limit_of(self, config: dict[str, Any]) -> str:
        """Why no larger one than this was taken."""
        if config != self._shapes()[0]:
            return "RAM"
        held = self._disk_bytes / (BUILDING_BYTES + TRAINING_BYTES)
        return "disk" if held < self._most_params else "--most-params"


def fits(config: dict[str, Any], host_bytes: int, disk_bytes: int, spec: Spec) -> bool:
    """Whether the placement finds room for the model, of which nothing is made."""
    from transformers import AutoConfig

    # It is made in fp32. (And a quick answer for most of what does not fit.)
    if host_bytes < 4 * int(config["n_embd"]) * int(config["vocab_size"]):
        return False
    options = TrainOptions(policy="nvme", dtype=spec.dtype)
    with torch.device("meta"):
        model = build_model(AutoConfig.for_model(**config))
        made = Config(
            placement_policy="nvme",
            host_memory=host_bytes,
            nvme_path=spec.nvme_path,
            dtype=spec.dtype,
        )
        try:
            arrange(
                model, made, make_optimizer(options, model).dtypes(made), host_bytes, disk_bytes
            )
        except BudgetError:
            return False
    return True


def _run_child(spec: Spec, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    path = Path(folder) / "spec.json"
    spec.write(path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.limited_train", str(path)],
            cwd=ROOT,
            env={**os.environ, **MALLOC},
            capture_output=True,
            text=True,
            timeout=arguments.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "error": f"not done after {arguments.timeout:.0f} s"}
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else "it printed nothing"
        return {"status": "failed", "error": f"exit code {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def peer_runs(arguments: argparse.Namespace, folder: str, most_bytes: int) -> list[dict[str, Any]]:
    """DeepSpeed's peak of resident memory for growing shapes, until it passes `most_bytes`."""
    found: list[dict[str, Any]] = []
    for layers, width in PEER_SHAPES:
        config = Shape(layers, width).config(arguments.vocab_size, arguments.seq_len)
        _tell(f"DeepSpeed: {_shape_name(config)}, {params_of(config):,} parameters")
        config_path = Path(folder) / "model.json"
        config_path.write_text(json.dumps(config))
        options = TrainOptions(
            config=str(config_path),
            steps=arguments.steps,
            seq_len=arguments.seq_len,
            batch_size=arguments.batch_size,
            warmup=0,
        )
        workload = Path(folder) / "workload.json"
        write_workload(options, workload, lean=arguments.checkpointing)
        contender = next(
            c
            for c in peer_contenders("deepspeed", workload, Path(folder), arguments.peer_python)
            if c.name == "deepspeed nvme"
        )
        outcome = run_contender(contender, arguments.timeout, MALLOC)
        if outcome.status != "finished":
            _tell(f"  {outcome.status}: {outcome.error}")
            break
        peak = max(outcome.figures["peak_rss_by_rank_bytes"])
        found.append(
            {
                "shape": _shape_name(config),
                "params": params_of(config),
                "peak_rss_bytes": peak,
                "step_s": outcome.figures["step_s"],
            }
        )
        if peak > most_bytes:
            break
    return found


def _shape_name(config: Mapping[str, Any]) -> str:
    return f"{config['n_layer']} x {config['n_embd']}"


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the table: a line per budget."""
    print_header(result, console)
    batch, seq_len = result["tokens"]
    table = Table(
        title=f"bench.ladder: peak RSS of the whole process, limit {result['limit']}; {batch} x"
        f" {seq_len} tokens{', checkpointing' if result['checkpointing'] else ''}; the framework"
        f" takes {format_bytes(result['framework_bytes'])}",
        title_justify="left",
    )
    for heading in ("budget", "layers x width", "parameters", "16 B each", "peak RSS", "for state",
                    "built s", "step s", "NVMe a step", "limited by", "DeepSpeed"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    notes = []
    for rung in result["rungs"]:
        peer = rung.get("peer")
        theirs = "" if not result["peer_runs"] else "none"
        if peer is not None:
            theirs = f"{peer['params'] / 1e6:.0f}M"
        budget = format_bytes(rung["budget_bytes"])
        if rung["status"] != "trained":
            table.add_row(budget, rung["status"], *[""] * 8, theirs)
            notes += [f"{budget}: {rung['error']}"] if rung.get("error") else []
        else:
            table.add_row(
                budget,
                rung["shape"],
                f"{rung['params'] / 1e6:,.0f}M",
                format_bytes(rung["state_bytes"]),
                format_bytes(rung["peak_rss_bytes"]),
                format_bytes(rung["host_memory"]),
                f"{rung['constructed_s']:.0f}",
                f"{min(rung['step_s']):.1f}",
                format_bytes(rung["nvme_bytes_per_step"]),
                rung.get("limited_by", ""),
                theirs,
            )
        notes += [f"{budget}: not {refused}" for refused in rung.get("refused", [])]
    console.print(table)
    for rung in result["rungs"]:
        if "factor" in rung and rung["status"] == "trained":
            share = rung["state_bytes"] / rung["ram_bytes"]
            notes.append(f"the state is {share:.2f} times the machine's RAM")
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _tell(text: str) -> None:
    print(f"bench.ladder: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
