"""native/io_engine: every fault ends in an error on its waiter, and nowhere else."""

import errno
import gc
import os
import time

import pytest
import torch

from offload import _native
from tests.io_tools import (
    BLOCK,
    Memory,
    add_file,
    needs_uring,
    run_script,
    thread_names,
)


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("nth", range(5))
def test_error_at_each_block(engine, tmp_path, op, nth):
    memory = Memory(5 * BLOCK)
    file = add_file(engine, tmp_path, 5 * BLOCK)
    start = getattr(engine, op)
    engine.inject(op, nth, error=errno.EIO)
    failed = start(file, memory.address, 5 * BLOCK, 0)
    for _ in range(2):
        with pytest.raises(_native.NativeIoError) as caught:
            failed.wait()
    error = caught.value
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
    start(file, memory.address, 5 * BLOCK, 0).wait()  # the engine works on


def test_first_of_several_errors_is_reported_once_all_blocks_are_back(engine, tmp_path):
    memory = Memory(64 * BLOCK)
    file = add_file(engine, tmp_path, 64 * BLOCK)
    engine.inject("read", 1, error=errno.EIO)
    engine.inject("read", 2, error=errno.ENXIO)
    with pytest.raises(_native.NativeIoError) as caught:
        engine.read(file, memory.address, 64 * BLOCK, 0).wait()
    assert caught.value.errno == errno.EIO
    # What was not yet in flight was not started: at most a queue of 8 and its first refills.
    assert engine.stats["reads"] < 32
    time.sleep(0.02)
    settled = engine.stats
    time.sleep(0.02)
    assert engine.stats == settled


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR])
@pytest.mark.parametrize("nth", [0, 3])
def test_transient_errors_are_retried(engine, tmp_path, error, nth):
    memory = Memory(5 * BLOCK)
    file = add_file(engine, tmp_path)
    want = memory.randomise()
    engine.inject("write", nth, error=error, count=4)
    engine.inject("read", nth, error=error, count=4)
    engine.write(file, memory.address, 5 * BLOCK, 0).wait()
    memory.bytes.zero_()
    engine.read(file, memory.address, 5 * BLOCK, 0).wait()
    assert torch.equal(memory.bytes, want)
    assert engine.stats["retries"] == 8
    assert engine.stats["errors"] == 0


def test_transient_error_that_stays_is_an_error(engine, tmp_path):
    memory = Memory(4096)
    file = add_file(engine, tmp_path, 4096)
    engine.inject("read", 0, error=errno.EAGAIN, count=10_000)
    with pytest.raises(_native.NativeIoError) as caught:
        engine.read(file, memory.address, 4096, 0).wait()
    assert caught.value.errno == errno.EAGAIN


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("short_bytes", [1, 512, 4096, 5000, BLOCK - 1])
@pytest.mark.parametrize("nth", [0, 2, 4])
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
    with pytest.raises(_native.NativeIoError) as caught:
        engine.write(file, memory.address, BLOCK, 0).wait()
    assert caught.value.errno == errno.EIO


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


def test_full_device(engine):
    memory = Memory(4 * BLOCK)
    with open("/dev/full", "wb", buffering=0) as full:
        file = engine.add_file(full.fileno(), "/dev/full")
    with pytest.raises(_native.NativeIoError, match="No space left on device") as caught:
        engine.write(file, memory.address, 4 * BLOCK, 0).wait()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.op == "write"


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


@pytest.mark.parametrize("mode", [os.O_RDONLY, os.O_WRONLY])
def test_wrong_mode(engine, tmp_path, mode):
    memory = Memory(4096)
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    fd = os.open(path, mode)
    file = engine.add_file(fd, str(path))
    os.close(fd)
    start = engine.write if mode == os.O_RDONLY else engine.read
    with pytest.raises(_native.NativeIoError) as caught:
        start(file, memory.address, 4096, 0).wait()
    assert caught.value.errno == errno.EBADF


def test_bad_address(engine, tmp_path):
    file = add_file(engine, tmp_path, 4096)
    with pytest.raises(_native.NativeIoError) as caught:
        engine.read(file, 4096, 4096, 0).wait()
    assert caught.value.errno == errno.EFAULT


def ring_fd() -> int:
    gc.collect()
    rings = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # that of the listing itself
            continue
        if "io_uring" in target:
            rings.append(int(fd))
    assert len(rings) == 1
    return rings[0]


class Broken:
    """While entered, system calls on the ring's file descriptor fail."""

    def __enter__(self) -> None:
        self.ring = ring_fd()
        self.saved = os.dup(self.ring)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self.ring)
        os.close(null)

    def __exit__(self, *_: object) -> None:
        os.dup2(self.saved, self.ring)
        os.close(self.saved)


@needs_uring
def test_refused_submission_fails_its_operations_and_no_others(tmp_path):
    engine = _native.IoEngine("io_uring", queue_depth=4, block_bytes=BLOCK)
    memory = Memory(64 * BLOCK)
    file = add_file(engine, tmp_path, 64 * BLOCK)
    engine.read(file, memory.address, BLOCK, 0).wait()
    with Broken():
        failed = [engine.read(file, memory.address, 64 * BLOCK, 0) for _ in range(3)]
        for op in failed:
            with pytest.raises(_native.NativeIoError) as caught:
                op.wait()
            assert caught.value.errno == errno.EOPNOTSUPP
    want = memory.randomise()
    engine.write(file, memory.address, 64 * BLOCK, 0).wait()
    memory.bytes.zero_()
    engine.read(file, memory.address, 64 * BLOCK, 0).wait()
    assert torch.equal(memory.bytes, want)
    engine.close()


@needs_uring
def test_lost_ring_fails_operations_instead_of_hanging(tmp_path):
    engine = _native.IoEngine("io_uring", queue_depth=4, block_bytes=4096)
    memory = Memory(4 * 4096)
    source, sink = os.pipe()
    pipe = engine.add_file(source, "pipe")
    waiting = [engine.read(pipe, memory.address + i * 4096, 4096, 0) for i in range(3)]
    with Broken():
        os.write(sink, bytes(4096))  # the reaper wakes, and cannot go back to sleep
        deadline = time.monotonic() + 10
        while not all(op.done() for op in waiting) and time.monotonic() < deadline:
            time.sleep(0.01)
    outcomes = []
    for op in waiting:
        try:
            op.wait()
            outcomes.append(0)
        except _native.NativeIoError as error:
            outcomes.append(error.errno)
    assert sorted(outcomes) == [0, errno.EOPNOTSUPP, errno.EOPNOTSUPP]
    with pytest.raises(_native.NativeIoError) as caught:
        engine.read(pipe, memory.address, 4096, 0).wait()
    assert caught.value.errno == errno.EOPNOTSUPP
    os.close(source)
    os.close(sink)
    engine.close()
    assert not thread_names()
