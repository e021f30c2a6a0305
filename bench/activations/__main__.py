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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.activations.training import Spec
from bench.activations.trial import POLICIES, tell, try_to_train
from bench.harness.program import TEXT, Program, list_of, options
from bench.harness.rounds import Sample, run_rounds
from bench.harness.tables import Column, number, of_figures, size
from bench.work.bandwidths import disk_alone
from bench.work.gpt import VOCABULARY, Shape
from offload.memory.sizes import format_bytes

NAME = "bench.activations"
MIB = 1 << 20
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
    model = arguments.layers, arguments.width, arguments.heads
    return Spec(
        contender,
        vars(Shape(*model, arguments.seq_len, arguments.batch_size * batches)),
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


def _defaults() -> str:
    """The defaults that depend on what is compared, for the help."""
    keys = dict.fromkeys(key for each in COMPARISONS.values() for key in each.defaults)
    return "; ".join(
        f"--{key.replace('_', '-')}: "
        + ", ".join(
            f"{c.defaults[key]} for {n}" for n, c in COMPARISONS.items() if key in c.defaults
        )
        for key in keys
    )


OPTIONS = options(
    f"""
    --compare            NAME     ways     what is compared
    --contenders         TEXTS    -        some of a comparison's (default: all)
    --layers             N        -        of the model
    --width              N        -        of the model
    --heads              N        -        of the model
    --vocabulary         N        -        of the model
    --seq-len            N>=2     -        tokens of a sequence
    --batch-size         N        -        sequences of a step, or of a micro-batch
    --factor             N>=2     8        micro-batches of a step, of batches
    --host-memory        SIZE     1GiB     of ways and batches, activations included
    --activation-memory  SIZE     -        of ways and batches
    --process-memory     SIZE     2560MiB  of recompute
    --recompute          NAME     auto     of batches
    --compute            NAME     hetero   who computes in memory
    --policy             NAME     nvme     of hetero
    --steps              N        2        that count, of each process
    --skip-steps         N>=0     -        before them. Defaults by comparison: {_defaults()}
    --rounds             N        1        turns of each contender
    --io-size            SIZE     1GiB     of the file on which the disk alone is measured
    --timeout            SECONDS  1800     of a process
    --path               DIR      -        on the NVMe disk (default: a new folder)
    """,
    compare=COMPARISONS,
    contenders=list_of(TEXT),
    recompute=("auto", "none", "all"),
    compute=("hetero", "torch"),
    policy=POLICIES,
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
    losses: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=arguments.path, prefix="bench-activations-")
        )
        disk = None
        if arguments.compare == "recompute":
            disk = stack.enter_context(disk_alone(folder, arguments.io_size))

        def sample(name: str) -> Sample:
            found = _trained(name, specs[name], folder, arguments.timeout)
            losses[name] = found["losses"]
            return _sample(found, disk)

        turns = {name: partial(sample, name) for name in order}
        rounds = run_rounds(turns, arguments.rounds, warm_up=False)
    rounds.compare(comparison.base, "step_s", "of_base")
    for name in order:
        if disk is not None:
            rounds.derive(name, partial(_of_bound, name, comparison.base))
        if arguments.compare == "batches" and ONE in order:
            rounds.derive(name, partial(_of_batches, name, arguments.factor))
    if arguments.compare == "ways":
        _check_losses(losses)
    given = ("compare", "factor", "host_memory", "activation_memory", "process_memory")
    return {
        **{name: getattr(arguments, name) for name in given},
        "shape": specs[order[-1]].shape | {"vocabulary": arguments.vocabulary},
        "base": comparison.base,
        "results": rounds.figures(),
        "losses": losses,
    }


def _trained(name: str, spec: Spec, folder: str, timeout_s: float) -> dict[str, Any]:
    found = try_to_train(spec, folder, timeout_s)
    if found["status"] != "trained":
        raise ValueError(f"{name}: {found['status']}: {found['error']}")
    tell(NAME, f"{name}: {found['seconds']:.0f} s; {found['explained']}")
    return found


def _sample(found: Mapping[str, Any], disk: Callable[[float], Sample] | None) -> Sample:
    """The figures of a process, with the disk's rate for what it moved, if it has moved any."""
    moved = found["bytes_per_step"]
    nbytes = moved.get("disk_read", 0) + moved.get("disk_write", 0)
    activations = moved.get("activations_read", 0) + moved.get("activations_written", 0)
    sample = {
        **{key: found[key] for key in ("step_s", "forward_s", "peak_bytes", "before_bytes")},
        "beside_bytes": found["peak_bytes"] - found["before_bytes"],
        "activation_bytes": activations,
        "state_bytes": nbytes - activations,
        "nvme_s": 0.0,
    }
    if disk is not None and nbytes:
        gbps = disk(moved["disk_read"] / nbytes)["gbps"]
        sample |= {"nvme_gbps": gbps, "nvme_s": nbytes / (gbps * 1e9)}
    return sample


def _of_bound(name: str, base: str, made: Mapping[str, Sample]) -> Sample:
    """The larger one of the step in memory and of what the disk takes, and the step over it."""
    bound_s = max(made[base]["step_s"], made[name]["nvme_s"])
    return {"bound_s": bound_s, "ratio": made[name]["step_s"] / bound_s}


def _of_batches(name: str, factor: int, made: Mapping[str, Sample]) -> Sample:
    """State without optimizer state, as the module's text says."""
    one = made[ONE]["state_bytes"]
    of_each = (made[MICRO_BATCHES]["state_bytes"] - one) / (factor - 1)
    return {"param_and_grad_bytes": max(0, made[name]["state_bytes"] - (one - of_each))}


def _check_losses(losses: Mapping[str, list[float]]) -> None:
    for kind in ("torch", "hetero"):
        of_kind = [tuple(each) for name, each in losses.items() if name.startswith(kind)]
        if len(set(of_kind)) > 1:
            raise ValueError(f"contenders of {kind} have different losses: {of_kind}")


def show(result: dict[str, Any]) -> Iterator[str]:
    """A line for each contender, with the columns that the comparison has."""
    shape = result["shape"]
    limit = f"host_memory {format_bytes(result['host_memory'])}"
    if result["compare"] == "recompute":
        limit = f"process_memory {format_bytes(result['process_memory'])}"
    yield of_figures(
        f"{NAME}: {shape['layers']} layers of {shape['width']}, {shape['batch_size']} x"
        f" {shape['seq_len']:,} tokens; {limit}",
        result["results"],
        (
            Column("step, s", "step_s", number()),
            Column(f"/ {result['base']}", "of_base", number()),
            Column("bound, s", "bound_s", number()),
            Column("step / bound", "ratio", number()),
            Column("NVMe alone, s", "nvme_s", number()),
            Column("peak", "peak_bytes", size),
            Column("beside", "beside_bytes", size),
            Column("NVMe, GB/s", "nvme_gbps", number()),
            Column("state moved", "state_bytes", size),
            Column("of it params and grads", "param_and_grad_bytes", size),
            Column("activations moved", "activation_bytes", size),
        ),
    )


PROGRAM = Program(NAME, __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
