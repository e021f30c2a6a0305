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

Below the table each figure stands beside its aim. For these the link is measured first, alone and
as hetero copies over it, and the disk of --nvme if a contender used it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from bench.cuda_copies import WAYS, measure_copies, measure_updates
from bench.harness.program import Program, add_options, names_of, tell
from bench.harness.tables import number, of_figures, size
from bench.harness.trial import run_trial
from bench.work.gpt import SHAPES, VOCABULARY, Gpt, Shape, fill, quick_init
from offload.device.cuda_backend import cuda_available
from offload.profile.measure import measure_disk

WARM_UP, STEPS = 2, 5
ENOUGH_S = 15.0  # of measured steps
WANTED_BYTES = 14  # a parameter
_LEAST_S = 25.0  # less is not worth starting a contender for
# As the table has them.
_KINDS = ("torch", "100", "50", "25", "10", "fsdp2")
_LINK = "link"  # stands in the place of a model and a contender for the measurement of copies
_UPDATE_BYTES = 26  # of RAM that the CPU's update of a parameter reads and writes
_GRAD_BYTES = 2  # of it that come from the device
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
            found = _run(f"{model}/{kind}", nvme, deadline_s)
            rows.append({"model": model, "contender": kind, **found})
            _keep(arguments.rows, rows[-1])
            tell(f"bench.cuda: {model} {kind}: {found['status']}")
    rows.sort(key=lambda r: (arguments.models.index(r["model"]), _KINDS.index(r["contender"])))
    disk = None
    if nvme is not None and any(row.get("disk_bytes") for row in rows):
        disk = measure_disk((nvme,), lambda text: None)["mixed"]
    return {
        "device": torch.cuda.get_device_name(),
        "rows": rows,
        "copies": copies,
        "aims": [vars(aim) for aim in aims(rows, copies, disk)],
    }


def _keep(path: str | None, row: dict[str, Any]) -> None:
    """Whoever ends this program from outside loses none of the rows that are there."""
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def _run(one: str, nvme: str | None, deadline_s: float) -> dict[str, Any]:
    """What `--one` prints in a process of its own, or a "status" that says why it did not."""
    left_s = deadline_s - time.monotonic()
    if left_s < _LEAST_S:
        return {"status": "no time left"}
    # A crash says where.
    command = [sys.executable, "-X", "faulthandler", "-m", "bench.cuda", "--one", one]
    found = run_trial([*command, *([nvme] if nvme else [])], left_s)
    if found["status"] == "late":
        return {"status": "out of time"}
    if found["status"] in ("failed", "broken"):
        print(found.get("log", ""), file=sys.stderr)
        return {"status": f"failed: {found['error'][:200]}", "stderr": found.get("log")}
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
    shape = SHAPES[model]
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
        "step_s": step_s,
        "tokens_per_s": shape.tokens / step_s,
        "tflop_per_s": shape.flop(prepared.numel) / step_s / 1e12,
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "rss_bytes": psutil.Process().memory_info().rss,
    }


def _prepare(shape: Shape, kind: str, nvme: str | None) -> _Prepared:
    with quick_init():
        model = Gpt(shape)
    fill(model)
    numel = sum(p.numel() for p in model.parameters())
    if kind == "torch":
        model.to(device="cuda", dtype=torch.bfloat16)
        return _Prepared(_torch(model), numel)
    if kind == "fsdp2":
        return _Prepared(_fsdp2(model), numel)
    # Whole chunks are a little more than their parameters.
    share = int(kind) / 100 * (1.03 if kind == "100" else 1)
    return _hetero(model, numel, int(WANTED_BYTES * numel * share), nvme)


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


def _hetero(model: Gpt, numel: int, device_memory: int, nvme: str | None) -> _Prepared:
    import hetero

    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
    options: dict[str, Any] = {"backend": "cuda", "placement_policy": "auto", "nvme_path": nvme}
    managed, optimizer = hetero.initialize(model, optimizer, device_memory=device_memory, **options)
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


# Aims


@dataclass(frozen=True)
class Aim:
    """One figure, a ratio, beside what it is to be."""

    what: str
    figure: float | None  # None: `note` says why there is none
    bound: float
    at_least: bool  # else at most
    note: str = ""

    def met(self) -> bool | None:
        """None without a figure."""
        if self.figure is None:
            return None
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound

    def line(self) -> str:
        """As the table has it."""
        figure = "-" if self.figure is None else f"{self.figure:.2f}"
        verdict = {None: "", True: "met", False: "MISSED"}[self.met()]
        sign = ">=" if self.at_least else "<="
        line = f"{self.what:<58} {figure:>6} {sign} {self.bound:<4.2f} {verdict:<6} {self.note}"
        return line.rstrip()


def aims(
    rows: Sequence[Mapping[str, Any]], copies: Mapping[str, Any], disk_bytes_per_s: float | None
) -> list[Aim]:
    """All aims.

    Args:
        rows: of run().
        copies: of measure_copies() and measure_updates(), with a "status" of "ok", or with another
            status alone.
        disk_bytes_per_s: What the scratch directory's disk moves, read and written together; None
            if there is none, or it was not measured.
    """
    found = []
    pairs = [(f"{_WAY_WORDS[w]}: bytes/s, of the link alone", w, f"{w[:3]}_alone") for w in WAYS]
    for what, own, alone in [*pairs, ("the CPU's Adam: bytes/s, of memory's", "update", "memory")]:
        if copies["status"] != "ok":
            found.append(Aim(what, None, 0.9, True, copies["status"]))
            continue
        note = f"{copies[own] / 1e9:.1f} of {copies[alone] / 1e9:.1f} GB/s"
        if own == "update":
            beside, both = copies["update_beside"] / 1e9, copies["both"] / 1e9
            note += f"; {beside:.0f} while the link moves {both:.0f} GB/s each way"
        found.append(Aim(what, copies[own] / copies[alone], 0.9, True, note))
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = {row["contender"]: row for row in rows if row["model"] == model}
        shares = [kind for kind in of_model if kind.isdigit()]
        found += [_of_step(model, kind, of_model, copies, disk_bytes_per_s) for kind in shares]
        what = f"{model}: tokens/s with 25 % of the state on the GPU, of 100 %"
        why = _missing(of_model, "25", "100")
        if why:
            found.append(Aim(what, None, 0.9, True, why))
            continue
        one, other = (of_model[kind]["tokens_per_s"] for kind in ("25", "100"))
        found.append(Aim(what, one / other, 0.9, True, f"{one:,.0f} of {other:,.0f} tokens/s"))
    return found


def _missing(of_model: Mapping[str, Mapping[str, Any]], *kinds: str) -> str:
    """Which contenders have no figure, and why."""
    statuses = {kind: of_model.get(kind, {"status": "not run"})["status"] for kind in kinds}
    return "; ".join(f"{kind} %: {status}" for kind, status in statuses.items() if status != "ok")


def _of_step(
    model: str,
    kind: str,
    of_model: Mapping[str, Mapping[str, Any]],
    copies: Mapping[str, Any],
    disk_bytes_per_s: float | None,
) -> Aim:
    """Compute is the step with all state on the GPU, so that of 100 % it is the step itself."""
    what = f"{model}: step with {kind} %, of the slowest part"
    missing = [_missing(of_model, kind, "100")]
    if copies["status"] != "ok":
        missing.append(f"link: {copies['status']}")
    row = of_model[kind]
    if row.get("disk_bytes") and disk_bytes_per_s is None:
        missing.append("NVMe: not measured")
    if any(missing):
        return Aim(what, None, 1.15, False, "; ".join(filter(None, missing)))
    h2d_s, d2h_s = (row[f"{way}_bytes"] / copies[f"{way}_alone"] for way in ("h2d", "d2h"))
    bounds_s = {"compute": of_model["100"]["step_s"], "link": max(h2d_s, d2h_s)}
    # (Without gradients that are accumulated each crosses the link once.)
    updated_bytes = row["d2h_bytes"] / _GRAD_BYTES * _UPDATE_BYTES
    bounds_s["update"] = updated_bytes / copies["update"]
    if row["disk_bytes"] and disk_bytes_per_s is not None:
        bounds_s["NVMe"] = row["disk_bytes"] / disk_bytes_per_s
    note = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in bounds_s.items())
    return Aim(what, row["step_s"] / max(bounds_s.values()), 1.15, False, note)


COLUMNS = (
    ("s/step", "step_s", number(3)),
    ("tokens/s", "tokens_per_s", number(0)),
    ("TFLOP/s", "tflop_per_s", number(1)),
    ("of 100%", "of_whole", "{:.0%}".format),
    ("GPU peak", "device_peak_bytes", size),
    ("RSS", "rss_bytes", size),
    ("not measured", "why", str),
)


def show(result: Mapping[str, Any]) -> Iterator[str]:
    """A table of the contenders, and each aim beside its figure."""
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
        "aims:",
        *(Aim(**aim).line() for aim in result["aims"]),
    )


PROGRAM = Program("bench.cuda", __doc__, options, run, show)

if __name__ == "__main__":
    sys.exit(main())
