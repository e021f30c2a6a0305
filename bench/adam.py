"""Update kernels beside the limit of memory and torch's fused AdamW, in one run.

usage: python -m bench.adam [--numel N] [--threads T] [--rounds N] [--peers torch|none] [--json]

One contender after the other takes a turn; a turn is one update of warm-up and a timed one. GB/s
counts the bytes that an update has to read and write, once each; the stream is 4 reads and 3 writes
of fp32 by the same threads, which is what memory gives. torch's updates have moments in the
parameter's dtype, and no master. Run it with OMP_WAIT_POLICY=passive and THP_MEM_ALLOC_ENABLE=1, so
that torch's threads sleep in hetero's turns and its arrays have huge pages, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import psutil
import torch

from bench.harness.program import Program, add_options, names_of, whole
from bench.harness.rounds import Sample, run_rounds
from bench.harness.tables import number, of_figures, ranged
from offload import _native
from offload._native import UpdateKind
from offload.cgroups import usable_cpus
from offload.memory.sizes import format_bytes
from offload.profile.measure import UpdateArrays

if TYPE_CHECKING:
    from offload._native import DtypeName, RuleName, StateDtypeName

RULES: tuple[RuleName, ...] = ("adam", "lion", "adagrad", "sgd", "muon", "muon_momentum")
STATE_DTYPES: tuple[StateDtypeName, ...] = ("fp32", "bf16", "8bit")
# Parameter and gradient: gradients as backward gives them, or accumulated in fp32.
DTYPES: tuple[tuple[DtypeName, DtypeName], ...] = (
    ("bf16", "bf16"),
    ("bf16", "fp32"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
)
ARRAYS_BYTES = 20  # of hetero's, an element
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def options(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        ("--numel", whole(), str(64 << 20), "elements of each array"),
        ("--threads", whole(), None, "of every contender; else the usable CPUs"),
        ("--rounds", whole(), "5", "after one of warm-up"),
        ("--peers", names_of(("torch",)), "torch", "torch, or none"),
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures. Raises ValueError for what cannot be measured."""
    numel, threads = arguments.numel, arguments.threads or usable_cpus()
    of_torch = TORCH_DTYPES if arguments.peers else {}
    needed = numel * (ARRAYS_BYTES + sum(4 * dtype.itemsize for dtype in of_torch.values()))
    available = psutil.virtual_memory().available
    if needed > available:
        raise ValueError(
            f"--numel {numel} needs {format_bytes(needed)}, but {format_bytes(available)} are"
            f" available; lower --numel"
        )
    _native.set_threads(threads)
    torch.set_num_threads(threads)
    arrays = UpdateArrays(numel)
    turns: dict[str, Callable[[], Sample]] = {"stream": partial(_sample, arrays.stream, 28.0)}
    for kind in kinds():
        per_param = kind.bytes_moved(numel) / numel
        turns[name_of(kind)] = partial(_sample, partial(arrays.update, kind), per_param)
    for name, dtype in of_torch.items():
        updates = _torch_updates(numel, dtype)
        turns[f"torch fused AdamW {name}"] = partial(_sample, updates, 7.0 * dtype.itemsize)
    rounds = run_rounds(turns, arguments.rounds)
    rounds.compare("stream", "gbps", "of_stream")
    given = {"threads": threads, "isa": _native.isa(), "numel": numel, "rounds": arguments.rounds}
    return {"updates": rounds.figures(), **given}


def kinds() -> Iterator[UpdateKind]:
    """Every kernel, in every sensible combination of dtypes."""
    for rule, (dtype, grad_dtype), state_dtype in product(RULES, DTYPES, STATE_DTYPES):
        yield UpdateKind(dtype, grad_dtype, rule, state_dtype)


def name_of(kind: UpdateKind) -> str:
    """E.g. "adam bf16/bf16, states fp32": parameter and gradient, then states."""
    return f"{kind.rule} {kind.dtype}/{kind.grad_dtype}, states {kind.state_dtype}"


def _sample(rate: Callable[[], float], bytes_per_param: float) -> Sample:
    """Of what gives bytes per second."""
    per_s = rate()
    about = {"params_per_s": per_s / bytes_per_param, "bytes_per_param": bytes_per_param}
    return {**about, "gbps": per_s / 1e9}


def _torch_updates(numel: int, dtype: torch.dtype) -> Callable[[], float]:
    """Bytes per second of an update of one flat parameter."""
    param = torch.nn.Parameter(torch.randn(numel).to(dtype))
    param.grad = torch.randn(numel).to(dtype)
    optimizer = torch.optim.AdamW([param], lr=1e-4, weight_decay=0.01, fused=True)

    def rate() -> float:
        optimizer.step()
        begin_s = time.perf_counter()
        optimizer.step()
        return 7 * param.nbytes / (time.perf_counter() - begin_s)

    return rate


COLUMNS = (
    ("G params/s", "params_per_s", ranged(2, 1e-9)),
    ("B/param", "bytes_per_param", number(2)),
    ("GB/s", "gbps", number(1)),
    ("of stream", "of_stream", number()),
)


def show(result: dict[str, Any]) -> Iterator[str]:
    """A row for each update."""
    title = f"bench.adam: {result['numel']:,} elements, {result['threads']} threads,"
    title += f" median of {result['rounds']} (least-most)"
    yield of_figures(title, result["updates"], COLUMNS)


PROGRAM = Program("bench.adam", __doc__, options, run, show)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
