"""Training on a GPU whose memory is made smaller and smaller, beside training wholly in it.

usage: python -m bench.cuda [--models gpt-6b,gpt-14b,gpt2-1.3b]
                            [--contenders 25,100,10,torch,fsdp2,deepspeed,50,80gb]
                            [--nvme DIR] [--minutes 8] [--rows FILE] [--json]

A model *wants* on the device what it takes with all its state there: 14 bytes a parameter (bf16
parameter and gradient, and an optimizer state of 10). Each contender is a process of its own. What
does not fit into the time is left out, and said to be.

    torch      plain PyTorch in bf16 with fused AdamW, all in the GPU's memory: 8 bytes a parameter
    100 % ...  hetero, policy auto, with that share of what the model wants as device_memory
    fsdp2      fully_shard on one rank with CPUOffloadPolicy, fp32 in page-locked RAM, compute in
               bf16, and torch's fused AdamW on the CPU
    deepspeed  ZeRO-3 with parameters and optimizer in RAM, where it is installed
    80gb       hetero on as much as a GPU of 80 GB and 128 GiB of RAM have, whatever is there: the
               one contender of gpt-14b, and of no other model

Below the table each figure stands beside its aim (bench/cuda_aims.py). For these the link is
measured first, alone and as hetero copies over it, and the disk of --nvme if a contender used it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from bench.cuda_aims import LIMITED_DEVICE_BYTES, LIMITED_MODEL, LIMITED_RAM_BYTES, Aim, aims
from bench.harness.program import Program, options
from bench.harness.tables import Column, number, of_figures, size
from bench.harness.trial import run_trial
from bench.kernels.cuda_copies import measure_copies, measure_updates
from bench.work.gpt import SHAPES, VOCABULARY, Gpt, Shape, fill, quick_init
from offload.device.cuda_backend import DEFAULT_SHARE, cuda_available
from offload.profile.measure import measure_disk

WARM_UP, STEPS = 2, 5
ENOUGH_S = 15.0  # of measured steps
WANTED_BYTES = 14  # a parameter
_LEAST_S = 25.0  # less is not worth starting a contender for
# As the table has them.
_KINDS = ("torch", "100", "50", "25", "10", "fsdp2", "deepspeed", "80gb")
_LINK = "link"  # stands in the place of a model and a contender for the measurement of copies

OPTIONS = options(
    """
    --models      NAMES    gpt-6b,gpt-14b,gpt2-1.3b  by name
    --contenders  NAMES    25,100,10,torch,fsdp2,deepspeed,50,80gb  some of these, the most telling
                           ones first
    --nvme        DIR      -  a directory on NVMe for scratch files (default: none)
    --minutes     MINUTES  8  for everything
    --rows        FILE     -  a file that gets each row as a line of JSON at once
    """,
    models=SHAPES,
    contenders=_KINDS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 also if contenders failed or had no time: the table says which."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not cuda_available() and "--help" not in words:
        print("bench.cuda: skipped: torch sees no CUDA device")
        return 0
    if words[:1] == ["--one"]:  # of the processes that _run() starts
        print(json.dumps(_measure_one(words[1], words[2] if len(words) > 2 else None)))
        return 0
    return PROGRAM.main(argv)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all contenders, and the aims."""
    nvme, deadline_s = arguments.nvme, time.monotonic() + 60 * arguments.minutes
    copies = _run(_LINK, nvme, deadline_s)
    _keep(arguments.rows, {"contender": _LINK, **copies})
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        for kind in arguments.contenders:
            if (kind == "80gb") == (model == LIMITED_MODEL):
                found = _run(f"{model}/{kind}", nvme, deadline_s)
                rows.append({"model": model, "contender": kind, **found})
                _keep(arguments.rows, rows[-1])
                print(f"bench.cuda: {model} {kind}: {found['status']}", file=sys.stderr, flush=True)
    rows.sort(
        key=lambda row: (
            arguments.models.index(row["model"]),
            _KINDS.index(row["contender"]),
        )
    )
    return {
        "device": torch.cuda.get_device_name(),
        "rows": rows,
        "copies": copies,
        "aims": [vars(aim) for aim in aims(rows, copies, _disk_rate(rows, nvme))],
    }


def _keep(path: str | None, row: dict[str, Any]) -> None:
    """Whoever ends this program from outside loses none of the rows that are there."""
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def _disk_rate(rows: Sequence[dict[str, Any]], directory: str | None) -> float | None:
    """What the disk moves in the update's pattern, if a contender has used it."""
    if directory is None or not any(row.get("disk_bytes") for row in rows):
        return None
    return measure_disk((directory,), lambda text: None)["mixed"]


def _run(one: str, nvme: str | None, deadline_s: float) -> dict[str, Any]:
    """What `--one` prints in a process of its own, or a "status" that says why it did not."""
    if one.endswith("/deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return {"status": "not installed"}
    left_s = deadline_s - time.monotonic()
    if left_s < _LEAST_S:
        return {"status": "no time left"}
    # A crash says where.
    command = [sys.executable, "-X", "faulthandler", "-m", "bench.cuda", "--one", one]
    found = run_trial([*command, *([nvme] if nvme else [])], left_s)
    if found["status"] == "late":
        return {"status": "out of time"}
    if found["status"] in ("failed", "broken"):
        print(found["log"], file=sys.stderr)
        return {"status": f"failed: {found['error'][:200]}", "stderr": found["log"]}
    return found


# One contender


@dataclass(frozen=True)
class _Prepared:
    """A model and its optimizer."""

    step: Callable[[torch.Tensor], object]
    numel: int
    # Bytes to the device, from it, and to and from the disk so far.
    moved: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
    facts: dict[str, Any] | None = None


def _measure_one(one: str, nvme: str | None) -> dict[str, Any]:
    if one == _LINK:
        return {"status": "ok", **measure_copies(), **measure_updates()}
    model, kind = one.split("/")
    return _measure(SHAPES[model], kind, nvme)


def _measure(shape: Shape, kind: str, nvme: str | None) -> dict[str, Any]:
    began_s = time.monotonic()
    prepared = _prepare(shape, kind, nvme)
    torch.cuda.reset_peak_memory_stats()
    times_s, moved = _time(prepared, shape)
    step_s = statistics.median(times_s)
    return {
        "status": "ok",
        "numel": prepared.numel,
        "tokens": shape.tokens,
        **(prepared.facts or {}),
        **dict(zip(("h2d_bytes", "d2h_bytes", "disk_bytes"), moved, strict=True)),  # of a step
        "ready_s": time.monotonic() - began_s - sum(times_s),
        "step_s": step_s,
        "steps": len(times_s),
        "tokens_per_s": shape.tokens / step_s,
        "tflop_per_s": shape.flop(prepared.numel) / step_s / 1e12,
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "device_reserved_bytes": torch.cuda.max_memory_reserved(),
        "rss_bytes": psutil.Process().memory_info().rss,
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _prepare(shape: Shape, kind: str, nvme: str | None) -> _Prepared:
    if kind == "80gb":
        return _limited(shape, nvme)
    with quick_init():
        model = Gpt(shape)
    fill(model)
    if kind == "torch":
        model.to(device="cuda", dtype=torch.bfloat16)
        return _Prepared(_torch(model), _numel(model))
    if kind == "fsdp2":
        return _Prepared(_fsdp2(model), _numel(model))
    if kind == "deepspeed":
        return _Prepared(_deepspeed(model), _numel(model))
    wanted = WANTED_BYTES * _numel(model)
    # Whole chunks are a little more than their parameters.
    device_memory = int(wanted * int(kind) / 100 * (1.03 if kind == "100" else 1))
    return _hetero(
        model,
        backend="cuda",
        placement_policy="auto",
        device_memory=device_memory,
        nvme_path=nvme,
    )


def _limited(shape: Shape, nvme: str | None) -> _Prepared:
    """On a part of the GPU and of RAM; torch refuses what is more than the part of the GPU."""
    import hetero

    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, LIMITED_DEVICE_BYTES / total))
    options: dict[str, Any] = {
        "device_memory": int(LIMITED_DEVICE_BYTES * DEFAULT_SHARE),
        "process_memory": LIMITED_RAM_BYTES,
        "nvme_path": nvme,
    }
    with hetero.ZeroInitContext(backend="cuda", placement_policy="auto", **options):
        with quick_init():
            model = Gpt(shape)
        fill(model)
    return _hetero(model)  # the context has said the options


def _numel(model: Gpt) -> int:
    return sum(p.numel() for p in model.parameters())


def _time(prepared: _Prepared, shape: Shape) -> tuple[list[float], list[float]]:
    """Seconds of steps, and what one moved."""
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch_size, shape.seq_len)
    times_s: list[float] = []
    before = prepared.moved()
    for step in range(WARM_UP + STEPS):
        tokens = torch.randint(0, VOCABULARY, size, generator=generator).cuda()
        torch.cuda.synchronize()
        if step == WARM_UP:
            before = prepared.moved()
        begin = time.perf_counter()
        prepared.step(tokens)
        torch.cuda.synchronize()
        if step >= WARM_UP:
            times_s.append(time.perf_counter() - begin)
        if sum(times_s) > ENOUGH_S:
            break
    after = prepared.moved()
    return times_s, [(b - a) / len(times_s) for a, b in zip(before, after, strict=True)]


def _hetero(model: Gpt, **options: Any) -> _Prepared:
    import hetero

    numel = _numel(model)
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
    managed, optimizer = hetero.initialize(model, optimizer, **options)
    engine = optimizer.engine
    tiers = [tier.value for tier in engine.placement.param]
    facts = {
        "device_memory": engine.ledger.budget_bytes["device"],
        "chunks": {tier: tiers.count(tier) for tier in ("device", "host", "disk")},
        "notes": engine.notes,
    }
    gc.collect()

    def step(tokens: torch.Tensor) -> None:
        optimizer.backward(managed(tokens))
        optimizer.step()
        optimizer.zero_grad()

    def moved() -> tuple[int, int, int]:
        traffic = engine.traffic
        return traffic.h2d, traffic.d2h, traffic.disk_read + traffic.disk_write

    return _Prepared(step, numel, moved, facts)


def _torch(model: Gpt) -> Callable[[torch.Tensor], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step(tokens: torch.Tensor) -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fsdp2(model: Gpt) -> Callable[[torch.Tensor], object]:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("cuda:nccl,cpu:gloo", store=store, rank=0, world_size=1)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    model.places = model.places.cuda()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _torch(model)


def _deepspeed(model: Gpt) -> Callable[[torch.Tensor], object]:
    import deepspeed  # type: ignore[import-not-found]

    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}
    in_ram = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": optimizer,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": in_ram, "offload_param": in_ram},
    }
    # It writes to stdout, where the result goes.
    with contextlib.redirect_stdout(sys.stderr):
        engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(tokens: torch.Tensor) -> None:
        engine.backward(engine(tokens))
        engine.step()

    return step


# For people


def show(result: Mapping[str, Any]) -> Iterator[str]:
    """A table of the contenders, and each aim beside its figure."""
    yield str(result["device"])
    whole = {r["model"]: r.get("tokens_per_s") for r in result["rows"] if r["contender"] == "100"}
    rows = {}
    for row in result["rows"]:
        kind, speed, ok = row["contender"], whole.get(row["model"]), row["status"] == "ok"
        name = f"hetero, {kind} %" if kind.isdigit() else kind.replace("80gb", "hetero, 80 GB")
        share = row["tokens_per_s"] / speed if ok and speed else None
        why = None if ok else row["status"]
        rows[f"{row['model']} {name}"] = {**row, "of_whole": share, "why": why}
    yield of_figures("training steps", rows, COLUMNS)
    yield from (
        "TFLOP/s: (6 N + 6 L h s) FLOP a token, N all parameters, causal attention; 'of 100%': of",
        "hetero's tokens/s with all state on the GPU; shares are of 14 bytes a parameter.\n",
        "aims:",
        *(Aim(**aim).line() for aim in result["aims"]),
    )


COLUMNS = (
    Column("s/step", "step_s", number(3)),
    Column("tokens/s", "tokens_per_s", number(0)),
    Column("TFLOP/s", "tflop_per_s", number(1)),
    Column("of 100%", "of_whole", "{:.0%}".format),
    Column("GPU peak", "device_peak_bytes", size),
    Column("RSS", "rss_bytes", size),
    Column("not measured", "why"),
)
PROGRAM = Program("bench.cuda", __doc__, OPTIONS, run, show)

if __name__ == "__main__":
    sys.exit(main())
