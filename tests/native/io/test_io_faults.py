"""native/io_engine: every fault ends in an error on its waiter, and nowhere else."""

import ctypes
import errno
import os
import time

import pytest
import torch

from offload import _native
from tests.support.native.io_tools import (
    BLOCK,
    Memory,
    add_file,
    error_of,
    needs_uring,
    run_script,
    thread_names,
    threads_since,
)
from tests.support.own_process import descriptors
from tests.support.waiting import until


@pytest.mark.covering(2)
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("nth", [0, 4])
def test_error_at_each_block(engine, tmp_path, op, nth):
    memory = Memory(5 * BLOCK)
    file = add_file(engine, tmp_path, 5 * BLOCK)
    start = getattr(engine, op)
    engine.inject(op, nth, error=errno.EIO)
    failed = start(file, memory.address, 5 * BLOCK, 0)
    for _ in range(2):
        error = error_of(failed)
    assert isinstance(error, OSError)
    assert error.errno == errno.EIO
    assert error.strerror == os.strerror(errno.EIO)
    assert error.filename == f"{tmp_path}/scratch"
    assert error.op == op
    assert error.offset % BLOCK == 0
    assert error.offset < 5 * BLOCK
    assert (error.wanted_bytes, error.got_bytes) == (BLOCK, 0)
    assert error.free_bytes > 0
    assert str(error) == (
        f"{op} of {BLOCK} bytes at offset {error.offset} of {tmp_path}/scratch failed after 0 "
        f"bytes: {os.strerror(errno.EIO)} (errno {errno.EIO}); {error.free_bytes / 2**30:.1f} GiB "
        "free"
    )
    assert engine.stats["errors"] == 1
    # A thread of the engine that throws fails the operation alone, too.
    threads = thread_names()
    engine.inject(op, nth, throws=True)
    error = error_of(start(file, memory.address, 5 * BLOCK, 0))
    assert error.errno == errno.EIO
    assert error.filename == f"{tmp_path}/scratch"
    assert (error.wanted_bytes, error.got_bytes) == (BLOCK, 0)
    assert threads_since(threads) == threads
    assert engine.stats["in_flight"] == 0
    for _ in range(5):  # the engine works on
        start(file, memory.address, 5 * BLOCK, 0).wait()


def test_a_failure_is_told_when_the_file_is_gone(engine, tmp_path):
    """The filesystem is asked by whoever waits; until then, and no longer, the file is open."""
    before = descriptors()
    memory = Memory(BLOCK)
    file = add_file(engine, tmp_path, BLOCK)
    engine.inject("read", 0, error=errno.EIO)
    failed = engine.read(file, memory.address, BLOCK, 0)
    engine.remove_file(file)
    for _ in range(2):
        with pytest.raises(_native.NativeIoError) as caught:
            failed.wait()
        assert caught.value.free_bytes > 0
    assert descriptors() == before


def test_first_of_several_errors_is_reported_once_all_blocks_are_back(engine, tmp_path):
    memory = Memory(64 * BLOCK)
    file = add_file(engine, tmp_path, 64 * BLOCK)
    engine.inject("read", 1, error=errno.EIO)
    engine.inject("read", 2, error=errno.ENXIO)
    assert error_of(engine.read(file, memory.address, 64 * BLOCK, 0)).errno == errno.EIO
    # What was not yet in flight was not started: at most a queue of 8 and its first refills.
    assert engine.stats["reads"] < 32
    time.sleep(0.02)
    settled = engine.stats
    time.sleep(0.02)
    assert engine.stats == settled


def test_what_passes_within_thirty_seconds_is_no_error(make_engine, tmp_path):
    """As where a path fails over, which takes longer than a second."""
    engine = make_engine()
    memory = Memory(4096)
    file = add_file(engine, tmp_path, 4096)
    engine.inject("read", 0, error=errno.ENOMEM, count=1_200)  # a millisecond or more each
    engine.read(file, memory.address, 4096, 0).wait()
    assert engine.stats["retries"] == 1_200


def test_patience_begins_anew_with_progress(make_engine, tmp_path):
    """Eight attempts are free, before and after it."""
    engine = make_engine(patience_s=0.0)
    memory = Memory(2 * 4096)
    file = add_file(engine, tmp_path, 2 * 4096)
    engine.inject("read", 0, error=errno.EAGAIN, count=8)
    engine.inject("read", 8, short_bytes=4096)
    engine.inject("read", 9, error=errno.EAGAIN, count=8)
    engine.read(file, memory.address, 2 * 4096, 0).wait()
    assert engine.stats["retries"] == 16


def test_transfers_that_stall_together_are_given_up_together_and_hold_no_other(
    make_engine, tmp_path
):
    engine = make_engine(queue_depth=40, block_bytes=4096, patience_s=1.0)
    memory = Memory(33 * 4096)
    file = add_file(engine, tmp_path, 2 * 4096)
    engine.inject("read", 0, error=errno.EAGAIN, count=1_000_000)
    begin = time.monotonic()
    stalled = [engine.read(file, memory.address + i * 4096, 4096, 0) for i in range(32)]
    for _ in range(10):
        engine.write(file, memory.address + 32 * 4096, 4096, 4096).wait()
    assert not any(op.done() for op in stalled)
    for op in stalled:
        assert error_of(op).errno == errno.EAGAIN
    # No measurement: a second for all of them, where one after the other would take 32.
    assert time.monotonic() - begin < 12


@pytest.mark.covering(2)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("short_bytes", [1, 512, 4096, BLOCK - 1])
@pytest.mark.parametrize("nth", [0, 4])
def test_short_transfer_is_continued(engine, tmp_path, direct, short_bytes, nth):
    memory = Memory(5 * BLOCK)
    file = add_file(engine, tmp_path, direct=direct)
    want = memory.randomise()
    engine.inject("write", nth, short_bytes=short_bytes)
    engine.write(file, memory.address, 5 * BLOCK, 0).wait()
    memory.bytes.zero_()
    # A read that ends where the file does is no short transfer but its end.
    engine.write(file, memory.address, 4096, 5 * BLOCK).wait()
    engine.inject("read", nth, short_bytes=short_bytes)
    engine.read(file, memory.address, 5 * BLOCK, 0).wait()
    assert torch.equal(memory.bytes, want)
    assert engine.stats["short_transfers"] == 2
    assert engine.stats["errors"] == 0


def test_transfer_that_never_progresses_is_an_error(engine, tmp_path):
    memory = Memory(BLOCK)
    file = add_file(engine, tmp_path)
    engine.inject("write", 0, short_bytes=0, count=10_000)
    assert error_of(engine.write(file, memory.address, BLOCK, 0)).errno == errno.EIO


@pytest.mark.covering(2)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [0, 4096, BLOCK, BLOCK + 100, BLOCK + 4096, 3 * BLOCK - 1])
def test_truncated_file(engine, tmp_path, direct, size):
    memory = Memory(3 * BLOCK)
    file = add_file(engine, tmp_path, size, direct=direct)
    with pytest.raises(_native.NativeIoError, match="unexpected end of file") as caught:
        engine.read(file, memory.address, 3 * BLOCK, 0).wait()
    error = caught.value
    assert error.errno == 0
    assert error.wanted_bytes == BLOCK
    assert error.offset >= size // BLOCK * BLOCK
    assert error.got_bytes == max(0, size - error.offset)


def test_errors_of_the_kernel(engine, tmp_path):
    memory = Memory(4 * BLOCK)
    with open("/dev/full", "wb", buffering=0) as full:
        file = engine.add_file(full.fileno(), "/dev/full")
    error = error_of(engine.write(file, memory.address, 4 * BLOCK, 0))
    assert (error.errno, error.op) == (errno.ENOSPC, "write")
    assert "No space left on device" in str(error)
    with open(tmp_path / "file", "wb", buffering=0) as written_only:
        file = engine.add_file(written_only.fileno(), "file")
    assert error_of(engine.read(file, memory.address, 4096, 0)).errno == errno.EBADF


def test_file_size_limit(kind, tmp_path):
    out = run_script(f"""
        import errno, os, resource
        from offload import _native
        limit = 3 * {BLOCK} + 4096
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        arena = _native.Arena(8 * {BLOCK})
        engine = _native.IoEngine({kind!r}, block_bytes={BLOCK})
        fd = os.open({str(tmp_path)!r}, os.O_TMPFILE | os.O_RDWR)
        file = engine.add_file(fd, "scratch")
        try:
            engine.write(file, arena.address, arena.nbytes, 0).wait()
        except _native.NativeIoError as error:
            assert error.errno == errno.EFBIG, error
            print(os.fstat(fd).st_size == limit)
        engine.close()
        """)
    assert out == "True\n"


def test_bad_address(engine, tmp_path):
    file = add_file(engine, tmp_path, 4096)
    memory = Memory(2 * 4096)
    elsewhere = bytearray(2 * 4096)  # memory of this process, and of no arena
    own = ctypes.addressof(ctypes.c_char.from_buffer(elsewhere))
    for address in (4096, own):
        with pytest.raises(ValueError, match="in no arena"):
            engine.read(file, address, 4096, 0)
    # Another arena may end where this one begins; the transfer would span both.
    with pytest.raises(ValueError, match=r"in no arena|outside an arena"):
        engine.read(file, memory.address - 1, 4096, 0)
    with pytest.raises(ValueError, match="outside an arena of 8192 bytes"):
        engine.read(file, memory.address + 1, 2 * 4096, 0)
    engine.read(file, memory.address + 4096, 4096, 0).wait()
    address = memory.address
    del memory
    with pytest.raises(ValueError, match="in no arena"):
        engine.read(file, address, 4096, 0)


@needs_uring
def test_an_operation_that_does_not_move_does_not_hold_up_others(piped, tmp_path):
    engine, pipe = piped(4)
    memory = Memory(64 * 4096)
    stuck = engine.read(pipe.file, memory.address, 3 * 4096, 0)
    file = add_file(engine, tmp_path, 64 * 4096)
    engine.read(file, memory.address + 4 * 4096, 60 * 4096, 0).wait()  # through the fourth place
    assert not stuck.done()
    assert engine.stats["in_flight"] == 3
    pipe.feed(3 * 4096)
    stuck.wait()


@needs_uring
def test_the_queue_stays_full_from_one_operation_to_the_next(piped):
    """Every completion is followed by the next block in order of submission, whoever's it is."""
    engine, pipe = piped(4)
    memory = Memory(12 * 4096)
    # Three blocks each: no operation ends where the queue does.
    ops = [engine.read(pipe.file, memory.address + i * 3 * 4096, 3 * 4096, 0) for i in range(4)]
    for fed in range(1, 13):
        pipe.feed(4096)
        until(lambda fed=fed: engine.stats["reads"] >= fed)
        assert engine.stats["reads"] == fed
        assert engine.stats["in_flight"] == min(4, 12 - fed)
        # Not later ones before: at most one is partly done beyond those that must be.
        assert sum(op.done() for op in ops) <= fed // 3
    for op in ops:
        op.wait()
