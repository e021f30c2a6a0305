"""The largest model, the longest sequence and the largest batch that train within a budget.

usage: python -m bench.largest [--of model|sequence|batch] [--budgets 1GiB,2GiB,4GiB]
                               [--contenders LIST] [--first N] [--most N] [--tries N] [--path DIR]
                               [--peer-python PY] [--json]

Budgets are for the whole process. Each try is a process of its own, which trains a GPT-2 in bf16
with AdamW for some steps. It counts if it trained and the peak of resident memory that the kernel
has counted for it (VmHWM), construction included, is within the budget; it is ended as soon as it
is beyond. The operating system refuses twice the budget of writable memory (RLIMIT_DATA).

model     shapes are GPT-2's, from one to the next at most 15 % larger, of --batch-size sequences of
          --seq-len tokens, as far as the disk holds them: 18 bytes a parameter while the model is
          built, 14 then. hetero has embeddings in tiles and each block a checkpoint; its first try
          is the largest for which its placement says that the budget is enough, beside the
          framework as measured and activations by a formula.
sequence  tokens of one sequence, of a model of --layers, --width and --heads; hetero is told the
          budget as process_memory.
batch     the same with sequences of 128 tokens.

From the first try on larger or smaller ones follow until one trains and one does not, and what is
between is halved. A try that is not done after --timeout says nothing of memory: what is found
then, or when --tries are used up, is a lower bound, shown with ">=".
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import hetero
from bench.activations.training import CONTENDERS, TILE_TOKENS, Spec
from bench.activations.trial import POLICIES, tell, try_to_train
from bench.harness.program import Program, options, peer_python
from bench.harness.tables import Column, Table, number, shown, size
from bench.work.gpt import Gpt, Shape
from hetero.config import Config
from hetero.planning.group_plans import arrange
from offload.disk.directories import free_bytes
from offload.errors import BudgetError
from offload.memory.sizes import format_bytes

NAME = "bench.largest"
HETERO = {"model": "hetero-tiles-checkpoints", "sequence": "hetero", "batch": "hetero"}
BATCH_SEQ_LEN = 128
LEAST_TOKENS = {"sequence": 64, "batch": BATCH_SEQ_LEN}  # of which all are multiples
STEPS_PER_DOUBLING = 4  # of tokens
MOST_TOKENS = 1 << 17
BUILD_TIMEOUT_S = 1800.0
# Why no larger one was found, by the status of the smallest try that did not train.
LIMITED_BY = {
    "late": "time",
    "over": "memory",
    "failed": "memory",
    "refused": "memory",
    "missing": "not installed",
    "broken": "an error",
}
LOWER_BOUNDS = ("time", "--tries", "--most", "disk", "the widest of shapes")

# Shapes of models.
HEAD_WIDTH = 64
LEAST_WIDTH, MOST_WIDTH = 64, 5120
MOST_LAYERS = 96  # GPT-3's
LEAST_WIDTH_PER_LAYER = 8  # GPT-2's are 33 to 64, GPT-3's 64 to 128
LEAST_GROWTH = 1.06  # a shape that is less than this larger than the one before is left out

# Bytes a parameter: fp32 until it finds its place, and bf16 parameter, gradient and optimizer
# state.
BUILDING_BYTES, TRAINING_BYTES = 4, 14
USUAL_STATE_BYTES = 16
DISK_SHARE = 0.95  # of what is free
ATTEMPTS = 3  # at one shape, each with less for the engine by what was too much
MARGIN_BYTES = 48 << 20  # for what is in no formula: fragments, and libraries' scratch memory
# Bytes a token, a column and a layer, of holes in the heap between what layers keep for backward:
# as measured (the C library's heap grows by so much with each layer; tensors alive do not).
HOLE_BYTES = 16
# Where peers begin.
FLOOR_BYTES, BYTES_PER_PARAM = 1 << 30, 8

OPTIONS = (
    options(
        """
    --of          NAME     model           what is to be large
    --budgets     SIZES    1GiB,2GiB,4GiB  of a process
    --contenders  NAMES    -               of bench/activations/training.py (default: hetero)
    --first       N        1024            tokens of a step in the first try
    --most        COUNT    -               parameters, or tokens of a step (default: the disk's,
                                           128 Ki)
    --tries       N        6               for a budget, at most
    --steps       N        2               of a try; the last one is timed
    --layers      N        24              of the model whose tokens are many
    --width       N        1024            of that model
    --heads       N        16              of that model
    --seq-len     N>=2     128             tokens of a sequence of the models
    --batch-size  N        1               sequences of a step of the models
    --vocabulary  N        50257           of all models
    --policy      NAME     nvme            of hetero
    --timeout     SECONDS  3600            of a try
    --path        DIR      .               a folder on NVMe
    """,
        of=HETERO,
        contenders=CONTENDERS,
        policy=POLICIES,
    )
    + peer_python()
)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """What each contender reaches in each budget. Raises ValueError for input that cannot work."""
    if not Path(arguments.path).is_dir():
        raise ValueError(f"--path {arguments.path} is not a folder")
    contenders = [
        HETERO[arguments.of] if name == "hetero" else name
        for name in arguments.contenders or ("hetero",)
    ]
    found: dict[str, dict[str, Any]] = {}
    notes = []
    with tempfile.TemporaryDirectory(dir=arguments.path, prefix="bench-largest-") as folder:
        row, end = _row(arguments, folder)
        for name in contenders:
            search = Search(name, arguments, folder, row, end)
            for budget in sorted(set(arguments.budgets)):
                label = f"{name}, {format_bytes(budget)}"
                found[label] = search.largest(budget)
                notes += [f"{label}: not {why}" for why in found[label]["not"]]
    return {"of": arguments.of, "steps": arguments.steps, "found": found, "notes": notes}


def _row(arguments: argparse.Namespace, folder: str) -> tuple[list[Shape], str]:
    """What may be tried, the smallest first; and why nothing larger may."""
    if arguments.of != "model":
        least, most = LEAST_TOKENS[arguments.of], arguments.most or MOST_TOKENS
        model = arguments.layers, arguments.width, arguments.heads
        return [
            Shape(
                *model, *((tokens, 1) if arguments.of == "sequence" else (least, tokens // least))
            )
            for tokens in token_counts(least, most)
        ], "--most"
    held = free_bytes(folder) * DISK_SHARE / (BUILDING_BYTES + TRAINING_BYTES)
    shapes = family(arguments.vocabulary, arguments.seq_len, arguments.batch_size)
    most = min(held, arguments.most or held)
    row = [shape for shape in shapes if shape.params(arguments.vocabulary) <= most]
    if not row:
        least = shapes[0].params(arguments.vocabulary)
        raise ValueError(f"not even {least:,} parameters are within --most and the disk")
    end = "disk" if held <= most else "--most"
    return row, "the widest of shapes" if len(row) == len(shapes) else end


def token_counts(least: int, most: int) -> list[int]:
    """Multiples of `least` up to `most`, STEPS_PER_DOUBLING of them or all from one power of two to
    the next."""
    counts, power = [], 1
    while power * least <= most:
        step = max(1, power // STEPS_PER_DOUBLING)
        counts += [n * least for n in range(power, 2 * power, step) if n * least <= most]
        power *= 2
    return counts or [least]


def widths() -> Iterator[int]:
    """Each at most an eighth more than the one before."""
    width = LEAST_WIDTH
    while width <= MOST_WIDTH:
        yield width
        # A power of two, so that what is wide has heads of HEAD_WIDTH.
        width += min(HEAD_WIDTH, max(8, 1 << (width // 8).bit_length() - 1))


def family(vocabulary: int, seq_len: int, batch_size: int) -> list[Shape]:
    """Models, the smallest first.

    Width is what takes RAM (a layer's parameters are on disk until it is computed, and an
    embedding's tiles are no larger), so of each width there are the shapes that have more
    parameters than all narrower ones: the deepest, up to MOST_LAYERS or a width of
    LEAST_WIDTH_PER_LAYER a layer.
    """
    found: list[Shape] = []
    for width in widths():
        heads = next(n for n in range(max(1, width // HEAD_WIDTH), 0, -1) if not width % n)
        for layers in range(1, min(MOST_LAYERS, width // LEAST_WIDTH_PER_LAYER) + 1):
            shape = Shape(layers, width, heads, seq_len, batch_size)
            last = found[-1].params(vocabulary) if found else 0
            if shape.params(vocabulary) >= LEAST_GROWTH * last:
                found.append(shape)
    return found


def climb(
    count: int, guess: int, works: Callable[[int], bool], tries: int, stride: int = 1
) -> int | None:
    """The largest index below `count` of which `works` was true in at most `tries` calls.

    Up to an index all work, and from there on none, or else it is one of several such borders.
    From `guess` it goes up or down by `stride`, then by twice as much each time, until it has one
    that works and one that does not, and halves what is between them. None: nothing that was tried
    works.
    """
    low, high = -1, count  # the largest that works, the smallest that does not
    at = min(max(guess, 0), count - 1)
    for _ in range(tries):
        if high - low <= 1:
            break
        if works(at):
            low = at
        else:
            high = at
        if low >= 0 and high < count:
            at = (low + high) // 2
        else:
            at = min(low + stride, count - 1) if low >= 0 else max(high - stride, 0)
            stride *= 2
    return low if low >= 0 else None


class Search:
    """The tries of one contender; each budget begins with what a smaller one has shown."""

    def __init__(
        self,
        contender: str,
        arguments: argparse.Namespace,
        folder: str,
        row: Sequence[Shape],
        end: str,
    ) -> None:
        """Finds out what the framework takes, and whether the contender is there."""
        self._contender, self._arguments, self._folder = contender, arguments, folder
        self._row, self._end = row, end
        self._known: dict[int, dict[str, Any]] = {}  # what no budget changes, by place in the row
        self._least = 0  # where the next larger budget begins
        # What the last peaks were above what had been reckoned; the next model begins with it.
        self._too_much_bytes = 0
        self.framework_bytes = 0
        if contender in ("deepspeed", HETERO["model"]):
            tell(NAME, f"{contender}: what the framework takes")
            # (DeepSpeed compiles its operators at first use, which is no part of a try.)
            spec = Spec(contender, vars(Shape(1, 64, 1, 16, 1)), 256)
            found = self._run(spec, BUILD_TIMEOUT_S, None)
            self.framework_bytes = int(found["peak_bytes"])
            if found["status"] != "trained":
                self._known = dict.fromkeys(range(len(row)), found)

    def largest(self, budget: int) -> dict[str, Any]:
        """The largest of the row that trains within the budget, what it took, and all tries."""
        tries: dict[int, dict[str, Any]] = {}

        def works(place: int) -> bool:
            tries[place] = self._try(place, budget)
            return bool(tries[place]["status"] == "trained")

        stride = 1 if self._arguments.of == "model" else STEPS_PER_DOUBLING
        guess = max(self._guess(budget), self._least)
        place = climb(len(self._row), guess, works, self._arguments.tries, stride)
        tried = sorted(tries.items())
        found: dict[str, Any] = {
            "budget_bytes": budget,
            "not": [f"{self._about(n)}: {t['error']}" for n, t in tried if t["error"] is not None],
            "tries": {self._about(n): t["status"] for n, t in tried},
        }
        if place is None:
            limit = LIMITED_BY[tried[-1][1]["status"]]
            return found | {"limited_by": limit, "is_lower_bound": False, "what": "none"}
        limit = self._end if place == len(self._row) - 1 else "--tries"
        if place + 1 in tries:
            limit = LIMITED_BY[tries[place + 1]["status"]]
        self._least = place
        shape, best, bound = self._row[place], tries[place], limit in LOWER_BOUNDS
        params, moved = shape.params(self._arguments.vocabulary), best["bytes_per_step"]
        return found | {
            "limited_by": limit,
            "is_lower_bound": bound,
            "what": (">= " if bound else "") + self._about(place),
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
        shape = self._row[place]
        if self._arguments.of != "model":
            return f"{shape.tokens:,} tokens"
        params = shape.params(self._arguments.vocabulary)
        return f"{shape.layers} x {shape.width}, {params / 1e6:,.0f}M"

    def _guess(self, budget: int) -> int:
        """The place of the first try."""
        arguments, row = self._arguments, self._row
        if arguments.of != "model":
            first: int = arguments.first
            return sum(shape.tokens <= first for shape in row) - 1
        if self._contender == HETERO["model"]:

            def planned(place: int) -> bool:
                host = self._host_bytes(row[place], budget)
                return fits(row[place], arguments.vocabulary, host, self._folder)

            return climb(len(row), len(row) // 2, planned, len(row)) or 0
        most: float = (budget - FLOOR_BYTES) / BYTES_PER_PARAM
        return sum(shape.params(arguments.vocabulary) <= most for shape in row) - 1

    def _host_bytes(self, shape: Shape, budget: int) -> int:
        """What the budget leaves for the engine."""
        outside = outside_bytes(shape, self._arguments.vocabulary) + MARGIN_BYTES
        return budget - self.framework_bytes - outside - self._too_much_bytes

    def _try(self, place: int, budget: int) -> dict[str, Any]:
        """Trains it; hetero's models with less for the engine each time they took too much."""
        label = f"{self._contender}, {self._about(place)} in {format_bytes(budget)}"
        known = self._known.get(place)
        if known is not None and (known["status"] != "trained" or known["peak_bytes"] <= budget):
            tell(NAME, f"{label}: {known['status']}, known from a smaller budget")
            return known
        shape = self._row[place]
        found: dict[str, Any] = {}
        for _ in range(ATTEMPTS):
            options: dict[str, Any] = {"placement_policy": self._arguments.policy}
            if self._contender == HETERO["model"]:
                options["host_memory"] = host = self._host_bytes(shape, budget)
                if host <= 0:
                    error = f"the budget is {-host} bytes too small"
                    return found or {"status": "refused", "error": error, "peak_bytes": 0}
            elif self._contender.startswith("hetero"):
                options["process_memory"] = budget
            else:
                options = {}
            steps, vocabulary = self._arguments.steps, self._arguments.vocabulary
            spec = Spec(self._contender, vars(shape), vocabulary, options, {}, 1, steps, steps - 1)
            found = self._run(spec, self._arguments.timeout, budget)
            said = found["error"] or f"{found['steps_s'][-1]:.2f} s"
            peak = format_bytes(found["peak_bytes"])
            tell(NAME, f"{label}: {found['status']}, peak {peak}: {said}")
            if found["status"] != "over" or "host_memory" not in options:
                break
            self._too_much_bytes += found["peak_bytes"] - budget + MARGIN_BYTES
        if found["status"] in ("trained", "late") and not self._contender.startswith("hetero"):
            self._known[place] = found
        return found

    def _run(self, spec: Spec, timeout_s: float, budget: int | None) -> dict[str, Any]:
        is_peer = self._contender == "deepspeed"
        python = self._arguments.peer_python if is_peer else sys.executable
        return try_to_train(spec, self._folder, timeout_s, budget, python)


def outside_bytes(shape: Shape, vocabulary: int) -> int:
    """RAM that a model of hetero-tiles-checkpoints takes beside the framework and what the engine
    manages.

    With t tokens a step, width w, L layers, vocabulary V, 2 bytes an element: what is kept per
    layer, 2tw, with HOLE_BYTES; of the layer that is computed 34 tw elements and the attention's
    scores; logits of TILE_TOKENS, in bf16, fp32 and as log-softmax, 10 bytes each; of all tokens
    the gradient of hidden states, in fp32, with what is summed to it; the gradient of a tile, and
    twice the largest matrix, which matrix products reorder. (The embedding is in tiles, none larger
    than that.)
    """
    width, tokens = shape.width, shape.tokens
    layer = 2 * 34 * tokens * width + 3 * 2 * shape.heads * tokens * shape.seq_len
    kept = (2 + HOLE_BYTES) * tokens * width * shape.layers
    logits = 3 * 10 * min(TILE_TOKENS, tokens) * vocabulary
    states, matrix = 8 * tokens * width, 2 * 4 * width * width
    return kept + layer + logits + states + 4 * matrix


def fits(shape: Shape, vocabulary: int, host_bytes: int, folder: str) -> bool:
    """Whether the placement finds room for the model, of which nothing is made."""
    if host_bytes < 2 * 4 * shape.width**2:  # a quick answer for most of what does not
        return False
    with torch.device("meta"):
        model = Gpt(shape, vocabulary)
        hetero.tile_embeddings(model)
        config = Config(
            placement_policy="nvme", host_memory=host_bytes, nvme_path=folder, dtype="bf16"
        )
        dtypes = hetero.HybridAdam(model.parameters()).dtypes(config)
        try:
            arrange(model, config, dtypes, host_bytes, int(free_bytes(folder) * DISK_SHARE))
        except BudgetError:
            return False
    return True


def _title(result: Mapping[str, Any]) -> str:
    return f"{NAME}: {result['of']}, {result['steps']} steps a try"


TABLE = Table(
    _title,
    "found",
    (
        Column("trains", "what"),
        Column("limited by", "limited_by"),
        Column("16 B a parameter", "state_bytes", size),
        Column("peak RSS", "peak_bytes", size),
        Column("built s", "built_s", number(0)),
        Column("step s", "step_s", number()),
        Column("NVMe a step", "nvme_bytes", size),
    ),
)
PROGRAM = Program(NAME, __doc__, OPTIONS, run, shown(TABLE))
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
