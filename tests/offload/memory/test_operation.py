"""offload/memory/operation: a worker does what it was given before it ends."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from offload.memory.operation import Worker


def test_a_closed_worker_has_done_its_jobs():
    worker, gate, done = Worker("test"), threading.Event(), []
    worker.do(gate.wait)
    worker.do(lambda: done.append(threading.current_thread().name))
    gate.set()
    worker.close()
    worker.close()
    assert done == ["hetero-test"]


AT_EXIT = """
import builtins
from offload import _native
link, arena = _native.Link(1e6, 1e6), _native.Arena(1 << 20)
op = link.copy("h2d", arena.address, arena.address + (1 << 19), 1 << 19)  # half a second
builtins.kept = [link, arena, op]  # nobody closes them
{wait}
print("to the end", flush=True)
"""


@pytest.mark.parametrize(
    "wait",
    [
        "from offload.memory.operation import Worker\n"
        'kept.append(Worker("test"))\nkept[-1].do(op.wait)',
        'from offload.memory.operation import Worker\nWorker("test", idle_s=0.0).do(op.wait)',
    ],
    ids=["kept", "not kept"],
)
def test_a_thread_that_is_in_the_core_when_the_program_ends(wait: str) -> None:
    """It is waited for: Python before 3.14 would end it in the midst of C++, by an abort."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(wait=wait)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "to the end\n"), done.stderr
