"""Training on a GPU whose memory is made smaller and smaller, beside training wholly in it.

usage: python -m bench.cuda [--models gpt-6b,gpt2-1.3b] [--contenders 25,100,10,torch,fsdp2,50]
                            [--nvme DIR] [--minutes 8] [--rows FILE] [--json]

A model *wants* on the device what it takes with all its state there: 14 bytes a parameter (bf16
parameter and gradient, and an optimizer state of 10). Each contender is a process of its own. What
does not fit into the time is left out, and said to be.

    torch      plain PyTorch in bf16 with fused AdamW, all in the GPU's memory: 8 bytes a parameter
    100 % ...  hetero, policy auto, with that share of what the model wants as device_memory
    fsdp2      fully_shard on one rank with CPUOffloadPolicy, fp32 in page-locked RAM, compute in
               bf16, and torch's fused AdamW on the CPU

The bound of a step is the slowest of its parts: compute, the step of 100 %; the link, which is
measured first, alone and as hetero copies over it; the CPU's update; and the disk of --nvme.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.harness.program import Program, add_options, names_of, tell
from bench.harness.ranks import run_trial
from bench.harness.tables import number, of_figures, size
from bench.work.gpt import SHAPES, VOCABULARY, Shape
from bench.work.gpt_training import Spec
from offload._native import UpdateKind
from offload.device.cuda_backend import CudaBackend, cuda_available
from offload.device.cuda_runtime import CudaRuntime
from offload.device.grad_offload import GradOffload, buffer_sizes
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account
from offload.profile.measure import UpdateArrays, measure_disk

WARM_UP, STEPS = 2, 5
ENOUGH_S = 15.0  # of measured steps
WANTED_BYTES = 14  # a parameter
_LEAST_S = 25.0  # less is not worth starting a contender for
# As the table has them.
_KINDS = ("torch", "100", "50", "25", "10", "fsdp2")
_UPDATE_KIND, _UPDATE_NUMEL = UpdateKind("bf16", "bf16"), 256 << 20  # far more than caches hold
_UPDATE_BYTES = 26  # of RAM that the CPU's update of a parameter reads and writes
_GRAD_BYTES = 2  # of it that come from the device
# Of copies: rounds that count, and what is copied in each.
ROUNDS, CHUNK_BYTES, CHUNKS = 5, 32 << 20, 32
WAYS = ("h2d", "d2h", "d2h_added")
_WAY_WORDS = {"h2d": "H2D", "d2h": "D2H", "d2h_added": "D2H, added"}


def options(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        ("--models", names_of(SHAPES), "gpt-6b,gpt2-1.3b", f"of {', '.join(SHAPES)}"),
        ("--contenders", names_of(_KINDS), "25,100,10,torch,fsdp2,50", "in this order"),
        ("--nvme", str, None, "a directory on NVMe for scratch files; else none"),
        ("--minutes", float, "8", "for everything"),
        ("--rows", str, None, "a file that gets each row as a line of JSON at once"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0 also if contenders failed or had no time: the table says which."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not cuda_available() and "--help" not in words:
        print("bench.cuda: skipped: torch sees no CUDA device")
        return 0
    if words[:1] == ["--link"]:  # of a process that run() starts
        print(json.dumps(measure_link()))
        return 0
    return PROGRAM.main(argv)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all contenders, of copies and of updates."""
    nvme, deadline_s = arguments.nvme, time.monotonic() + 60 * arguments.minutes
    copies = _run(["bench.cuda", "--link"], deadline_s)
    _keep(arguments.rows, {"contender": "link", **copies})
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        for kind in arguments.contenders:
            with tempfile.TemporaryDirectory() as folder:
                spec_of(model, kind, nvme).write(path := Path(folder, "spec.json"))
                found = _run(["bench.work.gpt_training", str(path)], deadline_s)
            rows.append({"model": model, "contender": kind, **row_of(SHAPES[model], found)})
            _keep(arguments.rows, rows[-1])
            tell(f"bench.cuda: {model} {kind}: {found['status']}")
    rows.sort(key=lambda r: (arguments.models.index(r["model"]), _KINDS.index(r["contender"])))
    disk = None
    if nvme is not None and any(row.get("disk_bytes") for row in rows):
        disk = measure_disk((nvme,), lambda text: None)["mixed"]
    whole_s = {row["model"]: row.get("step_s") for row in rows if row["contender"] == "100"}
    for row in rows:
        if row["contender"].isdigit():
            row |= bound(row, whole_s.get(row["model"]), copies, disk)
    return {"device": torch.cuda.get_device_name(), "rows": rows, "copies": copies}


def _keep(path: str | None, row: dict[str, Any]) -> None:
    """Whoever ends this program from outside loses none of the rows that are there."""
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def _run(module: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """What a module prints in a process of its own, with a "status" that says why it did not."""
    left_s = deadline_s - time.monotonic()
    if left_s < _LEAST_S:
        return {"status": "no time left"}
    # A crash says where.
    found = run_trial([sys.executable, "-X", "faulthandler", "-m", *module], left_s)
    if found["status"] in ("ok", "trained"):
        return {**found, "status": "ok"}
    if found["status"] == "late":
        return {"status": "out of time"}
    print(found.get("log", ""), file=sys.stderr)
    return {"status": f"failed: {found['error'][:200]}", "stderr": found.get("log")}


def measure_link() -> dict[str, Any]:
    """Bytes per second of copies, and of updates by the CPU and its memory alone."""
    arrays = UpdateArrays(_UPDATE_NUMEL)
    memory = max(arrays.stream() for _ in range(3))
    update = max(arrays.update(_UPDATE_KIND) for _ in range(3))
    return {"status": "ok", **measure_copies(), "memory": memory, "update": update}


def spec_of(model: str, kind: str, nvme: str | None) -> Spec:
    """What a contender trains."""
    shape = SHAPES[model]
    options: dict[str, Any] = {}
    if kind.isdigit():
        # Whole chunks are a little more than their parameters.
        share = int(kind) / 100 * (1.03 if kind == "100" else 1)
        wanted = int(WANTED_BYTES * shape.params(VOCABULARY) * share)
        options = {"backend": "cuda", "placement_policy": "auto", "device_memory": wanted}
        options["nvme_path"] = nvme
    return Spec(
        "hetero-whole" if kind.isdigit() else kind,
        vars(shape),
        VOCABULARY,
        options,
        steps=WARM_UP + STEPS,
        skip_steps=WARM_UP,
        device="cuda",
        enough_s=ENOUGH_S,
    )


def row_of(shape: Shape, found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a contender, and the bytes that a step of it moves."""
    if found["status"] != "ok":
        return dict(found)
    step_s, numel, moved = found["step_s"], found["params"], found["bytes_per_step"]
    return {
        **found,
        "tokens": shape.tokens,
        "h2d_bytes": moved.get("h2d", 0),
        "d2h_bytes": moved.get("d2h", 0),
        "disk_bytes": moved.get("disk_read", 0) + moved.get("disk_write", 0),
        "tokens_per_s": shape.tokens / step_s,
        "tflop_per_s": shape.flop(numel) / step_s / 1e12,
    }


# How fast hetero copies between page-locked RAM and a GPU, beside the link alone


def measure_copies(
    runtime: CudaRuntime | None = None, chunk_bytes: int = CHUNK_BYTES, chunks: int = CHUNKS
) -> dict[str, float]:
    """Bytes per second of each of WAYS, and of "h2d_alone" and "d2h_alone".

    "h2d" fetches chunks to their slots, "d2h" brings first gradients to their homes, "d2h_added"
    later ones, which are added in RAM; all as training does, one after another, until the host
    knows that they are there. "alone" is one copy by CUDA of as many bytes, in the same memory.
    They take turns; medians of ROUNDS after one of warm-up. Takes twice `chunk_bytes` times
    `chunks` of RAM and of the device's memory.
    """
    backend, ledger = CudaBackend(runtime), Ledger({})
    there = backend.arena(chunks, chunk_bytes, ledger, Account.GATHERED)
    ram = backend.host_arena(chunks, chunk_bytes, ledger, Account.PARAM)
    buffers = backend.host_arena(*buffer_sizes(chunk_bytes), ledger, Account.LINK)
    with closing(backend), closing(there), closing(ram), closing(buffers):
        ram.commit(0, chunks)
        buffers.commit(0, buffers.slots)
        ram.view(0, chunks, torch.uint8).zero_()
        offload = GradOffload(backend, ledger, 1 << 62, buffers)
        with closing(offload):
            times_s: dict[str, list[float]] = {}
            runs = _runs(backend, offload, there, ram)
            for _ in range(ROUNDS + 1):
                for name, run in runs.items():
                    backend.runtime.synchronize_all()
                    begin_s = time.perf_counter()
                    run()
                    times_s.setdefault(name, []).append(time.perf_counter() - begin_s)
    nbytes = chunks * chunk_bytes
    return {name: nbytes / statistics.median(some[1:]) for name, some in times_s.items()}


def _runs(
    backend: CudaBackend, offload: GradOffload, there: HostArena, ram: HostArena
) -> dict[str, Callable[[], None]]:
    """What is measured, between all slots on the device and as many in RAM."""
    whole, ram_whole = (arena.view(0, arena.slots, torch.uint8) for arena in (there, ram))
    chunks = [
        (there.view(slot, 1, torch.uint8), ram.view(slot, 1, torch.uint8))
        for slot in range(ram.slots)
    ]
    stream = backend.runtime.new_stream()

    def alone(to: torch.Tensor, source: torch.Tensor) -> None:
        backend.runtime.copy(to, source, stream)
        backend.runtime.synchronize_all()

    def fetch() -> None:
        copies = [backend.fetch(to, source) for to, source in chunks]
        for copy in copies:
            copy.wait()

    def bring(add: bool) -> None:
        for owner, (source, to) in enumerate(chunks):
            kept = to.view(torch.bfloat16)
            offload.take(owner, "", source.view(torch.bfloat16), kept, add)
        for owner in range(len(chunks)):
            offload.wait(owner, "")

    return {
        "h2d_alone": partial(alone, whole, ram_whole),
        "h2d": fetch,
        "d2h_alone": partial(alone, ram_whole, whole),
        "d2h": partial(bring, False),
        "d2h_added": partial(bring, True),
    }


# Beside what bounds them


def shares(copies: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Bytes per second of each copy and of the CPU's Adam, and their share of what the link or
    memory moves alone; none if they were not measured."""
    pairs = {_WAY_WORDS[way]: (way, f"{way[:3]}_alone") for way in WAYS}
    pairs["the CPU's Adam"] = "update", "memory"
    found = {name: [copies.get(key) for key in keys] for name, keys in pairs.items()}
    return {
        name: {"own": own, "alone": alone, "share": own / alone}
        for name, (own, alone) in found.items()
        if own is not None and alone is not None
    }


def bound(
    row: Mapping[str, Any],
    whole_s: float | None,
    copies: Mapping[str, Any],
    disk_bytes_per_s: float | None,
) -> dict[str, Any]:
    """The slowest part of a step, what it takes, and the step over that; nothing if one is unknown.

    Args:
        row: of a share of the state on the GPU.
        whole_s: of the step with all state there, which is what compute takes.
        copies: as shares() takes them.
        disk_bytes_per_s: what the scratch directory's disk moves, read and written together; None
            if there is none, or it was not measured.
    """
    if copies["status"] != "ok" or row["status"] != "ok" or whole_s is None:
        return {}
    h2d_s, d2h_s = (row[f"{way}_bytes"] / copies[f"{way}_alone"] for way in ("h2d", "d2h"))
    # (Without gradients that are accumulated each crosses the link once.)
    updated_bytes = row["d2h_bytes"] / _GRAD_BYTES * _UPDATE_BYTES
    parts_s = {
        "compute": whole_s,
        "link": max(h2d_s, d2h_s),
        "update": updated_bytes / copies["update"],
    }
    if row["disk_bytes"]:
        if disk_bytes_per_s is None:
            return {}
        parts_s["NVMe"] = row["disk_bytes"] / disk_bytes_per_s
    slowest = max(parts_s, key=lambda part: parts_s[part])
    bound_s = parts_s[slowest]
    return {"bound_by": slowest, "bound_s": bound_s, "of_bound": row["step_s"] / bound_s}


COLUMNS = (
    ("s/step", "step_s", number(3)),
    ("bound", "bound_s", number(3)),
    ("by", "bound_by", str),
    ("step / bound", "of_bound", number()),
    ("tokens/s", "tokens_per_s", number(0)),
    ("TFLOP/s", "tflop_per_s", number(1)),
    ("of 100%", "of_whole", "{:.0%}".format),
    ("GPU peak", "device_peak_bytes", size),
    ("RSS", "rss_bytes", size),
    ("not measured", "why", str),
)
SHARE_COLUMNS = (
    ("GB/s", "own", number(1, 1e-9)),
    ("alone", "alone", number(1, 1e-9)),
    ("share", "share", number()),
)


def show(result: Mapping[str, Any]) -> Iterator[str]:
    """A table of the contenders, and one of copies and updates."""
    yield str(result["device"])
    whole = {r["model"]: r.get("tokens_per_s") for r in result["rows"] if r["contender"] == "100"}
    rows = {}
    for row in result["rows"]:
        kind, speed, ok = row["contender"], whole.get(row["model"]), row["status"] == "ok"
        share = row["tokens_per_s"] / speed if ok and speed else None
        why = None if ok else row["status"]
        name = f"hetero, {kind} %" if kind.isdigit() else kind
        rows[f"{row['model']} {name}"] = {**row, "of_whole": share, "why": why}
    yield of_figures("training steps", rows, COLUMNS)
    yield from (
        "TFLOP/s: (6 N + 6 L h s) FLOP a token, N all parameters, causal attention; 'of 100%': of",
        "hetero's tokens/s with all state on the GPU; shares are of 14 bytes a parameter.\n",
    )
    if result["copies"]["status"] != "ok":
        yield f"copies and updates: {result['copies']['status']}"
    yield of_figures("copies and updates", shares(result["copies"]), SHARE_COLUMNS)


PROGRAM = Program("bench.cuda", __doc__, options, run, show)

if __name__ == "__main__":
    sys.exit(main())
