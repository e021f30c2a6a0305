"""Whether hetero's worker pool and torch's threads get in each other's way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from bench.harness.rounds import Rounds, Sample, run_rounds
from bench.work.updates import Updates
from offload import _native
from offload._native import UpdateKind

SETTLE_S = 0.1  # torch's threads have gone to sleep by then


def measure_beside_torch(
    updates: Updates, matmul_n: int, threads: int, rounds: int
) -> dict[str, Any]:
    """Ratios of rates, about 1 when neither disturbs the other.

    "matmul_fp32" and "matmul_bf16": torch's n x n product with hetero's pool alive and idle, over
    without it. "adam_after_torch": an update at once after a parallel product of torch, over one
    after a pause.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        turns: dict[str, Callable[[], Sample]] = {}
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            matrix = torch.randn(matmul_n, matmul_n).to(dtype)
            turns[f"{name} alone"] = _product_turn(matrix, updates.repeats, None)
            turns[f"{name} beside"] = _product_turn(matrix, updates.repeats, updates)
        updates.fill(_KIND)
        matrix = torch.randn(matmul_n, matmul_n)
        turns["adam alone"] = lambda: _update(updates, lambda: None)
        turns["adam after"] = lambda: _update(updates, lambda: matrix @ matrix)
        result: Rounds = run_rounds(turns, rounds)
    finally:
        torch.set_num_threads(before)
    return {
        "matmul_n": matmul_n,
        "matmul_fp32": result.ratio("fp32 beside", "fp32 alone", "rate"),
        "matmul_bf16": result.ratio("bf16 beside", "bf16 alone", "rate"),
        "adam_after_torch": result.ratio("adam after", "adam alone", "rate"),
        "adam_numel": updates.numel,
    }


_KIND = UpdateKind("bf16", "bf16")


def _product_turn(
    matrix: torch.Tensor, repeats: int, beside: Updates | None
) -> Callable[[], Sample]:
    def turn() -> Sample:
        if beside is None:
            _native.shutdown_workers()
        else:
            beside.run(_KIND)  # the workers are there now, and asleep again soon
        time.sleep(SETTLE_S)
        product = matrix @ matrix
        begin_s = time.perf_counter()
        for _ in range(repeats):
            torch.mm(matrix, matrix, out=product)
        return {"rate": repeats / (time.perf_counter() - begin_s)}

    return turn


def _update(updates: Updates, first: Callable[[], Any]) -> Sample:
    updates.run(_KIND)
    seconds = 0.0
    for _ in range(updates.repeats):
        time.sleep(SETTLE_S)
        first()
        begin_s = time.perf_counter()
        updates.run(_KIND)
        seconds += time.perf_counter() - begin_s
    return {"rate": updates.repeats / seconds}
