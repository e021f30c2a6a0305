"""native/io_engine: files, engines, threads and processes that come and go."""

import errno
import gc
import time
from concurrent.futures import ThreadPoolExecutor

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
    stall,
    thread_names,
    threads_since,
)
from tests.support.own_process import descriptors
from tests.support.waiting import in_time


def test_close_fails_what_is_queued_and_waits_for_what_is_in_flight(make_engine, tmp_path):
    engine = make_engine(queue_depth=1)
    memory = Memory(4 * BLOCK)
    file = add_file(engine, tmp_path, 4 * BLOCK)
    stall(engine)
    running = engine.read(file, memory.address, BLOCK, 0)
    queued = [engine.read(file, memory.address, 2 * BLOCK, i * BLOCK) for i in range(3)]
    assert not running.done()
    engine.close()
    assert running.done()
    running.wait()
    for i, op in enumerate(queued):
        error = error_of(op)
        assert error.errno == errno.ECANCELED
        assert (error.offset, error.wanted_bytes, error.got_bytes) == (i * BLOCK, 2 * BLOCK, 0)


def test_close_in_the_middle_of_an_operation(make_engine, tmp_path):
    engine = make_engine(queue_depth=1)
    memory = Memory(4 * BLOCK)
    file = add_file(engine, tmp_path, 4 * BLOCK)
    stall(engine)
    op = engine.read(file, memory.address, 4 * BLOCK, 0)
    engine.close()
    error = error_of(op)  # of the whole operation
    assert error.errno == errno.ECANCELED
    assert (error.offset, error.wanted_bytes, error.got_bytes) == (0, 4 * BLOCK, 0)
    assert engine.stats["reads"] == 0  # the block that was being retried was given up


def test_closed_engine(engine, tmp_path):
    memory = Memory(4096)
    file = add_file(engine, tmp_path, 4096)
    engine.read(file, memory.address, 4096, 0).wait()
    engine.close()
    engine.close()
    assert engine.stats["reads"] == 1
    with pytest.raises(RuntimeError, match="closed"):
        engine.read(file, memory.address, 4096, 0)
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_file(0, "stdin")
    engine.remove_file(file)
    engine.unregister(memory.arena)


def test_close_from_several_threads(make_engine, tmp_path):
    engine = make_engine(queue_depth=2)
    memory = Memory(64 * BLOCK)
    file = add_file(engine, tmp_path, 64 * BLOCK)
    op = engine.read(file, memory.address, 64 * BLOCK, 0)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(engine.close) for _ in range(4)]:
            future.result()
    assert op.done()


def test_operation_keeps_the_engine(kind, tmp_path):
    engine = _native.IoEngine(kind, block_bytes=BLOCK)
    memory = Memory(64 * BLOCK)
    op = engine.write(add_file(engine, tmp_path), memory.address, 64 * BLOCK, 0)
    del engine
    gc.collect()
    assert thread_names()
    op.wait()
    del op
    gc.collect()
    assert threads_since([]) == []


def test_unclosed_engine_is_closed_with_its_object(kind, tmp_path):
    fds = descriptors()
    engine = _native.IoEngine(kind, block_bytes=BLOCK)
    memory = Memory(64 * BLOCK)
    engine.write(add_file(engine, tmp_path), memory.address, 64 * BLOCK, 0)
    del engine
    gc.collect()
    assert in_time(descriptors, fds) == fds
    assert threads_since([]) == []


def test_forked_child_leaves_the_engine_alone(kind, tmp_path):
    out = run_script(f"""
        import errno, os, sys, warnings
        from offload import _native
        warnings.simplefilter("ignore")  # Python's own about threads and fork
        arena = _native.Arena(4 * {BLOCK})
        engine = _native.IoEngine({kind!r}, block_bytes={BLOCK})
        engine.register(arena)
        fd = os.open({str(tmp_path)!r}, os.O_TMPFILE | os.O_RDWR)
        os.truncate(fd, 4 * {BLOCK})
        file = engine.add_file(fd, "scratch")
        engine.inject("read", 0, error=errno.EAGAIN, count=200)
        op = engine.read(file, arena.address, arena.nbytes, 0)
        child = os.fork()
        if child == 0:
            for use in [op.wait, op.cancel, lambda: engine.read(file, arena.address, 4096, 0),
                        lambda: engine.stats, lambda: engine.unregister(arena)]:
                try:
                    use()
                except RuntimeError as error:
                    assert "belongs to process" in str(error)
                else:
                    os._exit(3)
            engine.close()
            own = _native.IoEngine({kind!r})
            fresh = _native.Arena(4096)  # (it has not the registered one)
            own.read(own.add_file(fd, "scratch"), fresh.address, 4096, 0).wait()
            sys.exit(0)  # with the interpreter's whole end
        status = os.waitpid(child, 0)[1]
        op.wait()
        engine.close()
        print(status, engine.stats["reads"])
        """)
    assert out == "0 4\n"


def test_interpreter_exit_with_transfers_in_flight(kind, tmp_path):
    run_script(f"""
        import os
        from offload import _native
        arena = _native.Arena(64 << 20)
        engine = _native.IoEngine({kind!r}, block_bytes={BLOCK})
        fd = os.open({str(tmp_path)!r}, os.O_TMPFILE | os.O_RDWR)
        ops = [engine.write(engine.add_file(fd, "x"), arena.address, arena.nbytes, 0)]
        """)


@needs_uring
@pytest.mark.covering(2)
@pytest.mark.parametrize("setup", ["defer", "coop", "plain"])
@pytest.mark.parametrize("registered", [False, True])
def test_every_setup_of_the_ring(tmp_path, monkeypatch, setup, registered):
    """Each falls back to the next where the kernel does not know it, so all must work."""
    monkeypatch.setenv("HETERO_URING_SETUP", setup)
    before = descriptors()
    engine = _native.IoEngine("io_uring", queue_depth=4, block_bytes=BLOCK)
    memory = Memory(40 * BLOCK)
    if registered:
        assert engine.register(memory.arena), engine.notes
    file = add_file(engine, tmp_path, direct=True)
    want = memory.randomise()
    ops = [engine.write(file, memory.address + i * BLOCK, BLOCK, i * BLOCK) for i in range(40)]
    for op in ops:
        op.wait()
    memory.bytes.zero_()
    engine.read(file, memory.address, 40 * BLOCK, 0).wait()
    assert torch.equal(memory.bytes, want)
    time.sleep(0.05)  # it waits by now, and is woken again
    engine.read(file, memory.address, BLOCK, 0).wait()
    engine.unregister(memory.arena)
    assert engine.notes == []
    engine.close()
    assert in_time(descriptors, before) == before
    assert threads_since([]) == []


@needs_uring
def test_an_unknown_setup_is_refused(monkeypatch):
    monkeypatch.setenv("HETERO_URING_SETUP", "fast")
    with pytest.raises(ValueError, match='HETERO_URING_SETUP is "fast"'):
        _native.IoEngine("io_uring")
