"""native/io_engine: files and kernels that fail by themselves, not by injection."""

import errno
import gc
import os
import time

from offload import _native
from tests.support.native.io_tools import (
    BLOCK,
    Memory,
    add_file,
    error_of,
    needs_uring,
    run_script,
    thread_names,
)
from tests.support.own_process import descriptors


@needs_uring
def test_a_kernel_that_refuses_io_uring():
    """(Who then takes the other engine is in test_scratch_file.py. Nothing here imports torch.)"""
    run_script("""
        import errno, os
        from offload import _native
        from tests.support.native.seccomp import IO_URING_SETUP, refuse

        def meet(error):
            refuse(IO_URING_SETUP, error)
            fds = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                try:
                    _native.IoEngine("io_uring")
                except OSError as refusal:
                    assert refusal.errno == error, refusal
                    assert 'use the "threads" engine' in str(refusal), refusal
                    is_limit = "raise the locked-memory limit, ulimit -l, which is" in str(refusal)
                    assert is_limit == (error == errno.ENOMEM), refusal
                else:
                    raise AssertionError("made a ring")
            assert len(os.listdir("/proc/self/fd")) == fds

        for error in (errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOMEM):
            child = os.fork()
            if child == 0:
                meet(error)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status == 77:
                raise SystemExit(status)
            assert status == 0, error
        """)


# A kernel that stops taking or giving


def ring_fd() -> int:
    gc.collect()
    ((ring, _),) = descriptors("io_uring")
    return ring


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
def test_a_ring_that_takes_nothing_fails_its_operations_for_good(tmp_path):
    engine = _native.IoEngine("io_uring", queue_depth=4, block_bytes=BLOCK)
    memory = Memory(64 * BLOCK)
    file = add_file(engine, tmp_path, 64 * BLOCK)
    engine.read(file, memory.address, BLOCK, 0).wait()
    with Broken():
        failed = [engine.read(file, memory.address, 64 * BLOCK, 0) for _ in range(3)]
        for op in failed:
            assert error_of(op).errno == errno.EOPNOTSUPP
    # Nobody may believe this engine again.
    assert error_of(engine.write(file, memory.address, 64 * BLOCK, 0)).errno == errno.EOPNOTSUPP
    assert not engine.register(memory.arena)
    assert engine.stats["in_flight"] == 0
    engine.remove_file(file)
    engine.close()
    assert not thread_names()
    other = _native.IoEngine("io_uring", queue_depth=4, block_bytes=BLOCK)
    other.read(add_file(other, tmp_path, BLOCK), memory.address, BLOCK, 0).wait()
    other.close()


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
    # The one that the pipe fed arrived, unless the reaper was not yet asleep as the ring broke.
    assert sorted(outcomes)[1:] == [errno.EOPNOTSUPP] * 2
    assert outcomes[0] in (0, errno.EOPNOTSUPP)
    assert error_of(engine.read(pipe, memory.address, 4096, 0)).errno == errno.EOPNOTSUPP
    os.close(source)
    os.close(sink)
    engine.close()
    assert not thread_names()


@needs_uring
def test_a_ring_that_takes_nothing_more_is_waited_for(tmp_path):
    """What is in flight may still be written by the kernel: its memory must not get another use."""
    out = run_script(f"""
        import ctypes, errno, os
        from offload import _native
        from tests.support.native.seccomp import IO_URING_ENTER, refuse
        arena = _native.Arena(2 * 4096, 4096)
        engine = _native.IoEngine("io_uring", queue_depth=8, block_bytes=4096)
        source, sink = os.pipe()
        pipe = engine.add_file(source, "pipe")
        fd = os.open({str(tmp_path)!r}, os.O_TMPFILE | os.O_RDWR)
        os.truncate(fd, 4096)
        file = engine.add_file(fd, "scratch")
        reading = engine.read(pipe, arena.address, 4096, 0)
        engine.read(file, arena.address + 4096, 4096, 0).wait()  # so the one before is in flight
        # Submissions fail, waiting for what is in flight does not.
        refuse(IO_URING_ENTER, errno.ENOMEM, second_is_not=0)
        for _ in range(2):
            op = engine.read(file, arena.address + 4096, 4096, 0)
            try:
                op.wait()
            except _native.NativeIoError as error:
                print(errno.errorcode[error.errno], reading.done(), arena.transfers.in_use())
        os.write(sink, bytes([7]) * 4096)
        reading.wait()
        print(ctypes.c_ubyte.from_address(arena.address).value, arena.transfers.in_use())
        engine.close()
        """)
    assert out.splitlines() == ["ENOMEM False [0]", "ENOMEM False [0]", "7 []"]
