"""The largest model, the longest sequence and the largest batch that train within a budget.

usage: python -m bench.largest [--of model|sequence|batch] [--budgets 1GiB,2GiB,4GiB]
                               [--sizes LIST] [--contenders LIST] [--path DIR] [--json]

Budgets are for the whole process; hetero is told them as process_memory. Each try is a process of
its own, which trains a GPT-2 in bf16 with AdamW for some steps. It counts if it trained and the
peak of resident memory that the kernel has counted for it (VmHWM), construction included, is within
the budget; it is ended as soon as it is beyond. The operating system refuses twice the budget of
writable memory (RLIMIT_DATA). The sizes are tried from the smallest on, until one does not train.

model     widths of GPT-2s of one sequence of --seq-len tokens, as far as the disk holds them: 18
          bytes a parameter while the model is built, 14 then. hetero has embeddings in tiles, and
          both have each block as a checkpoint.
sequence  tokens of one sequence, of a model of --shape.
batch     the same with sequences of 128 tokens.

A try that is not done after --timeout, or fails otherwise, says nothing of memory: what trained
before it is a lower bound, shown with ">=", as is the largest of all sizes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness.program import Program, add_options, byte_size, list_of, names_of, tell, whole
from bench.harness.tables import number, of_figures, size
from bench.work.gpt import Shape
from bench.work.gpt_training import CONTENDERS, Spec, try_to_train
from offload.disk.directories import free_bytes
from offload.memory.sizes import format_bytes

NAME = "bench.largest"
HETERO = {"model": "hetero-tiles-checkpoints", "sequence": "hetero", "batch": "hetero"}
SIZES = {"model": range(1024, 4097, 256), "sequence": [512 << n for n in range(9)]}
BATCH_SEQ_LEN = 128
# Why no larger one was found, by the status of the try that did not train; all but memory make a
# lower bound.
LIMITED_BY = {"late": "time", "over": "memory", "failed": "memory", "refused": "memory"}
# Shapes of models.
MOST_LAYERS = 96  # GPT-3's
WIDTH_PER_LAYER = 8  # at least; GPT-2's are 33 to 64, GPT-3's 64 to 128
# Bytes a parameter: fp32 until it finds its place, and bf16 parameter, gradient and optimizer
# state.
DISK_BYTES, USUAL_STATE_BYTES = 18, 16


def options(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        ("--of", tuple(HETERO), "model", "what is to be large"),
        ("--budgets", list_of(byte_size), "1GiB,2GiB,4GiB", "of a process"),
        ("--sizes", list_of(whole()), None, "widths or tokens; else 1024 to 4096, 512 to 128 Ki"),
        ("--contenders", names_of(CONTENDERS), None, f"of {', '.join(CONTENDERS)}; else hetero"),
        ("--steps", whole(), "2", "of a try; the last one is timed"),
        ("--shape", list_of(whole()), "24,1024,16", "layers, width, heads, where tokens are many"),
        ("--seq-len", whole(2), "128", "tokens of a step of the models"),
        ("--vocabulary", whole(), "50257", "of all models"),
        ("--timeout", float, "3600", "seconds of a try"),
        ("--path", str, ".", "a folder on NVMe"),
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """What each contender reaches in each budget. Raises ValueError for input that cannot work."""
    if not Path(arguments.path).is_dir():
        raise ValueError(f"--path {arguments.path} is not a folder")
    found: dict[str, dict[str, Any]] = {}
    sizes = arguments.sizes or SIZES["model" if arguments.of == "model" else "sequence"]
    shapes = [shape_of(arguments, each) for each in sorted(set(sizes))]
    with tempfile.TemporaryDirectory(dir=arguments.path, prefix="bench-largest-") as folder:
        for name in arguments.contenders or [HETERO[arguments.of]]:
            for budget in sorted(set(arguments.budgets)):
                label = f"{name}, {format_bytes(budget)}"
                found[label] = largest(arguments, name, shapes, budget, folder)
    notes = [f"{label}: not {each['error']}" for label, each in found.items() if each["error"]]
    return {"of": arguments.of, "steps": arguments.steps, "found": found, "notes": notes}


def shape_of(arguments: argparse.Namespace, of_size: int) -> Shape:
    """What is tried. Raises ValueError for a size or a shape that cannot be."""
    if arguments.of == "model":
        layers, heads = min(MOST_LAYERS, of_size // WIDTH_PER_LAYER), max(1, of_size // 64)
        return Shape(layers, of_size, heads, arguments.seq_len, 1)
    if len(arguments.shape) != 3:
        raise ValueError("--shape must be layers, width and heads, such as 24,1024,16")
    seq_len = of_size if arguments.of == "sequence" else BATCH_SEQ_LEN
    if of_size % seq_len:
        raise ValueError(f"--sizes: {of_size} tokens are no multiple of {seq_len}")
    layers, width, heads = arguments.shape
    return Shape(layers, width, heads, seq_len, of_size // seq_len)


def largest(
    arguments: argparse.Namespace, contender: str, shapes: list[Shape], budget: int, folder: str
) -> dict[str, Any]:
    """The largest of `shapes` that the contender trains within the budget, what it took, and how
    each try ended."""
    found: dict[str, Any] = {"budget_bytes": budget, "what": "none", "tries": {}}
    limit = "--sizes"
    error: str | None = None
    for shape in shapes:
        params = shape.params(arguments.vocabulary)
        what = f"{shape.tokens:,} tokens"
        if arguments.of == "model":
            what = f"{shape.layers} x {shape.width}, {params / 1e6:,.0f}M"
        if DISK_BYTES * params > free_bytes(folder):
            limit = "the disk"
            break
        made = attempt(arguments, contender, shape, budget, folder)
        found["tries"][what] = made["status"]
        said = made["error"] or f"{made['steps_s'][-1]:.2f} s"
        label = f"{contender}, {what} in {format_bytes(budget)}"
        tell(f"{NAME}: {label}: {made['status']}, peak {size(made['peak_bytes'])}: {said}")
        if made["status"] != "trained":
            limit, error = LIMITED_BY.get(made["status"], "an error"), f"{what}: {made['error']}"
            break
        moved = made["bytes_per_step"]
        found |= {
            "what": what,
            "shape": vars(shape),
            "params": params,
            "tokens": shape.tokens,
            "state_bytes": USUAL_STATE_BYTES * params,
            "peak_bytes": made["peak_bytes"],
            "built_s": made["made_s"],
            "step_s": made["steps_s"][-1],
            "nvme_bytes": moved.get("disk_read", 0) + moved.get("disk_write", 0) or None,
        }
    is_lower_bound = "shape" in found and limit != "memory"
    what = f">= {found['what']}" if is_lower_bound else found["what"]
    own = {"limited_by": limit, "is_lower_bound": is_lower_bound, "error": error}
    return found | {"what": what} | own


def attempt(
    arguments: argparse.Namespace, contender: str, shape: Shape, budget: int, folder: str
) -> dict[str, Any]:
    """What try_to_train() says of one."""
    is_hetero, steps = contender.startswith("hetero"), arguments.steps
    options = {"placement_policy": "nvme", "process_memory": budget} if is_hetero else {}
    spec = Spec(contender, vars(shape), arguments.vocabulary, options, {}, steps, steps - 1)
    return try_to_train(spec, folder, arguments.timeout, budget)


COLUMNS = (
    ("trains", "what", str),
    ("limited by", "limited_by", str),
    ("16 B a parameter", "state_bytes", size),
    ("peak RSS", "peak_bytes", size),
    ("built s", "built_s", number(0)),
    ("step s", "step_s", number()),
    ("NVMe a step", "nvme_bytes", size),
)


def show(result: dict[str, Any]) -> Iterator[str]:
    """A row for each contender and budget."""
    title = f"{NAME}: {result['of']}, {result['steps']} steps a try"
    yield of_figures(title, result["found"], COLUMNS)
    yield from result["notes"]


PROGRAM = Program(NAME, __doc__, options, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
