"""What is said, and what goes on, where the system has no room for another thread."""

from __future__ import annotations

import os

import pytest

from offload import _native
from tests.support.native.io_tools import run_script

# Root is not limited, so the scripts become another user, as whom a sanitizer cannot write.
pytestmark = pytest.mark.skipif(
    "san.so" in os.environ.get("LD_PRELOAD", ""),
    reason="a sanitizer writes into a folder of root's",
)

LIMITED = """
import os, resource
from offload import _native

def limit():
    if os.getuid() == 0:
        os.setuid(65534)  # root is not limited
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))

def refusal(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
"""


def test_updates_go_on_with_the_threads_that_run() -> None:
    out = run_script(
        LIMITED
        + """
import numpy as np
from tests.support.native.step_tiles import TILE, Tiles, hypers
numbers = np.full(1 << 20, 2, np.float32)
tiles, wanted = Tiles(3, "bf16", "bf16"), Tiles(3, "bf16", "bf16")
for each in (wanted, tiles):
    _native.set_threads(2)
    pipeline = _native.StepPipeline(None, 0, None, 0, each.kind, TILE, False, False)
    if each is tiles:
        print(_native.start_threads())
        limit()
        _native.shutdown_workers()
        _native.set_threads(5)
        print(_native.start_threads(), _native.threads())
    print(_native.sum_of_squares("fp32", numbers.ctypes.data, len(numbers)) == 4 * len(numbers))
    pipeline.submit(each.tasks_in_ram(range(3)), hypers(1))
    pipeline.wait_updated()
    pipeline.close()
print(tiles.bytes() == wanted.bytes())
"""
    )
    assert out.split() == ["True", "2", "1", "5", "True", "True"]


@pytest.mark.parametrize(
    ("call", "thread"),
    [
        ('_native.IoEngine("threads")', "hetero-io"),
        ('_native.IoEngine("io_uring")', "hetero-uring"),
        (
            '_native.StepPipeline(None, 0, None, 0, _native.UpdateKind("bf16", "bf16"), 4096, '
            "False, False)",
            "hetero-stage",
        ),
    ],
)
def test_the_refusal_names_the_thread_and_the_limit(call: str, thread: str) -> None:
    if "io_uring" in call:
        try:
            _native.IoEngine("io_uring").close()
        except OSError as refusal:
            pytest.skip(str(refusal))
    said = run_script(f"{LIMITED}\nlimit()\nprint(refusal(lambda: {call}))")
    limit = "the limit of processes (ulimit -u, pids.max) is reached"
    assert said.strip() == f"cannot start the thread {thread}: {limit}"


def test_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero import cpu_threads

    _native.set_threads(2)
    assert cpu_threads.lacking_threads() == []
    monkeypatch.setattr(_native, "start_threads", lambda: 1)
    (note,) = cpu_threads.lacking_threads()
    assert note.startswith("1 of 2 threads make updates and norms, because the limit of processes")
