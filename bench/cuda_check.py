"""`make cuda-check`: builds in the Python at hand, runs the tests that need a GPU, measures.

usage: python -m bench.cuda_check [--save DIR] [--nvme DIR] [--minutes 8.75] [--parts LIST]
                                  [--models LIST] [--contenders LIST] [PYTEST OPTION ...]

It needs torch with CUDA, numpy, psutil, pytest and a C++ compiler, and downloads nothing. No part's
failure stops another, and what is known is in a file of --save at once: one JSON line for each test
and for each row of the benchmark. Without a GPU all of it is skipped.

    build      the extension
    tests      tests/cuda in three processes side by side: training, kernels and copies, ranks
    benchmark  bench.cuda in what is left of the time
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

NAME = "bench.cuda_check"
ROOT = Path(__file__).resolve().parent.parent
PARTS = ("build", "tests", "benchmark")
END_S = 10.0  # kept for the end
TESTS_SHARE = 0.5  # of the whole time, at most
# Those that take longest first; each a process of its own.
TEST_GROUPS = {
    "training": ["test_training.py"],
    "kernels": ["test_kernels.py", "test_copies.py"],
    "ranks": ["test_ranks.py"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all tests passed and the benchmark ran, or there is no GPU."""
    parser = argparse.ArgumentParser(
        NAME,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--save", type=Path, default=ROOT / "build" / "cuda-check")
    parser.add_argument("--nvme", help="a folder on NVMe for scratch files (default: no NVMe)")
    parser.add_argument("--minutes", type=float, default=8.75, help="in all (default: 8.75)")
    parser.add_argument("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    parser.add_argument("--models", help="as bench.cuda has it")
    parser.add_argument("--contenders", help="as bench.cuda has it")
    arguments, for_pytest = parser.parse_known_args(argv)
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: {unknown[0]!r} is not one of {', '.join(PARTS)}")
    deadline_s = time.monotonic() + 60 * arguments.minutes
    missing = _no_device()
    if missing:
        print(f"cuda-check: skipped: {missing}")
        return 0
    arguments.save.mkdir(parents=True, exist_ok=True)
    failures = []
    if "build" in parts and _build(arguments.save, deadline_s):
        failures.append("build")
    _facts(arguments.save)
    if "tests" in parts:
        limit_s = min(60 * arguments.minutes * TESTS_SHARE, deadline_s - time.monotonic())
        failures += _tests(arguments.save, limit_s, for_pytest)
    if "benchmark" in parts:
        left_s = deadline_s - time.monotonic() - END_S
        command = [sys.executable, "-m", "bench.cuda", "--minutes", f"{left_s / 60:.2f}"]
        command += ["--rows", str(arguments.save / "rows.jsonl")]
        for option in ("nvme", "models", "contenders"):
            if (value := getattr(arguments, option)) is not None:
                command += [f"--{option}", value]
        print(f"cuda-check: benchmark: {' '.join(command[1:])}", flush=True)
        try:
            failed = subprocess.run(command, cwd=ROOT, timeout=max(1.0, left_s + END_S)).returncode
        except subprocess.TimeoutExpired:
            failed = 124
        if failed:
            failures.append("benchmark")
    print(
        f"cuda-check: {', '.join(failures) + ' FAILED' if failures else 'passed'}; files in "
        f"{arguments.save}",
        flush=True,
    )
    return 1 if failures else 0


def _no_device() -> str | None:
    """Why nothing can be checked."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} of {sys.executable} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} sees no CUDA device"
    print(f"cuda-check: torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    return None


def _facts(save: Path) -> None:
    """What `hetero doctor` finds: why the rest behaves as it does."""
    command = [sys.executable, "-m", "hetero.cli", "doctor", "--json", "--no-disk-speed"]
    running = {"facts": _start(command, save / "facts.json", {}, save / "facts.log")}
    _finish(running, time.monotonic() + 60)


def _build(save: Path, deadline_s: float) -> bool:
    """Whether it failed."""
    jobs = os.environ.get("HETERO_JOBS", str(os.cpu_count() or 1))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    began_s = time.monotonic()
    status = _finish(
        {"build": _start(command, save / "build.log", {"HETERO_JOBS": jobs})}, deadline_s
    )["build"]
    print(f"cuda-check: build: {time.monotonic() - began_s:.0f} s, status {status}", flush=True)
    if status:
        print("\n".join((save / "build.log").read_text().splitlines()[-30:]), flush=True)
    return status != 0


def _tests(save: Path, limit_s: float, for_pytest: Sequence[str]) -> list[str]:
    """The groups that failed, and those that did not end in time."""
    began_s = time.monotonic()
    running = {}
    for name, files in TEST_GROUPS.items():
        results = save / f"{name}.jsonl"
        results.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "--tb=short"]
        command += ["--confcutdir=tests/cuda", "-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist"):  # it goes on after a crash
            jobs = max(2, (os.cpu_count() or 1) // 4)
            command += ["-n", str(jobs), "--dist", "worksteal"]
        command += ["-o", "faulthandler_timeout=60", *for_pytest]
        command += [f"tests/cuda/{file}" for file in files]
        # State files must not be in RAM, as /tmp may be.
        scratch = save / "tmp"
        scratch.mkdir(exist_ok=True)
        more = {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "HETERO_TEST_RESULTS": str(results),
            "TMPDIR": str(scratch),
        }
        running[name] = _start(command, save / f"{name}.log", more)
    statuses = _finish(running, began_s + limit_s)
    for name, status in statuses.items():
        print(f"cuda-check: tests: {name}: {summary(save / f'{name}.jsonl')}, status {status}")
        if status not in (0, 5):
            print("\n".join((save / f"{name}.log").read_text().splitlines()[-25:]))
    print(f"cuda-check: tests: {time.monotonic() - began_s:.0f} s", flush=True)
    return [f"tests of {name}" for name, status in statuses.items() if status not in (0, 5)]


def summary(results: Path) -> str:
    """Counts of outcomes of one file of JSON lines, and the names of what failed."""
    if not results.exists():
        return "no test ended"
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    counts = {
        outcome: sum(line["outcome"] == outcome for line in lines)
        for outcome in ("passed", "failed", "skipped")
    }
    failed = [line["test"] for line in lines if line["outcome"] == "failed"]
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return text + (f" ({', '.join(failed)})" if failed else "")


def _start(
    command: Sequence[str], log: Path, more: Mapping[str, str], errors: Path | None = None
) -> subprocess.Popen[bytes]:
    """What it says goes to `log`; on stderr to `errors`, if they are given."""
    with open(log, "wb") as output, open(errors or log, "ab") as said:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **more},
            stdout=output,
            stderr=subprocess.STDOUT if errors is None else said,
            start_new_session=True,
        )


def _finish(running: Mapping[str, subprocess.Popen[bytes]], until_s: float) -> dict[str, int]:
    """Exit statuses; 124 of what had to be ended."""
    statuses = {}
    for name, process in running.items():
        try:
            statuses[name] = process.wait(max(1.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
            process.wait()
            statuses[name] = 124
    return statuses


if __name__ == "__main__":
    raise SystemExit(main())
