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
import builtins, tempfile
from offload import _native
from tests.support.native.io_tools import stall
engine, arena, file = _native.IoEngine("threads"), _native.Arena(4096), tempfile.TemporaryFile()
file.truncate(4096)
stall(engine, 500)
op = engine.read(engine.add_file(file.fileno(), "file"), arena.address, 4096, 0)
builtins.kept = [engine, arena, op]  # nobody closes them
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
