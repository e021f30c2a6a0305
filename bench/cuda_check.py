"""`make cuda-check`: builds in the Python at hand, runs the tests that need a GPU, measures.

Nothing is downloaded. Without a GPU all of it is skipped. It ends within nine minutes; the last
thing it prints is a short table.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHOLE_S = 8.75 * 60
TESTS_S = 3.5 * 60  # at most
END_S = 10.0  # kept for the end


def main() -> int:
    """0 if all tests passed and the benchmark ran, or there is no GPU."""
    deadline_s = time.monotonic() + WHOLE_S
    missing = _no_device()
    if missing:
        print(f"cuda-check: skipped: {missing}")
        return 0
    jobs = {"HETERO_JOBS": os.environ.get("HETERO_JOBS", str(os.cpu_count() or 1))}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    if _run("build", build, deadline_s - time.monotonic(), jobs):
        return 1
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests/cuda", *sys.argv[1:]]
    limit_s = min(TESTS_S, deadline_s - time.monotonic())
    failed = _run("tests", tests, limit_s, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    print(f"cuda-check: tests {'FAILED (see above)' if failed else 'passed'}", flush=True)
    left_s = deadline_s - time.monotonic() - END_S
    minutes = f"{left_s / 60:.2f}"
    benchmark = [sys.executable, "-m", "bench.cuda", "--minutes", minutes]
    unmeasured = _run("benchmark", benchmark, left_s + END_S, {})
    return 1 if failed or unmeasured else 0


def _no_device() -> str | None:
    try:
        import torch
    except ImportError:
        return f"{sys.executable} has no torch"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} of {sys.executable} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} sees no CUDA device"
    print(f"cuda-check: torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    return None


def _run(what: str, command: Sequence[str], limit_s: float, more: Mapping[str, str]) -> int:
    """The exit status; what it prints is passed on."""
    began_s = time.monotonic()
    print(f"cuda-check: {what}: {' '.join(command[1:])}", flush=True)
    try:
        status = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **more}, timeout=max(1.0, limit_s)
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"cuda-check: {what} did not end within {limit_s:.0f} s", flush=True)
        return 124
    if what != "benchmark":  # its table is to be the last
        print(f"cuda-check: {what}: {time.monotonic() - began_s:.0f} s", flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
