"""native/io_engine: operations that are cancelled."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from offload import _native
from tests.support.native.io_tools import (
    BLOCK,
    Memory,
    add_file,
    error_of,
    needs_uring,
    stall,
)


@pytest.fixture
def busy(make_engine, tmp_path):
    """An engine whose queue is full for half a second of a transfer that does not move."""
    engine = make_engine(queue_depth=1, block_bytes=4096)
    memory = Memory(4096)
    file = add_file(engine, tmp_path, 4096)
    stall(engine, 500)
    running = engine.read(file, memory.address, 4096, 0)
    yield engine
    assert not running.done()
    running.cancel()


def outcome(op) -> int:
    """The errno that `op` ended with, or 0."""
    try:
        op.wait()
    except _native.NativeIoError as error:
        return error.errno
    return 0


def test_what_is_queued_goes_at_once(busy, tmp_path):
    memory = Memory(4 * 4096)
    file = add_file(busy, tmp_path, 4 * 4096)
    queued = busy.write(file, memory.address, 4 * 4096, 0)
    queued.cancel()
    assert queued.done()  # although the queue is full
    error = error_of(queued)
    assert error.errno == errno.ECANCELED
    assert (error.op, error.offset, error.wanted_bytes, error.got_bytes) == ("write", 0, 16384, 0)
    assert f"write of 16384 bytes at offset 0 of {tmp_path}/scratch" in str(error)
    assert "after 0 bytes" in str(error)
    assert busy.stats["writes"] == 0


@needs_uring
def test_what_is_in_flight_is_waited_for_and_counted(piped):
    engine, pipe = piped(2)
    memory = Memory(8 * 4096)
    memory.bytes.fill_(7)
    op = engine.read(pipe.file, memory.address, 8 * 4096, 0)
    pipe.feed_first(engine)
    assert engine.stats["in_flight"] == 2
    op.cancel()
    op.cancel()
    assert not op.done()
    pipe.feed(2 * 4096)
    error = error_of(op)
    assert error.errno == errno.ECANCELED
    assert (error.wanted_bytes, error.got_bytes) == (8 * 4096, 3 * 4096)
    assert f"failed after {3 * 4096} bytes" in str(error)
    assert bool((memory.bytes[3 * 4096 :] == 7).all())  # nothing came after
    assert error_of(op).errno == errno.ECANCELED
    assert engine.stats["reads"] == 3
    assert engine.stats["in_flight"] == 0


@needs_uring
def test_a_short_transfer_in_flight_is_not_continued(piped):
    engine, pipe = piped(2)
    memory = Memory(2 * 4096)
    op = engine.read(pipe.file, memory.address, 2 * 4096, 0)
    pipe.feed_first(engine)
    op.cancel()
    pipe.feed(100)
    error = error_of(op)
    assert (error.errno, error.got_bytes) == (errno.ECANCELED, 4096 + 100)


def test_cancelling_from_many_threads(engine, tmp_path):
    memory = Memory(64 * BLOCK)
    file = add_file(engine, tmp_path, 64 * BLOCK)
    for _ in range(10):
        op = engine.read(file, memory.address, 64 * BLOCK, 0)
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(op.cancel) for _ in range(8)]:
                future.result()
        assert outcome(op) in (0, errno.ECANCELED)
        assert op.done()
    engine.read(file, memory.address, 64 * BLOCK, 0).wait()


def test_a_waiter_is_woken(busy, tmp_path):
    memory = Memory(4096)
    queued = busy.read(add_file(busy, tmp_path, 4096), memory.address, 4096, 0)
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(error_of(queued).errno))
    waiter.start()
    queued.cancel()
    waiter.join(30)
    assert seen == [errno.ECANCELED]


def test_removing_a_file_does_not_wait_for_what_was_cancelled(busy, tmp_path):
    memory = Memory(4096)
    file = add_file(busy, tmp_path, 4096)
    queued = busy.read(file, memory.address, 4096, 0)
    queued.cancel()
    busy.remove_file(file)
    assert error_of(queued).errno == errno.ECANCELED
