"""offload/memory/operation: a chain of operations ends once, whatever becomes of them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from offload.memory.operation import Chain, Operation, Worker


class Gate:
    """An operation that ends when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended = threading.Event()
        self.cancelled = False

    def wait(self) -> None:
        assert self.ended.wait(30)
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self.cancelled = True
        self.error = OSError("cancelled")
        self.ended.set()


class Ends:
    """What a chain said when it ended."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []
        self.told = threading.Event()

    def __call__(self, error: BaseException | None) -> None:
        self.errors.append(error)
        self.told.set()

    def only(self) -> BaseException | None:
        assert self.told.wait(30)
        (error,) = self.errors
        return error


@pytest.fixture
def worker():
    made = Worker("test")
    yield made
    made.close()


def step(worker: Worker, op: Operation | None, begun: list[object]) -> tuple[Worker, Callable]:
    def start() -> Operation | None:
        begun.append(op)
        return op

    return worker, start


def test_each_begins_when_the_one_before_is_done(worker):
    gates, begun, ends = [Gate(), Gate()], [], Ends()
    chain = Chain([step(worker, op, begun) for op in (gates[0], None, gates[1])], ends)
    assert begun == []
    chain.start()
    assert begun == gates[:1]
    gates[0].ended.set()
    gates[1].ended.set()
    assert ends.only() is None
    assert begun == [gates[0], None, gates[1]]


@pytest.mark.parametrize("at_start", [False, True])
def test_a_failure_ends_it(worker, at_start):
    failure, begun, ends = OSError("broken"), [], Ends()
    gate = Gate(failure)
    gate.ended.set()

    def fail() -> Operation:
        raise failure

    first = (worker, fail) if at_start else step(worker, gate, begun)
    Chain([first, step(worker, Gate(), begun)], ends).start()
    assert ends.only() is failure
    assert failure.__traceback__ is None
    assert begun == ([] if at_start else [gate])


def test_cancelling_ends_what_is_under_way_and_begins_nothing(worker):
    gate, begun, ends = Gate(), [], Ends()
    chain = Chain([step(worker, gate, begun), step(worker, Gate(), begun)], ends)
    chain.start()
    chain.cancel()
    assert isinstance(ends.only(), OSError)
    assert gate.cancelled
    assert begun == [gate]
    chain.cancel()
    assert len(ends.errors) == 1


def test_cancelling_before_the_start_ends_it(worker):
    ends = Ends()
    chain = Chain([step(worker, Gate(), [])], ends)
    chain.cancel()
    assert isinstance(ends.only(), OSError)


def test_a_closed_worker_has_done_its_jobs():
    worker, gate, ends = Worker("test"), Gate(), Ends()
    Chain([step(worker, gate, [])], ends).start()
    gate.ended.set()
    worker.close()
    worker.close()
    assert ends.errors == [None]


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
        "from hetero.ranks.waiting import Job, _waiter\n_waiter.do(Job(op.wait))",
    ],
    ids=["Worker", "ranks.waiting"],
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
