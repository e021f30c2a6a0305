"""native/base/quiet_thread: which signals the core's threads take."""

import os
import subprocess
import sys

import pytest

THREADS = {
    "io": "engine = _native.IoEngine('threads', threads=1)",
    "uring": "engine = _native.IoEngine('io_uring')",
}


@pytest.mark.covering(1)
@pytest.mark.skipif(
    "san.so" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer has handlers of its own"
)
@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"])
def test_a_fault_in_a_native_thread_is_reported(thread, signal):
    """Blocked in the thread, it would end the process without faulthandler's words."""
    script = f"""
import ctypes, faulthandler, os, signal
from offload import _native
faulthandler.enable()
try:
    {THREADS[thread]}
except OSError as error:
    print("refused")
    raise SystemExit
for task in os.listdir("/proc/self/task"):
    if open(f"/proc/self/task/{{task}}/comm").read().strip() == "hetero-{thread}":
        # As the kernel does when the thread itself faults; a blocked one waits for ever.
        ctypes.CDLL(None).syscall(234, os.getpid(), int(task), int(signal.{signal}))
signal.sigtimedwait([], 20)
print("still there")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.stdout == "refused\n":
        pytest.skip("no io_uring here")
    assert "Fatal Python error" in done.stderr, done
    assert done.returncode < 0
