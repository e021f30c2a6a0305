"""One try to train as a Spec says, in a process of its own."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.activations.training import Spec
from bench.harness.peer_process import DEEPSPEED_INSTALL
from bench.harness.trial import run_trial
from offload.memory.sizes import format_bytes

POLICIES = ("nvme", "auto")

# Limits count what is mapped and not touched, too: while a model is built its arenas are there
# whole, and its parameters still where they were. So a limit guards against what gets out of hand;
# what proves the budget is the peak of resident memory, which the kernel keeps.
LIMIT_PER_BUDGET = 2

# glibc would keep blocks of up to 32 MiB in heaps of several threads, where what is freed between
# others stays resident: parameters that leave RAM while a model is built, gradients.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}


def try_to_train(
    spec: Spec,
    folder: str,
    timeout_s: float,
    budget_bytes: int | None = None,
    python: str = sys.executable,
) -> dict[str, Any]:
    """What training.run() says of it, and what run_trial() does.

    Args:
        spec: what is trained; limits and "nvme_path" are added here.
        folder: on NVMe, for what is swapped.
        timeout_s: after so many seconds the process is ended.
        budget_bytes: what the whole process may hold. The operating system refuses LIMIT_PER_BUDGET
            times as many, which guards the machine; what decides is the kernel's peak of resident
            memory, beyond which the process is ended at once. None: no limit.
        python: the interpreter, for DeepSpeed one that has it.
    """
    with tempfile.TemporaryDirectory(
        dir=folder, prefix="trial-", ignore_cleanup_errors=True
    ) as own:
        limits = {} if budget_bytes is None else {"data": LIMIT_PER_BUDGET * budget_bytes}
        path = Path(own, "spec.json")
        replace(spec, limits=limits, options=spec.options | {"nvme_path": own}).write(path)
        command = (python, "-m", "bench.activations.training", str(path))
        found = run_trial(command, timeout_s, budget_bytes, MALLOC)
    peak = found["peak_bytes"]
    if found["status"] == "missing":
        found["error"] += f"; install: {DEEPSPEED_INSTALL}"
    if found["status"] == "trained" and budget_bytes is not None and peak > budget_bytes:
        found |= {"status": "over", "error": f"{format_bytes(peak)} were resident"}
    return found


def tell(name: str, text: str) -> None:
    """Progress of a program, on stderr, at once."""
    print(f"{name}: {text}", file=sys.stderr, flush=True)
