"""The largest model, the longest sequence and the largest batch that train within a budget.

usage: python -m bench.largest [--of model|sequence|batch] [--budgets 1GiB,2GiB,4GiB]
                               [--contenders LIST] [--first N] [--most N] [--tries N] [--path DIR]
                               [--json]

Budgets are for the whole process; hetero is told them as process_memory. Each try is a process of
its own, which trains a GPT-2 in bf16 with AdamW for some steps. It counts if it trained and the
peak of resident memory that the kernel has counted for it (VmHWM), construction included, is within
the budget; it is ended as soon as it is beyond. The operating system refuses twice the budget of
writable memory (RLIMIT_DATA).

model     GPT-2s of widths in steps of 64, of one sequence of --seq-len tokens, as far as the disk
          holds them: 18 bytes a parameter while the model is built, 14 then. hetero has embeddings
          in tiles, and both have each block as a checkpoint.
sequence  tokens of one sequence, of a model of --shape.
batch     the same with sequences of 128 tokens.

From the first try on larger or smaller ones follow until one trains and one does not, and what is
between is halved. A try that is not done after --timeout says nothing of memory: what is found
then, or when --tries are used up, is a lower bound, shown with ">=".
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness.program import (
    Program,
    add_options,
    byte_size,
    count,
    list_of,
    names_of,
    tell,
    whole,
)
from bench.harness.tables import number, of_figures, size
from bench.work.gpt import Shape
from bench.work.gpt_training import CONTENDERS, Spec, try_to_train
from offload.disk.directories import free_bytes
from offload.memory.sizes import format_bytes

NAME = "bench.largest"
HETERO = {"model": "hetero-tiles-checkpoints", "sequence": "hetero", "batch": "hetero"}
LEAST_TOKENS = {"sequence": 64, "batch": 128}  # of which all are multiples
STEPS_PER_DOUBLING = 4  # of tokens
MOST_TOKENS = 1 << 17
# Why no larger one was found, by the status of the smallest try that did not train; all but memory
# make a lower bound.
LIMITED_BY = {"late": "time", "over": "memory", "failed": "memory", "refused": "memory"}
# Shapes of models.
WIDTHS = range(64, 5121, 64)
MOST_LAYERS = 96  # GPT-3's
WIDTH_PER_LAYER = 8  # at least; GPT-2's are 33 to 64, GPT-3's 64 to 128
# Bytes a parameter: fp32 until it finds its place, and bf16 parameter, gradient and optimizer
# state; and what the first tries take it to need of the budget.
DISK_BYTES, USUAL_STATE_BYTES = 18, 16
DISK_SHARE = 0.95  # of what is free
FIRST_BYTES = {"torch": 8, "hetero": 1}


def options(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        ("--of", tuple(HETERO), "model", "what is to be large"),
        ("--budgets", list_of(byte_size), "1GiB,2GiB,4GiB", "of a process"),
        ("--contenders", names_of(CONTENDERS), None, f"of {', '.join(CONTENDERS)}; else hetero"),
        ("--first", whole(), "1024", "tokens of a step in the first try"),
        ("--most", count, None, "parameters, or tokens of a step; else the disk's, 128 Ki"),
        ("--tries", whole(), "6", "for a budget, at most"),
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
    notes = []
    with tempfile.TemporaryDirectory(dir=arguments.path, prefix="bench-largest-") as folder:
        shapes = shapes_of(arguments, folder)
        for name in arguments.contenders or [HETERO[arguments.of]]:
            search = Search(name, arguments, folder, shapes)
            for budget in sorted(set(arguments.budgets)):
                label = f"{name}, {format_bytes(budget)}"
                found[label] = search.largest(budget)
                notes += [f"{label}: not {why}" for why in found[label]["not"]]
    return {"of": arguments.of, "steps": arguments.steps, "found": found, "notes": notes}


def shapes_of(arguments: argparse.Namespace, folder: str) -> list[Shape]:
    """What may be tried, the smallest first."""
    if arguments.of != "model":
        if len(arguments.shape) != 3:
            raise ValueError("--shape must be layers, width and heads, such as 24,1024,16")
        least, most = LEAST_TOKENS[arguments.of], arguments.most or MOST_TOKENS
        layers, width, heads = arguments.shape
        seq_lens = [n if arguments.of == "sequence" else least for n in token_counts(least, most)]
        return [
            Shape(layers, width, heads, seq_len, tokens // seq_len)
            for seq_len, tokens in zip(seq_lens, token_counts(least, most), strict=True)
        ]
    held = free_bytes(folder) * DISK_SHARE / DISK_BYTES
    shapes = [
        Shape(min(MOST_LAYERS, width // WIDTH_PER_LAYER), width, width // 64, arguments.seq_len, 1)
        for width in WIDTHS
    ]
    vocabulary, most = arguments.vocabulary, min(held, arguments.most or held)
    found = [shape for shape in shapes if shape.params(vocabulary) <= most]
    if not found:
        least = shapes[0].params(vocabulary)
        raise ValueError(f"not even {least:,} parameters are within --most and the disk")
    return found


def token_counts(least: int, most: int) -> list[int]:
    """Multiples of `least` up to `most`, STEPS_PER_DOUBLING of them or all from one power of two to
    the next."""
    counts, power = [], 1
    while power * least <= most:
        step = max(1, power // STEPS_PER_DOUBLING)
        counts += [n * least for n in range(power, 2 * power, step) if n * least <= most]
        power *= 2
    return counts or [least]


def climb(places: int, guess: int, works: Callable[[int], bool], tries: int) -> int | None:
    """The largest place below `places` of which `works` was true in at most `tries` calls.

    Up to a place all work, and from there on none, or else it is one of several such borders. From
    `guess` it goes up or down by one, then by twice as much each time, until it has one that works
    and one that does not, and halves what is between them. None: nothing that was tried works.
    """
    low, high = -1, places  # the largest that works, the smallest that does not
    at, stride = min(max(guess, 0), places - 1), 1
    for _ in range(tries):
        if high - low <= 1:
            break
        if works(at):
            low = at
        else:
            high = at
        if low >= 0 and high < places:
            at = (low + high) // 2
        else:
            at = min(low + stride, places - 1) if low >= 0 else max(high - stride, 0)
            stride *= 2
    return low if low >= 0 else None


class Search:
    """The tries of one contender; each budget begins with what a smaller one has shown."""

    def __init__(
        self, contender: str, arguments: argparse.Namespace, folder: str, shapes: Sequence[Shape]
    ) -> None:
        self._contender, self._arguments, self._folder = contender, arguments, folder
        self._shapes = shapes
        self._least = 0  # where the next larger budget begins

    def largest(self, budget: int) -> dict[str, Any]:
        """The largest shape that trains within the budget, what it took, and all tries."""
        tries: dict[int, dict[str, Any]] = {}

        def works(place: int) -> bool:
            tries[place] = self._try(place, budget)
            return bool(tries[place]["status"] == "trained")

        guess = max(self._guess(budget), self._least)
        place = climb(len(self._shapes), guess, works, self._arguments.tries)
        tried = sorted(tries.items())
        found: dict[str, Any] = {
            "budget_bytes": budget,
            "not": [f"{self._about(n)}: {t['error']}" for n, t in tried if t["error"] is not None],
            "tries": {self._about(n): t["status"] for n, t in tried},
        }
        beyond = tried[-1][1] if place is None else tries.get(place + 1)
        limit = "--most, the disk or --tries"
        if beyond is not None:
            limit = LIMITED_BY.get(beyond["status"], "an error")
        found |= {"limited_by": limit, "is_lower_bound": place is not None and limit != "memory"}
        if place is None:
            return found | {"what": "none"}
        self._least = place
        shape, best = self._shapes[place], tries[place]
        params, moved = shape.params(self._arguments.vocabulary), best["bytes_per_step"]
        return found | {
            "what": (">= " if found["is_lower_bound"] else "") + self._about(place),
            "shape": vars(shape),
            "params": params,
            "tokens": shape.tokens,
            "state_bytes": USUAL_STATE_BYTES * params,
            "peak_bytes": best["peak_bytes"],
            "built_s": best["made_s"],
            "step_s": best["steps_s"][-1],
            "nvme_bytes": moved.get("disk_read", 0) + moved.get("disk_write", 0) or None,
        }

    def _about(self, place: int) -> str:
        shape = self._shapes[place]
        if self._arguments.of != "model":
            return f"{shape.tokens:,} tokens"
        params = shape.params(self._arguments.vocabulary)
        return f"{shape.layers} x {shape.width}, {params / 1e6:,.0f}M"

    def _guess(self, budget: int) -> int:
        """The place of the first try."""
        arguments, shapes = self._arguments, self._shapes
        if arguments.of != "model":
            return sum(bool(shape.tokens <= arguments.first) for shape in shapes) - 1
        most = budget / FIRST_BYTES[self._contender.partition("-")[0]]
        return sum(shape.params(arguments.vocabulary) <= most for shape in shapes) - 1

    def _try(self, place: int, budget: int) -> dict[str, Any]:
        arguments, options = self._arguments, {}
        if self._contender.startswith("hetero"):
            options = {"placement_policy": "nvme", "process_memory": budget}
        steps, shape = arguments.steps, vars(self._shapes[place])
        spec = Spec(self._contender, shape, arguments.vocabulary, options, {}, steps, steps - 1)
        found = try_to_train(spec, self._folder, arguments.timeout, budget)
        said = found["error"] or f"{found['steps_s'][-1]:.2f} s"
        label = f"{self._contender}, {self._about(place)} in {format_bytes(budget)}"
        tell(f"{NAME}: {label}: {found['status']}, peak {size(found['peak_bytes'])}: {said}")
        return found


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
