"""One try in processes of its own: started, watched, and ended where it is decided."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.hosts import Hosts
from bench.harness.ranks import (
    RankError,
    how_ended,
    import_environment,
    last_line,
    rank_log,
    run_ranks,
)
from bench.peers.timing import kernel_bytes
from offload.memory.sizes import format_bytes

_LOG_CHARACTERS = 4000  # that are kept of one that failed


class _OverBudget(Exception):
    """The process holds more than it may."""


def run_trial(
    command: Sequence[str],
    timeout_s: float,
    budget_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    log_path: Path | None = None,
    ranks: int = 1,
    hosts: Hosts | None = None,
) -> dict[str, Any]:
    """What a program prints on stdout as its last line, a JSON object, and what became of it.

    Args:
        command: of the program, its interpreter first.
        timeout_s: after so many seconds the process is ended.
        budget_bytes: the kernel's peak of its resident memory, beyond which it is ended at once.
        environment: beside what lets it import bench.
        log_path: where what it says is kept; None: nowhere.
        ranks: processes, of which the first says the result.
        hosts: that the ranks are spread over.

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
            run_ranks(command, ranks, own, log_path, out, timeout_s, hosts, watch)
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
