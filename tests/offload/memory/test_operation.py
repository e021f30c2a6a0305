"""offload/memory/operation: a worker does what it was given before it ends."""

from __future__ import annotations

import threading

import pytest

from offload.memory.operation import Worker
from tests.support.native.io_tools import run_script


def test_a_closed_worker_has_done_its_jobs():
    worker, gate, done = Worker("test"), threading.Event(), []
    worker.do(gate.wait)
    worker.do(lambda: done.append(threading.current_thread().name))
    gate.set()
    worker.close()
    worker.close()
    assert done == ["hetero-test"]


# (Without torch, which takes seconds to import.)
AT_EXIT = """
import builtins, errno, tempfile
from offload import _native
from offload.memory.operation import Worker
engine, arena, file = _native.IoEngine("threads"), _native.Arena(4096), tempfile.TemporaryFile()
file.truncate(4096)
engine.inject("read", 0, error=errno.EAGAIN, count=500)  # a millisecond or more each
op = engine.read(engine.add_file(file.fileno(), "file"), arena.address, 4096, 0)
builtins.kept = [engine, arena, op]  # nobody closes them
"""


@pytest.mark.parametrize(
    "worker",
    ['kept.append(Worker("test")); kept[-1]', 'Worker("test", idle_s=0.0)'],
    ids=["kept", "not kept"],
)
def test_a_thread_that_is_in_the_core_when_the_program_ends(worker: str) -> None:
    """It is waited for: Python before 3.14 would end it in the midst of C++, by an abort."""
    out = run_script(f'{AT_EXIT}\n{worker}.do(op.wait)\nprint("to the end", flush=True)')
    assert out == "to the end\n"
