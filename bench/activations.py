"""Steps whose saved tensors do not fit: ways to save memory, and recomputing, beside PyTorch's.

usage: python -m bench.activations [--compare ways|recompute] [--contenders LIST] [--rounds N]
                                   [--path DIR] [--json]

Contenders train the same GPT-2 in bf16 with AdamW, in turns, in a process of their own; medians are
of all rounds, ratios are taken within a round. "Peak" is the most resident memory that the kernel
has counted for the process; "beside" is that less what it held before the first step, when all
model state was there. Bytes are those that move to and from NVMe in a step.

ways       hetero and PyTorch with their ways to save memory, by default on the blocks of a GPT-2 of
           124 M: 12 layers of 768, and so few words that blocks have most of what is saved. Losses
           of contenders of hetero, and of those of PyTorch, must be the same bits.
recompute  GPT-2 354 M: hetero with everything in RAM and no limit ("in memory"), and within
           --process-memory with each value of the option recompute; its loss is in tiles. The bound
           of a step is the larger one of two times: the step in memory, and its bytes on NVMe at
           what the same I/O engine moves alone when it reads and writes in the step's proportion.
           What is recomputed is not in the bound.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.harness.program import Program, add_options, byte_size, list_of, tell, whole
from bench.harness.rounds import Sample, run_rounds
from bench.harness.tables import number, of_figures, size
from bench.io import disk_alone
from bench.work.gpt import VOCABULARY, Shape
from bench.work.gpt_training import Spec, try_to_train

NAME = "bench.activations"
IN_MEMORY = "in memory"
# By comparison: who the others' times are divided by, layers, width, heads, vocabulary, sequences,
# tokens of each, and steps that do not count.
COMPARISONS = {
    "ways": ("torch", (12, 768, 12), 8192, 2, 1024, 1),
    "recompute": (IN_MEMORY, (24, 1024, 16), VOCABULARY, 1, 4096, 3),
}


def options(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        ("--compare", tuple(COMPARISONS), "ways", "what is compared"),
        ("--contenders", list_of(str), None, "some of a comparison's; else all"),
        ("--model", list_of(whole()), None, "layers, width and heads; else by comparison"),
        ("--seq-len", whole(2), None, "tokens of a sequence; else 1024 and 4096"),
        ("--host-memory", byte_size, "1GiB", "of ways, activations included"),
        ("--activation-memory", byte_size, "256MiB", "of ways"),
        ("--process-memory", byte_size, "2560MiB", "of recompute"),
        ("--steps", whole(), "2", "that count, of each process"),
        ("--rounds", whole(), "1", "turns of each contender"),
        ("--io-size", byte_size, "1GiB", "of the file on which the disk alone is measured"),
        ("--timeout", float, "1800", "seconds of a process"),
        ("--path", str, None, "on the NVMe disk; else a new folder"),
    )


def specs_of(arguments: argparse.Namespace) -> dict[str, Spec]:
    """What each contender of the comparison trains."""
    _, model, vocabulary, batch_size, seq_len, skip = COMPARISONS[arguments.compare]
    if arguments.model is not None and len(arguments.model) != 3:
        raise ValueError("--model must be layers, width and heads, such as 12,768,12")
    model = tuple(arguments.model or model)
    shape = vars(Shape(*model, arguments.seq_len or seq_len, batch_size))
    if arguments.model is not None:
        vocabulary = min(vocabulary, 4 * model[1])

    def spec(contender: str, **more: Any) -> Spec:
        options = {"placement_policy": "nvme", **more} if contender.startswith("hetero") else {}
        steps = arguments.steps + skip
        return Spec(contender, shape, vocabulary, options, steps=steps, skip_steps=skip)

    if arguments.compare == "recompute":
        limit = arguments.process_memory
        return {
            IN_MEMORY: spec("hetero", placement_policy="cpu"),
            **{
                n: spec("hetero", recompute=n, process_memory=limit)
                for n in ("auto", "none", "all")
            },
        }
    within = {"host_memory": arguments.host_memory}
    both = within | {"activation_memory": arguments.activation_memory}
    return {
        **{name: spec(name) for name in ("torch", "torch-checkpoints", "torch-oncpu")},
        "hetero-off": spec("hetero-whole", **within),
        "hetero": spec("hetero-whole", **both),
        "hetero-checkpoints": spec("hetero-whole-checkpoints", **both),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures. Raises ValueError for input that cannot be measured, or a failed contender."""
    specs, base = specs_of(arguments), COMPARISONS[arguments.compare][0]
    for name in arguments.contenders or ():
        if name not in specs:
            raise ValueError(f"unknown contender {name!r}; known: {', '.join(specs)}")
    chosen = {*(arguments.contenders or specs), base}
    losses: dict[str, list[float]] = {}
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(dir=arguments.path, prefix="bench-activations-")
        folder = stack.enter_context(temporary)
        disk = None
        if arguments.compare == "recompute":
            disk = stack.enter_context(disk_alone(folder, arguments.io_size))

        def sample(name: str) -> Sample:
            found = try_to_train(specs[name], folder, arguments.timeout)
            if found["status"] != "trained":
                raise ValueError(f"{name}: {found['status']}: {found['error']}")
            tell(f"{NAME}: {name}: {found['seconds']:.0f} s; {found['explained']}")
            losses[name] = found["losses"]
            return _sample(found, disk)

        turns = {name: partial(sample, name) for name in specs if name in chosen}
        rounds = run_rounds(turns, arguments.rounds, warm_up=False)
    rounds.compare(base, "step_s", "of_base")
    for name in turns:
        if disk is not None:
            rounds.derive(name, partial(_of_bound, name, base))
    if arguments.compare == "ways":
        check_losses(losses)
    given = ("compare", "host_memory", "activation_memory", "process_memory")
    return {
        **{name: getattr(arguments, name) for name in given},
        "shape": specs[base].shape,
        "base": base,
        "results": rounds.figures(),
        "losses": losses,
    }


def _sample(found: Mapping[str, Any], disk: Callable[[float], Sample] | None) -> Sample:
    """The figures of a process, with the disk's rate for what it moved, if it has moved any."""
    moved = found["bytes_per_step"]
    nbytes = moved.get("disk_read", 0) + moved.get("disk_write", 0)
    activations = moved.get("activations_read", 0) + moved.get("activations_written", 0)
    sample = {
        **{key: found[key] for key in ("step_s", "peak_bytes")},
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


def check_losses(losses: Mapping[str, list[float]]) -> None:
    """Raises ValueError if contenders of one kind have different ones."""
    for kind in ("torch", "hetero"):
        of_kind = [tuple(each) for name, each in losses.items() if name.startswith(kind)]
        if len(set(of_kind)) > 1:
            raise ValueError(f"contenders of {kind} have different losses: {of_kind}")


COLUMNS = (
    ("step, s", "step_s", number()),
    ("/ first", "of_base", number()),
    ("bound, s", "bound_s", number()),
    ("step / bound", "ratio", number()),
    ("NVMe alone, s", "nvme_s", number()),
    ("peak", "peak_bytes", size),
    ("beside", "beside_bytes", size),
    ("NVMe, GB/s", "nvme_gbps", number()),
    ("state moved", "state_bytes", size),
    ("activations moved", "activation_bytes", size),
)


def show(result: dict[str, Any]) -> Iterator[str]:
    """A line for each contender, with the columns that the comparison has."""
    shape = result["shape"]
    kind = "process_memory" if result["compare"] == "recompute" else "host_memory"
    title = f"{NAME}: {shape['layers']} layers of {shape['width']}, {shape['batch_size']} x"
    title += f" {shape['seq_len']:,} tokens; {kind} {size(result[kind])}"
    yield of_figures(title, result["results"], COLUMNS)


PROGRAM = Program(NAME, __doc__, options, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
