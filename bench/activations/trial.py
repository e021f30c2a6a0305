"""One try to train, in a process of its own: started, watched, and ended where it is decided."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.activations.training import Spec
from bench.harness.peer_process import DEEPSPEED_INSTALL, import_environment, path_beside
from bench.harness.ranks import last_line
from offload.memory.sizes import format_bytes

POLL_S = 0.05
POLICIES = ("nvme", "auto")

# Limits count what is mapped and not touched, too: while a model is built its arenas are there
# whole, and its parameters still where they were. So a limit guards against what gets out of hand;
# what proves the budget is the peak of resident memory, which the kernel keeps.
LIMIT_PER_BUDGET = 2

# glibc would keep blocks of up to 32 MiB in heaps of several threads, where what is freed between
# others stays resident: parameters that leave RAM while a model is built, gradients.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}


def run_trial(
    spec: Spec,
    folder: str,
    timeout_s: float,
    budget_bytes: int | None = None,
    python: str = sys.executable,
) -> dict[str, Any]:
    """What training.run() says of it, and more.

    Args:
        spec: what is trained; limits and "nvme_path" are added here.
        folder: on NVMe, for what is swapped, and for logs.
        timeout_s: after so many seconds the process is ended.
        budget_bytes: what the whole process may hold. The operating system refuses LIMIT_PER_BUDGET
            times as many, which guards the machine; what decides is the kernel's peak of resident
            memory, beyond which the process is ended at once. None: no limit.
        python: the interpreter, for DeepSpeed one that has it.

    Returns:
        "status": training.run()'s, or "over" (beyond the budget), "late" (out of time), or "broken"
        (an error that says nothing of memory); "error", or None; "seconds" of the process;
        "peak_bytes", resident; and the figures of one that trained.
    """
    own = Path(tempfile.mkdtemp(dir=folder, prefix="trial-"))
    try:
        return _run(spec, own, timeout_s, budget_bytes, python)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _run(
    spec: Spec, folder: Path, timeout_s: float, budget_bytes: int | None, python: str
) -> dict[str, Any]:
    limits = {} if budget_bytes is None else {"data": LIMIT_PER_BUDGET * budget_bytes}
    spec = replace(spec, limits=limits, options=spec.options | {"nvme_path": str(folder)})
    spec.write(folder / "spec.json")
    environment = {**os.environ, **MALLOC} | {
        **import_environment(),
        "PATH": path_beside(python),
    }
    command = [python, "-m", "bench.activations.training", str(folder / "spec.json")]
    begin_s = time.perf_counter()
    with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            start_new_session=True,  # a group of its own, so that what it starts ends with it
        )
        try:
            ended, peak = _watch(process, begin_s + timeout_s, budget_bytes)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = {"seconds": time.perf_counter() - begin_s, "peak_bytes": peak}
    if ended is not None:
        steps = f"{last_line(folder / 'log')} was the last it said"
        why = f"not done after {timeout_s:.0f} s"
        if ended == "over":
            why = f"more than {format_bytes(peak)} resident after {found['seconds']:.0f} s"
        return {**found, "status": ended, "error": f"{why}; {steps}"}
    found |= _answer(folder, process.returncode)
    if found["status"] == "missing":
        found["error"] += f"; install: {DEEPSPEED_INSTALL}"
    if found["status"] == "trained" and budget_bytes is not None:
        peak = found["peak_bytes"]
        if peak > budget_bytes:
            found |= {"status": "over", "error": f"{format_bytes(peak)} were resident"}
    return found


def _watch(
    process: subprocess.Popen[bytes], until_s: float, budget_bytes: int | None
) -> tuple[str | None, int]:
    """Until the process has ended (None), has passed its budget ("over"), or is "late"; and the
    last known peak of its resident bytes."""
    peak = 0
    while True:
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            return None, peak
        peak = _peak_bytes(process.pid) or peak
        if budget_bytes is not None and peak > budget_bytes:
            return "over", peak
        if time.perf_counter() > until_s:
            return "late", peak


def _peak_bytes(pid: int) -> int:
    """VmHWM of a process; 0 once it has no memory any more."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    peaks = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else 0


def _answer(folder: Path, code: int) -> dict[str, Any]:
    """What the process has printed, or how it died."""
    if code == 0:
        answer: dict[str, Any] = json.loads((folder / "out").read_text().splitlines()[-1])
        return answer
    said = last_line(folder / "log")
    if code < 0:  # libraries abort where there is no memory
        return {"status": "failed", "error": f"{signal.Signals(-code).name}: {said}"}
    return {"status": "broken", "error": f"exit code {code}: {said}"}


def tell(name: str, text: str) -> None:
    """Progress of a program, on stderr, at once."""
    print(f"{name}: {text}", file=sys.stderr, flush=True)
