"""One try of a program as one or several ranks: started, watched, and ended where it is decided.

Ranks are processes of this machine and end together; a failure names its rank. A rank is told who
it is by the environment variables of torchrun. Each has a log of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.machine import ROOT
from bench.peers.timing import kernel_bytes
from offload.memory.sizes import format_bytes

POLL_S = 0.02
_LOG_CHARACTERS = 4000  # that are kept of one that failed


class RankError(Exception):
    """A rank failed or was not done in time; the others have been ended.

    `exit_code` is that of the rank, negative for a signal, or None if it was not done.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _OverBudget(Exception):
    """The process holds more than it may."""


def run_trial(
    command: Sequence[str],
    timeout_s: float,
    budget_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    log_path: Path | None = None,
    ranks: int = 1,
) -> dict[str, Any]:
    """What a program prints on stdout as its last line, a JSON object, and what became of it.

    Args:
        command: of the program, its interpreter first.
        timeout_s: after so many seconds the process is ended.
        budget_bytes: the kernel's peak of its resident memory, beyond which it is ended at once.
        environment: beside what lets it import bench.
        log_path: where what it says is kept; None: nowhere.
        ranks: processes, of which the first says the result.

    Returns:
        "status": the program's own, or "ended", "over" (beyond the budget), "late" (out of time),
        "failed" (by a signal: libraries abort where there is no memory) or "broken" (by an exit
        code, or it did not start); "error", or None; "seconds" of the process; "peak_bytes",
        resident; "log", the end of what one printed that failed.
    """
    peak = 0

    def watch(pid: int) -> None:
        nonlocal peak
        with contextlib.suppress(OSError):  # it is gone
            peak = kernel_bytes("VmHWM", pid=pid).get("VmHWM", peak)
        if budget_bytes is not None and peak > budget_bytes:
            raise _OverBudget

    with tempfile.TemporaryDirectory(prefix="hetero-trial-") as folder:
        log_path = log_path or Path(folder, "log")
        log, out = rank_log(log_path, 0, ranks), Path(folder, "out")
        found: dict[str, Any] = {"status": "ended", "error": None}
        begin_s = time.perf_counter()
        try:
            own = {**import_environment(command[0]), **(environment or {})}
            run_ranks(command, ranks, own, log_path, out, timeout_s, watch)
            found |= json.loads(out.read_text().splitlines()[-1])
        except _OverBudget:
            seconds = time.perf_counter() - begin_s
            why = f"more than {format_bytes(peak)} resident after {seconds:.0f} s"
            found = {"status": "over", "error": f"{why}; {last_line(log)} was the last it said"}
        except FileNotFoundError as error:
            found = {"status": "broken", "error": f"cannot start {error.filename}"}
        except RankError as error:
            code, why = error.exit_code, str(error)
            if code is None:
                found = {"status": "late", "error": f"{why}; {last_line(log)} was the last it said"}
            else:
                why = how_ended(code, log) if ranks == 1 else why
                found = {"status": "failed" if code < 0 else "broken", "error": why}
            found["log"] = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
        return {"seconds": time.perf_counter() - begin_s, "peak_bytes": peak, **found}


def run_ranks(
    command: Sequence[str],
    ranks: int,
    environment: Mapping[str, str],
    log_path: Path,
    stdout_path: Path | None,
    timeout_s: float,
    watch: Callable[[int], object] = lambda pid: None,
) -> None:
    """Runs `command` as `ranks` processes until all have ended.

    What they print goes to rank_log()s, what rank 0 prints on stdout to `stdout_path` if given.
    A single rank is told nothing of ranks. `watch` is called with each process's number all the
    while; what it raises ends them. Raises RankError, OSError if the program cannot start.
    """
    processes: list[subprocess.Popen[bytes]] = []
    rendezvous = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        # Else gloo looks the host's name up, which need not be known or may lead elsewhere.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    try:
        with contextlib.ExitStack() as files:
            for rank in range(ranks):
                log = files.enter_context(rank_log(log_path, rank, ranks).open("wb"))
                stdout = log
                if stdout_path is not None and rank == 0:
                    stdout = files.enter_context(stdout_path.open("wb"))
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **rendezvous}
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**environment, **(own if ranks > 1 else {})},
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=log,
                        # A group of its own, so that what it starts is ended with it.
                        start_new_session=True,
                    )
                )
        _wait(processes, log_path, timeout_s, watch)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def rank_log(log_path: Path, rank: int, ranks: int) -> Path:
    """Where a rank's output is: in `log_path` itself if there is one rank only."""
    return log_path if ranks == 1 else log_path.with_suffix(f".rank{rank}{log_path.suffix}")


def last_line(path: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")


def free_port() -> int:
    """A port of this machine for ranks to meet at.

    It is below those that the kernel gives to connections, one of which could take it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def import_environment(program: str = sys.executable) -> dict[str, str]:
    """An environment in which `program` imports bench, and hetero where it was built in place.

    A folder called `bench` where the user is must not come first; Python 3.10 looks there anyway.
    Tools installed next to the interpreter do: DeepSpeed builds with ninja.
    """
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT) if not inherited else f"{ROOT}{os.pathsep}{inherited}",
        "PYTHONSAFEPATH": "1",
        "PATH": f"{Path(program).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    log_path: Path,
    timeout_s: float,
    watch: Callable[[int], object],
) -> None:
    """Until all have ended well. Raises RankError."""
    ranks = len(processes)
    deadline_s = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            # Several within one POLL_S: one brought the others down, and any may be the one.
            causes = [
                f"{_name([rank], ranks)}{how_ended(codes[rank], rank_log(log_path, rank, ranks))}"
                f" (all of it in {rank_log(log_path, rank, ranks)})"
                for rank in failed
            ]
            raise RankError("; ".join(causes), codes[failed[0]])
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running:
            return
        if time.monotonic() > deadline_s:
            raise RankError(f"{_name(running, ranks)}not done after {timeout_s:.0f} s")
        for rank in running:
            watch(processes[rank].pid)
        time.sleep(POLL_S)


def _name(chosen: Sequence[int], ranks: int) -> str:
    return "" if ranks == 1 else f"rank {', '.join(map(str, chosen))} of {ranks}: "


def how_ended(code: int | None, log: Path) -> str:
    """The signal or exit code that a process ended by, and the last line of its log."""
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}: {last_line(log)}"
    return f"exit code {code}: {last_line(log)}"
