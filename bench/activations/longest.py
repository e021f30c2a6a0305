"""The longest sequence, and the largest batch, that a model trains with in a process of a budget.

usage: python -m bench.activations.longest [--budgets 2GiB,3GiB,4GiB] [--kinds sequence,batch]
                                           [--contenders LIST] [--seconds N] [--steps N]
                                           [--first-tokens N] [--most-tokens N] [--bisections N]
                                           [--policy nvme] [--layers N] [--width N] [--heads N]
                                           [--vocabulary N] [--peer-python FILE] [--path DIR]
                                           [--json]

The model is a GPT-2 in bf16 with AdamW (by default 354 M), with as many positions as it needs;
"sequence" trains with one sequence, "batch" with sequences of 128 tokens. Each try is a process of
its own. It counts if it trained and the peak of resident memory that the kernel has counted for it
(VmHWM) is within the budget; it is ended as soon as it is beyond. The operating system refuses
twice the budget of writable memory (RLIMIT_DATA). Lengths are doubled until one does not train,
then what is between is halved --bisections times. A try that is not done after --seconds says
nothing of memory: what is found then is a lower bound, shown with ">=".

"x checkpoints" is the tokens over those of PyTorch with each block a checkpoint within the same
budget; it is missing where those are 0, because that does not train at all, and where those are a
lower bound themselves. Step seconds are those of the last step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from bench.activations.training import CONTENDERS, Spec
from bench.activations.trial import POLICIES, model_shape, run_trial, tell
from bench.harness.program import (
    FILE,
    FOLDER,
    NUMBER,
    SIZE,
    Option,
    Program,
    list_of,
    one_of,
    some_of,
    titled,
    whole,
)
from bench.work.gpt import VOCABULARY, Shape
from offload.memory.sizes import format_bytes

NAME = "bench.activations.longest"
YARDSTICK = "torch-checkpoints"
DEFAULT_CONTENDERS = (YARDSTICK, "torch-checkpoints-on-cpu", "hetero", "deepspeed")
BATCH_SEQ_LEN = 128
BUILD_TIMEOUT_S = 1800.0
# Tokens of the shortest try, of which all are multiples.
LEAST_TOKENS = {"sequence": 64, "batch": BATCH_SEQ_LEN}
# Why no more tokens were found, by the status of the shortest try that did not train.
LIMITED_BY = {
    "late": "time",
    "over": "memory",
    "failed": "memory",
    "refused": "memory",
    "missing": "not installed",
    "broken": "an error",
}


OPTIONS = (
    Option("--budgets", "2GiB,3GiB,4GiB", "of a process", list_of(SIZE)),
    Option("--kinds", ",".join(LEAST_TOKENS), "of batches", some_of(LEAST_TOKENS)),
    Option(
        "--contenders",
        ",".join(DEFAULT_CONTENDERS),
        f"of {', '.join(CONTENDERS)}",
        some_of(CONTENDERS),
    ),
    Option("--seconds", "120", "of a try", NUMBER),
    Option("--steps", "2", "of a try; the last one is timed", whole()),
    Option("--first-tokens", "1024", "of a step in the first try", whole()),
    Option("--most-tokens", str(1 << 17), "beyond which nothing is tried", whole()),
    Option("--bisections", "2", "after doubling", whole(0)),
    Option("--layers", "24", "of the model", whole()),
    Option("--width", "1024", "of the model", whole()),
    Option("--heads", "16", "of the model", whole()),
    Option("--vocabulary", str(VOCABULARY), "of the model", whole()),
    Option("--policy", "nvme", "of hetero", one_of(POLICIES)),
    Option("--path", None, "on the NVMe disk (default: a new folder)", FOLDER),
    Option("--peer-python", sys.executable, "Python that has DeepSpeed", FILE),
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures. Raises ValueError for input that cannot be measured."""
    chosen, kinds = arguments.contenders, arguments.kinds
    model_shape(arguments, 1, 1)
    budgets = sorted(arguments.budgets)
    with tempfile.TemporaryDirectory(dir=arguments.path, prefix="bench-longest-") as folder:
        searches = {name: _Search(name, arguments, folder) for name in chosen}
        found: list[dict[str, Any]] = [
            {"kind": kind, "budget_bytes": budget, "contender": name}
            | searches[name].longest(kind, budget)
            for kind in kinds
            for budget in budgets
            for name in chosen
        ]
    yardsticks = {
        (row["kind"], row["budget_bytes"]): row["tokens"]
        for row in found
        if row["contender"] == YARDSTICK and not row["is_lower_bound"]
    }
    for row in found:
        tokens = yardsticks.get((row["kind"], row["budget_bytes"]))
        is_there = tokens and row["limited_by"] != LIMITED_BY["missing"]
        row["of_checkpoints"] = row["tokens"] / tokens if is_there else None
    return {
        "model": vars(model_shape(arguments, 1, 1))
        | {"vocabulary": arguments.vocabulary, "seq_len": None, "batch_size": None},
        "seconds_of_a_try": arguments.seconds,
        "found": found,
    }


class _Search:
    """The tries of one contender."""

    def __init__(self, name: str, arguments: argparse.Namespace, folder: str) -> None:
        self._name = name
        self._arguments = arguments
        self._folder = folder
        # What is the same for all budgets, because the contender is told none, by kind and tokens.
        self._known: dict[tuple[str, int], dict[str, Any]] = {}
        self._begin: dict[str, int] = {}  # where the search of the next larger budget begins
        self._missing: str | None = None
        if name == "deepspeed":
            self._build()

    def _build(self) -> None:
        """DeepSpeed compiles its operators at first use, which is no part of a try."""
        shape = Shape(layers=1, width=64, heads=1, seq_len=16, batch_size=1)
        spec = Spec(self._name, vars(shape), vocabulary=256)
        python = self._arguments.peer_python
        found = run_trial(spec, self._folder, BUILD_TIMEOUT_S, python=python)
        if found["status"] == "missing":
            self._missing = found["error"]
            tell(NAME, self._missing)

    def longest(self, kind: str, budget: int) -> dict[str, Any]:
        """The most tokens within the budget, what it took, and all tries."""
        tries: dict[int, dict[str, Any]] = {}

        def trains(tokens: int) -> bool:
            tries[tokens] = self._try(kind, tokens, budget)
            return bool(tries[tokens]["status"] == "trained")

        least = LEAST_TOKENS[kind]
        first = max(self._begin.get(kind, self._arguments.first_tokens) // least * least, least)
        most = max(self._arguments.most_tokens // least * least, least)
        tokens = longest(trains, min(first, most), least, most, self._arguments.bisections)
        if tokens:
            self._begin[kind] = tokens
        beyond = min((n for n in tries if n > tokens), default=None)
        limited_by = "--most-tokens" if beyond is None else LIMITED_BY[tries[beyond]["status"]]
        best = tries.get(tokens, {})
        return {
            "tokens": tokens,
            "limited_by": limited_by,
            "is_lower_bound": limited_by in ("time", "--most-tokens"),
            "step_s": best["steps_s"][-1] if best else None,
            "peak_bytes": best.get("peak_bytes"),
            "bytes_per_step": best.get("bytes_per_step"),
            "error": None if beyond is None else tries[beyond]["error"],
            "tries": {str(n): tries[n] for n in sorted(tries)},
        }

    def _try(self, kind: str, tokens: int, budget: int) -> dict[str, Any]:
        label = f"{self._name}, {kind} of {tokens:,} tokens in {format_bytes(budget)}"
        if self._missing is not None:
            return {"status": "missing", "error": self._missing}
        known = self._known.get((kind, tokens))
        if known is not None:
            if known["status"] == "trained" and known["peak_bytes"] <= budget:
                tell(NAME, f"{label}: trained, known from a smaller budget")
                return known
            if known["status"] == "late":
                tell(NAME, f"{label}: late, known from a smaller budget")
                return known
        seq_len, batch_size = (tokens, 1)
        if kind == "batch":
            seq_len, batch_size = BATCH_SEQ_LEN, tokens // BATCH_SEQ_LEN
        arguments, options = self._arguments, {}
        if self._name == "hetero":
            options = {"placement_policy": arguments.policy, "process_memory": budget}
        spec = Spec(
            self._name,
            vars(model_shape(arguments, seq_len, batch_size)),
            arguments.vocabulary,
            options,
            steps=arguments.steps,
            skip_steps=arguments.steps - 1,
        )
        python = arguments.peer_python if self._name == "deepspeed" else sys.executable
        found = run_trial(spec, self._folder, arguments.seconds, budget, python)
        if self._name != "hetero":
            self._known[kind, tokens] = found
        said = found["error"] or f"{found['steps_s'][-1]:.2f} s"
        peak = format_bytes(found["peak_bytes"])
        tell(NAME, f"{label}: {found['status']}, peak {peak}, {found['seconds']:.0f} s: {said}")
        return found


def longest(
    works: Callable[[int], bool], first: int, least: int, most: int, bisections: int
) -> int:
    """The largest multiple of `least`, up to `most`, of which `works` was true; 0 if of none.

    Up to some number all work, and from there on none. From `first` it doubles until one does not
    work; if `first` does not, and `least` does, it halves until one works. Then it halves what is
    between so many times.
    """
    low, high = 0, None
    if works(first):
        low = first
    elif first > least and works(least):
        low, high = least, first
        while low == least and high // 2 > least:
            at = high // 2 // least * least
            if works(at):
                low = at
            else:
                high = at
    if not low:
        return 0
    while high is None and low < most:
        at = min(2 * low, most)
        if works(at):
            low = at
        else:
            high = at
    if high is None:
        return low
    for _ in range(bisections):
        at = (low + high) // 2 // least * least
        if at <= low:
            break
        if works(at):
            low = at
        else:
            high = at
    return low


def show(result: dict[str, Any]) -> Iterator[str]:
    """A line for each contender, budget and kind; then why some trained nothing."""
    model, rows = result["model"], [["contender", "budget", "tokens", "limited by", "step, s",
                                     "peak", "x checkpoints"]]  # fmt: skip
    for row in result["found"]:
        bound = ">= " if row["is_lower_bound"] and row["tokens"] else ""
        ratio, step_s, peak = row["of_checkpoints"], row["step_s"], row["peak_bytes"]
        rows.append(
            [
                f"{row['kind']}: {CONTENDERS[row['contender']]}",
                format_bytes(row["budget_bytes"]),
                f"{bound}{row['tokens']:,}" if row["limited_by"] != LIMITED_BY["missing"] else "",
                row["limited_by"],
                "" if step_s is None else f"{step_s:.2f}",
                "" if peak is None else format_bytes(peak),
                "" if ratio is None else f"{bound}{ratio:.2f}",
            ]
        )
    yield titled(
        f"{NAME}: {model['layers']} layers of {model['width']}, vocabulary"
        f" {model['vocabulary']:,}; at most {result['seconds_of_a_try']:.0f} s a try",
        rows,
    )
    for row in result["found"]:
        if not row["tokens"]:
            budget = format_bytes(row["budget_bytes"])
            yield f"{row['contender']}, {row['kind']}, {budget}: {row['error']}"


PROGRAM = Program(NAME, __doc__, OPTIONS, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
