"""native/base/quiet_thread: which signals the core's threads take."""

import re
import signal
from pathlib import Path

from offload import _native
from tests.support.own_process import native_threads
from tests.support.waiting import until

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
THREADS = {"threads": "hetero-io", "io_uring": "hetero-uring"}


def blocked(thread: int) -> set[int]:
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    (mask,) = re.findall(r"^SigBlk:\s*(\w+)", status, re.MULTILINE)
    return {number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1}


def test_a_native_thread_takes_its_faults_and_no_other_signal(kind: str) -> None:
    """Blocked in the thread, a fault would end the process without faulthandler's words."""
    before = native_threads(THREADS[kind])
    engine = _native.IoEngine(kind, threads=1)
    until(lambda: native_threads(THREADS[kind]) - before)  # it names itself
    for thread, _ in native_threads(THREADS[kind]) - before:
        until(lambda: not blocked(thread) & set(FAULTS))  # noqa: B023 (which it unblocks then)
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGALRM} <= blocked(thread)
    engine.close()
