"""Steps whose saved tensors do not fit: ways to save memory, recomputing, and large batches.

usage: python -m bench.activations [--compare ways|recompute|batches] [--contenders LIST]
                                   [--rounds N] [--path DIR] [--json]

Contenders train the same GPT-2 in bf16 with AdamW, in turns, in a process of their own; medians are
of all rounds, ratios are taken within a round. "Peak" is the most resident memory that the kernel
has counted for the process; "beside" is that less what it held before the first step, when all
model state was there. Bytes are those that move to and from NVMe in a step.

ways       hetero and PyTorch with their ways to save memory, by default on the blocks of a GPT-2 of
           124 M. Losses of contenders of hetero, and of those of PyTorch, must be the same bits.
recompute  hetero with everything in RAM and no limit ("in memory"), and within --process-memory
           with each value of the option recompute; its loss is in tiles. The bound of a step is the
           larger one of two times: the step in memory (with --compute torch PyTorch's, which keeps
           its logits whole), and its bytes on NVMe at what the same I/O engine moves alone when it
           reads and writes in the step's proportion. What is recomputed is not in the bound.
batches    one micro-batch of --batch-size sequences a step, --factor of them, and one batch that is
           --factor times as large. The latter two see the same tokens. Parameters and gradients
           that are on NVMe move for each micro-batch, optimizer state once a step. So the bytes of
           state by which --factor micro-batches exceed one, over --factor - 1, are those of the
           parameters and gradients of one, and what one moves beside them is optimizer state.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bench.activations.training import Spec
from bench.activations.trial import POLICIES, model_shape, run_trial, tell
from bench.harness.program import (
    FOLDER,
    SECONDS,
    SIZE,
    TEXT,
    Option,
    Program,
    list_of,
    one_of,
    titled,
    whole,
)
from bench.work.gpt import VOCABULARY
from bench.work.transfers import HeteroTransfers, Shape, measured_file
from offload.memory.sizes import format_bytes

NAME = "bench.activations"
MIB = 1 << 20
# The engine of hetero.initialize() has these; the yardstick must not have less in flight.
DEPTH = 32
BLOCK_BYTES = 1 << 20
ONE, MICRO_BATCHES, LARGE = "one micro-batch", "micro-batches", "large batch"
IN_MEMORY = "in memory"


@dataclass(frozen=True)
class Comparison:
    """Contenders of one kind.

    Attributes:
        base: the one that the others' times are divided by.
        defaults: of options that are not given.
        specs: what each contender trains.
    """

    base: str
    defaults: dict[str, int]
    specs: Callable[[argparse.Namespace], dict[str, Spec]]


def _spec(arguments: argparse.Namespace, contender: str, batches: int = 1, **more: Any) -> Spec:
    options = {"placement_policy": arguments.policy, **more}
    if not contender.startswith("hetero"):
        options = {}
    return Spec(
        contender,
        vars(model_shape(arguments, arguments.seq_len, arguments.batch_size * batches)),
        arguments.vocabulary,
        options,
        steps=arguments.steps + arguments.skip_steps,
        skip_steps=arguments.skip_steps,
    )


def _ways(arguments: argparse.Namespace) -> dict[str, Spec]:
    limits = {"host_memory": arguments.host_memory}
    within = limits | {"activation_memory": arguments.activation_memory}
    hetero, checkpoints = "hetero-whole-loss", "hetero-whole-loss-checkpoints"
    return {
        "torch": _spec(arguments, "torch"),
        "torch-checkpoints": _spec(arguments, "torch-checkpoints"),
        "torch-on-cpu": _spec(arguments, "torch-on-cpu"),
        "hetero-off": _spec(arguments, hetero, **limits),
        "hetero": _spec(arguments, hetero, **within),
        "hetero-checkpoints": _spec(arguments, checkpoints, **within),
    }


def _recompute(arguments: argparse.Namespace) -> dict[str, Spec]:
    specs = {IN_MEMORY: _spec(arguments, arguments.compute, placement_policy="cpu")}
    for recompute in ("auto", "none", "all"):
        within = {"recompute": recompute, "process_memory": arguments.process_memory}
        specs[recompute] = _spec(arguments, "hetero", **within)
    return specs


def _batches(arguments: argparse.Namespace) -> dict[str, Spec]:
    given = ("recompute", "host_memory", "activation_memory")
    options = {name: getattr(arguments, name) for name in given}
    factor = arguments.factor
    micro_batches = _spec(arguments, "hetero", factor, **options)
    return {
        ONE: _spec(arguments, "hetero", **options),
        MICRO_BATCHES: replace(micro_batches, micro_batches=factor),
        LARGE: micro_batches,
    }


_MEDIUM = {"layers": 24, "width": 1024, "heads": 16, "vocabulary": VOCABULARY, "batch_size": 1,
           "skip_steps": 3}  # fmt: skip
# Of so few words that blocks have most of what is saved, and not the logits.
_SMALL = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 8192, "batch_size": 2,
          "skip_steps": 1}  # fmt: skip
COMPARISONS = {
    "ways": Comparison("torch", _SMALL | {"seq_len": 1024, "activation_memory": 256 * MIB}, _ways),
    "recompute": Comparison(IN_MEMORY, _MEDIUM | {"seq_len": 4096}, _recompute),
    "batches": Comparison(
        MICRO_BATCHES, _MEDIUM | {"seq_len": 256, "activation_memory": 384 * MIB}, _batches
    ),
}


def _by_comparison(name: str, text: str, kind: Any) -> Option:
    """An option whose default depends on what is compared."""
    key = name.removeprefix("--").replace("-", "_")
    found = {c: each.defaults[key] for c, each in COMPARISONS.items() if key in each.defaults}
    said = ", ".join(f"{value} for {each}" for each, value in found.items())
    return Option(name, None, f"{text} (default: {said})", kind)


OPTIONS = (
    Option("--compare", "ways", f"of {', '.join(COMPARISONS)}", one_of(COMPARISONS)),
    Option("--contenders", None, "some of a comparison's (default: all)", list_of(TEXT)),
    _by_comparison("--layers", "of the model", whole()),
    _by_comparison("--width", "of the model", whole()),
    _by_comparison("--heads", "of the model", whole()),
    _by_comparison("--vocabulary", "of the model", whole()),
    _by_comparison("--seq-len", "tokens of a sequence", whole(2)),
    _by_comparison("--batch-size", "sequences of a step, or of a micro-batch", whole()),
    Option("--factor", "8", "micro-batches of a step, of batches", whole(2)),
    Option("--host-memory", "1GiB", "of ways and batches, activations included", SIZE),
    _by_comparison("--activation-memory", "in bytes or as 256MiB", SIZE),
    Option("--process-memory", "2560MiB", "of recompute", SIZE),
    Option("--recompute", "auto", "of batches", one_of(("auto", "none", "all"))),
    Option("--compute", "hetero", "who computes in memory", one_of(("hetero", "torch"))),
    Option("--policy", "nvme", "of hetero", one_of(POLICIES)),
    Option("--steps", "2", "that count, of each process", whole()),
    _by_comparison("--skip-steps", "before them", whole(0)),
    Option("--rounds", "1", "turns of each contender", whole()),
    Option("--io-size", "1GiB", "of the file on which the disk alone is measured", SIZE),
    Option("--timeout", "1800", "of a process", SECONDS),
    Option("--path", None, "on the NVMe disk (default: a new folder)", FOLDER),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures. Raises ValueError for input that cannot be measured, or a failed contender."""
    comparison = COMPARISONS[arguments.compare]
    for name, value in comparison.defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    specs = comparison.specs(arguments)
    for name in arguments.contenders or ():
        if name not in specs:
            raise ValueError(f"unknown contender {name!r}; known: {', '.join(specs)}")
    chosen = {*(arguments.contenders or specs), comparison.base}
    order = [name for name in specs if name in chosen]
    rounds: list[dict[str, dict[str, Any]]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=arguments.path, prefix="bench-activations-")
        )
        disk = None
        if arguments.compare == "recompute":
            disk = Shape.of(arguments.io_size, BLOCK_BYTES, DEPTH)
            file = stack.enter_context(measured_file(folder, disk.size_bytes))
        for number in range(arguments.rounds):
            rounds.append({})
            first = number % len(order)
            for name in order[first:] + order[:first]:
                sample = _sample(name, specs[name], folder, arguments.timeout)
                kind = sample["io_engine"]
                if disk is not None and kind is not None:
                    with HeteroTransfers(kind, file, disk) as transfers:
                        share = _read_share(sample["bytes_per_step"])
                        sample["nvme_gbps"] = transfers.sample_share(share)["gbps"]
                rounds[-1][name] = sample
    results = {name: summarize(rounds, name, comparison.base) for name in order}
    if arguments.compare == "ways":
        _check_losses(results)
    if arguments.compare == "batches" and ONE in results:
        one = results[ONE]["state_bytes"]
        of_each = (results[MICRO_BATCHES]["state_bytes"] - one) / (arguments.factor - 1)
        for figures in results.values():
            figures["param_and_grad_bytes"] = figures["state_bytes"] - (one - of_each)
    given = ("compare", "factor", "host_memory", "activation_memory", "process_memory")
    return {
        **{name: getattr(arguments, name) for name in given},
        "shape": specs[order[-1]].shape | {"vocabulary": arguments.vocabulary},
        "base": comparison.base,
        "results": results,
        "samples": rounds,
    }


def _sample(name: str, spec: Spec, folder: str, timeout_s: float) -> dict[str, Any]:
    sample = run_trial(spec, folder, timeout_s)
    if sample["status"] != "trained":
        raise ValueError(f"{name}: {sample['status']}: {sample['error']}")
    peak = format_bytes(sample["peak_bytes"])
    tell(NAME, f"{name}: {sample['step_s']:.2f} s a step, peak {peak}, {sample['seconds']:.0f} s")
    return sample


def _check_losses(results: Mapping[str, Mapping[str, Any]]) -> None:
    for kind in ("torch", "hetero"):
        losses = [tuple(r["losses"]) for name, r in results.items() if name.startswith(kind)]
        if len(set(losses)) > 1:
            raise ValueError(f"contenders of {kind} have different losses: {losses}")


def _nvme_bytes(moved: Mapping[str, float]) -> float:
    return moved.get("disk_read", 0) + moved.get("disk_write", 0)


def _read_share(moved: Mapping[str, float]) -> float:
    nbytes = _nvme_bytes(moved)
    return moved["disk_read"] / nbytes if nbytes else 0.5


def summarize(rounds: Sequence[Mapping[str, Any]], name: str, base: str) -> dict[str, Any]:
    """A contender's medians over the rounds; ratios and the bound, where the disk was measured in
    one, are taken within each round."""
    samples = [each[name] for each in rounds]
    base_s = [each[base]["step_s"] for each in rounds]
    moved = {
        key: median(sample["bytes_per_step"][key] for sample in samples)
        for key in samples[0]["bytes_per_step"]
    }
    activations = moved.get("activations_read", 0) + moved.get("activations_written", 0)
    found = {
        "step_s": median(sample["step_s"] for sample in samples),
        "of_base": median(s["step_s"] / b for s, b in zip(samples, base_s, strict=True)),
        "forward_s": median(sample["forward_s"] for sample in samples),
        "peak_bytes": max(sample["peak_bytes"] for sample in samples),
        "before_bytes": samples[0]["before_bytes"],
        "bytes_per_step": moved,
        "activation_bytes": activations,
        "state_bytes": _nvme_bytes(moved) - activations,
        "losses": samples[0]["losses"],
        "explained": samples[-1]["explained"],
    }
    if any("nvme_gbps" in sample for each in rounds for sample in each.values()):
        nvme_s = [
            _nvme_bytes(s["bytes_per_step"]) / (s["nvme_gbps"] * 1e9) if "nvme_gbps" in s else 0.0
            for s in samples
        ]
        bounds = list(map(max, base_s, nvme_s))
        found |= {
            "nvme_s": median(nvme_s),
            "bound_s": median(bounds),
            "bound": "NVMe" if median(nvme_s) > median(base_s) else "compute",
            "ratio": median(s["step_s"] / b for s, b in zip(samples, bounds, strict=True)),
        }
    if "nvme_gbps" in samples[0]:
        found["nvme_gbps"] = median(sample["nvme_gbps"] for sample in samples)
    return found


def show(result: dict[str, Any]) -> Iterator[str]:
    """A line for each contender, with the columns that the comparison has."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "step, s": lambda f: f"{f['step_s']:.2f}",
        f"/ {result['base']}": lambda f: f"{f['of_base']:.2f}",
        "bound, s": lambda f: f"{f['bound_s']:.2f} ({f['bound']})" if "bound_s" in f else "",
        "step / bound": lambda f: f"{f['ratio']:.2f}" if "ratio" in f else "",
        "peak": lambda f: format_bytes(f["peak_bytes"]),
        "beside": lambda f: format_bytes(f["peak_bytes"] - f["before_bytes"]),
        "NVMe, GB/s": lambda f: f"{f['nvme_gbps']:.2f}" if "nvme_gbps" in f else "",
        "state moved": lambda f: format_bytes(f["state_bytes"]),
        "of it params and grads": lambda f: (
            format_bytes(max(0, f["param_and_grad_bytes"])) if "param_and_grad_bytes" in f else ""
        ),
        "activations moved": lambda f: format_bytes(f["activation_bytes"]),
    }
    cells = [[cell(figures) for cell in columns.values()] for figures in result["results"].values()]
    kept = [n for n in range(len(columns)) if any(row[n] for row in cells)]
    heads = list(columns)
    rows = [["", *(heads[n] for n in kept)]]
    for name, row in zip(result["results"], cells, strict=True):
        rows.append([name, *(row[n] for n in kept)])
    shape, size = result["shape"], format_bytes
    limit = f"host_memory {size(result['host_memory'])}"
    if result["compare"] == "recompute":
        limit = f"process_memory {size(result['process_memory'])}"
    yield titled(
        f"{NAME}: {shape['layers']} layers of {shape['width']}, {shape['batch_size']} x"
        f" {shape['seq_len']:,} tokens; {limit}",
        rows,
    )


PROGRAM = Program(NAME, __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
