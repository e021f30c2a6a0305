"""Runs a peer through its workload and measures it the way `hetero train` measures itself."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from bench.peers.timing import peak_rss_bytes
from bench.peers.workload import Workload
from bench.peers.world import gathered, rank


class Peer(Protocol):
    """One way to train."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of one micro-batch."""

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self, lr: float, last: bool) -> None:
        """Called after every micro-batch; the update is due after the `last` of a step."""


def measure(peer: Peer, workload: Workload) -> dict[str, Any]:
    """Trains and returns the figures under the keys of `hetero train --json`.

    All ranks must call it. Times and disk traffic are this rank's; losses are means over the ranks.
    Disk traffic is what the kernel counts for the process; the page cache is not in it. What ranks
    send each other, no peer can tell: null.
    """
    losses: list[float] = []
    times: dict[str, list[float]] = {
        key: [] for key in ("step_s", "forward_s", "backward_s", "optimizer_s")
    }
    disk: list[tuple[int, int]] = []
    process = psutil.Process()
    for number, (lr, micro_batches) in enumerate(
        zip(workload.lrs, workload.batches(rank()), strict=True), start=1
    ):
        before = process.io_counters()
        loss_sum = forward_s = backward_s = optimizer_s = 0.0
        begin_s = time.perf_counter()
        for tokens in micro_batches:
            start_s = time.perf_counter()
            loss = peer.forward(tokens)
            loss_sum += loss.item()
            forwarded_s = time.perf_counter()
            peer.backward(loss)
            backwarded_s = time.perf_counter()
            peer.step(lr, last=tokens is micro_batches[-1])
            forward_s += forwarded_s - start_s
            backward_s += backwarded_s - forwarded_s
            optimizer_s += time.perf_counter() - backwarded_s
        times["step_s"].append(time.perf_counter() - begin_s)
        times["forward_s"].append(forward_s)
        times["backward_s"].append(backward_s)
        times["optimizer_s"].append(optimizer_s)
        losses.append(loss_sum / len(micro_batches))
        after = process.io_counters()
        disk.append((after.read_bytes - before.read_bytes, after.write_bytes - before.write_bytes))
        print(f"step {number} loss {losses[-1]:.4f} {times['step_s'][-1]:.2f} s", flush=True)
    every_rank = gathered([*losses, float(peak_rss_bytes())])
    steady_s = times["step_s"][1:] or times["step_s"]
    steady_disk = disk[1:] or disk
    peaks = [int(peak) for peak in every_rank[:, -1]]
    exchanged = 0 if workload.ranks == 1 else None
    return {
        "ranks": workload.ranks,
        "steps": len(losses),
        "losses": every_rank[:, :-1].mean(0).tolist(),
        **times,
        "tokens_per_s": workload.tokens_per_step * len(steady_s) / sum(steady_s),
        "peak_rss_bytes": peaks[rank()],
        "peak_rss_by_rank_bytes": peaks,
        "bytes_per_step": {
            "h2d": 0,
            "d2h": 0,
            "disk_read": round(sum(read for read, _ in steady_disk) / len(steady_disk)),
            "disk_write": round(sum(written for _, written in steady_disk) / len(steady_disk)),
        },
        "sent_bytes_per_step": exchanged,
        "received_bytes_per_step": exchanged,
        "gather_wait_s_per_step": exchanged,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Of all ranks the first writes."""
    if rank() == 0:
        path.write_text(json.dumps(result), encoding="utf-8")
