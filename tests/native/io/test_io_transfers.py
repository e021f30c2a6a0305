"""native/io_engine: transfers that succeed, and arguments that are refused."""

import errno
import threading
import time

import pytest
import torch

from offload import _native
from tests.support.native.io_tools import BLOCK, Memory, add_file, needs_uring


@pytest.mark.covering(2)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("nbytes", [4096, BLOCK, BLOCK + 4096, 40 * BLOCK])
@pytest.mark.parametrize("registered", [False, True])
def test_round_trip(engine, tmp_path, direct, nbytes, registered):
    memory = Memory(nbytes)
    if registered:
        assert engine.register(memory.arena) == (engine.kind == "io_uring")
    file = add_file(engine, tmp_path, direct=direct)
    want = memory.randomise()
    begin = time.monotonic()
    engine.write(file, memory.address, nbytes, 8192).wait()
    memory.bytes.zero_()
    engine.read(file, memory.address, nbytes, 8192).wait()
    elapsed = time.monotonic() - begin
    assert torch.equal(memory.bytes, want)
    blocks = -(-nbytes // BLOCK)
    stats = engine.stats
    assert 0 < stats.pop("busy_s") <= elapsed
    assert stats == {
        "read_bytes": nbytes,
        "written_bytes": nbytes,
        "reads": blocks,
        "writes": blocks,
        "short_transfers": 0,
        "retries": 0,
        "errors": 0,
        "in_flight": 0,
    }
    assert engine.notes == []


def test_empty_transfer_is_done_at_once(engine, tmp_path):
    op = engine.read(add_file(engine, tmp_path), 0, 0, 0)
    assert op.done()
    op.wait()
    assert engine.stats["reads"] == 0


def test_submitting_threads_may_end_at_once(engine, tmp_path):
    memory = Memory(64 * BLOCK)
    file = add_file(engine, tmp_path)
    want = memory.randomise()
    ops = []
    for i in range(64):
        thread = threading.Thread(
            target=lambda i=i: ops.append(
                engine.write(file, memory.address + i * BLOCK, BLOCK, i * BLOCK)
            )
        )
        thread.start()
        thread.join()
    for op in ops:
        op.wait()
    memory.bytes.zero_()
    engine.read(file, memory.address, 64 * BLOCK, 0).wait()
    assert torch.equal(memory.bytes, want)


def test_bad_arguments(engine, tmp_path):
    memory = Memory(4096)
    file = add_file(engine, tmp_path, 4096)
    with pytest.raises(ValueError, match="no file 77"):
        engine.read(77, memory.address, 4096, 0)
    with pytest.raises(ValueError, match="no file 77"):
        engine.remove_file(77)
    with pytest.raises(ValueError, match="needs an address"):
        engine.read(file, 0, 4096, 0)
    with pytest.raises(ValueError, match="largest file"):
        engine.read(file, memory.address, 4096, (1 << 63) - 1)
    with pytest.raises(TypeError):
        engine.read(file, memory.address, 4096, -1)
    with pytest.raises(TypeError):
        engine.write(file, "memory", 4096, 0)
    with pytest.raises(OSError, match="cannot add file nowhere") as caught:
        engine.add_file(-1, "nowhere")
    assert caught.value.errno == errno.EBADF
    for fault in [{}, {"error": -5}, {"short_bytes": 1, "count": 0}]:
        with pytest.raises(ValueError, match="fault"):
            engine.inject("read", 0, **fault)
    with pytest.raises(ValueError, match="seek"):
        engine.inject("seek", 0, error=5)


def test_bad_options(kind):
    for options in [
        {"queue_depth": 0},
        {"queue_depth": 5000},
        {"block_bytes": 0},
        {"block_bytes": 1000},
        {"block_bytes": 2 << 30},
        {"patience_s": -1.0},
        {"patience_s": float("nan")},
    ]:
        with pytest.raises(ValueError, match=next(iter(options))):
            _native.IoEngine(kind, **options)
    with pytest.raises(ValueError, match="threads"):
        _native.IoEngine("threads", threads=0)
    with pytest.raises(ValueError, match="unknown I/O engine"):
        _native.IoEngine("aio")


@needs_uring
@pytest.mark.parametrize("hurried", [False, True])
def test_the_order_of_transfers(piped, hurried: bool, tmp_path) -> None:
    """One block is in flight at a time, and the first stays there until the pipe is fed: so all are
    queued before any goes. They write to one place, which has the last one's bytes in the end."""
    engine, pipe = piped(1)
    memory = Memory(3 * 4096)
    file = add_file(engine, tmp_path, 4096)
    first = engine.read(pipe.file, memory.address, 4096, 0)
    memory.bytes[4096 : 2 * 4096] = 1
    memory.bytes[2 * 4096 :] = 2
    soon = engine.write(file, memory.address + 4096, 4096, 0, soon=True)
    if hurried:
        soon.hurry()
    now = engine.write(file, memory.address + 2 * 4096, 4096, 0)
    assert [op.done() for op in (first, soon, now)] == [False] * 3
    pipe.feed(4096)
    for op in (first, soon, now):
        op.wait()
    engine.read(file, memory.address, 4096, 0, soon=True).wait()
    assert memory.bytes[:4096].unique().tolist() == [2 if hurried else 1]
    now.hurry()  # nothing: it is done
