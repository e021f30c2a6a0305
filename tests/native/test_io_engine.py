"""native/io_engine: the same tests for both engines; what only io_uring has is at the end."""

import errno
import gc
import os
import random
import resource
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _native

BLOCK = 1 << 16
MIB = 1 << 20


def io_uring_refusal() -> str:
    try:
        _native.IoEngine("io_uring").close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


NO_URING = io_uring_refusal()
needs_uring = pytest.mark.skipif(bool(NO_URING), reason=NO_URING)
KINDS = [pytest.param("io_uring", marks=needs_uring), "threads"]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def engine(kind):
    engine = _native.IoEngine(kind, queue_depth=8, block_bytes=BLOCK)
    yield engine
    engine.close()


class Memory:
    """An arena, and its bytes as a tensor."""

    def __init__(self, nbytes: int) -> None:
        self.arena = _native.Arena(nbytes)
        self.address = self.arena.address
        self.bytes = torch.from_dlpack(self.arena.export(0, self.arena.nbytes))

    def randomise(self) -> torch.Tensor:
        self.bytes.random_(0, 256, generator=torch.Generator().manual_seed(len(self.bytes)))
        return self.bytes.clone()


def add_file(engine, directory, nbytes=0, direct=False) -> int:
    flags = os.O_TMPFILE | os.O_RDWR | (os.O_DIRECT if direct else 0)
    try:
        fd = os.open(directory, flags, 0o600)
    except OSError as error:
        pytest.skip(f"no O_TMPFILE{' with O_DIRECT' if direct else ''} here: {error}")
    try:
        os.truncate(fd, nbytes)
        return engine.add_file(fd, f"{directory}/scratch")
    finally:
        os.close(fd)


def thread_names() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                names.append(comm.read().strip())
        except FileNotFoundError:  # it has just ended
            continue
    # The optimizer's worker pool belongs to the process, not to an engine.
    return sorted(n for n in names if n.startswith("hetero") and n != "hetero-worker")


def run_script(script: str, timeout: float = 60) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Round trips


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("nbytes", [4096, BLOCK, BLOCK + 4096, 40 * BLOCK])
@pytest.mark.parametrize("registered", [False, True])
def test_round_trip(engine, tmp_path, direct, nbytes, registered):
    memory = Memory(nbytes)
    if registered:
        assert engine.register(memory.arena) == (engine.kind == "io_uring")
    file = add_file(engine, tmp_path, direct=direct)
    want = memory.randomise()
    engine.write(file, memory.address, nbytes, 8192).wait()
    memory.bytes.zero_()
    engine.read(file, memory.address, nbytes, 8192).wait()
    assert torch.equal(memory.bytes, want)
    blocks = -(-nbytes // BLOCK)
    assert engine.stats == {
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


@pytest.mark.parametrize("nbytes", [1, 511, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 777])
def test_round_trip_of_odd_sizes(engine, tmp_path, nbytes):
    memory = Memory(nbytes + 3)
    file = add_file(engine, tmp_path)
    want = memory.randomise()
    engine.write(file, memory.address + 3, nbytes, 5).wait()
    memory.bytes.zero_()
    engine.read(file, memory.address + 3, nbytes, 5).wait()
    assert torch.equal(memory.bytes[3 : 3 + nbytes], want[3 : 3 + nbytes])
    assert not memory.bytes[:3].any()
    assert not memory.bytes[3 + nbytes :].any()


def test_empty_transfer_is_done_at_once(engine, tmp_path):
    op = engine.read(add_file(engine, tmp_path), 0, 0, 0)
    assert op.done()
    op.wait()
    assert engine.stats["reads"] == 0


@pytest.mark.parametrize("direct", [False, True])
def test_many_operations_in_flight(engine, tmp_path, direct):
    count, nbytes = 200, 3 * 4096
    memory = Memory(count * nbytes)
    engine.register(memory.arena)
    file = add_file(engine, tmp_path, direct=direct)
    want = memory.randomise()
    order = list(range(count))
    random.Random(1).shuffle(order)
    writes = [engine.write(file, memory.address + i * nbytes, nbytes, i * nbytes) for i in order]
    for op in reversed(writes):
        op.wait()
        assert op.done()
    memory.bytes.zero_()
    reads = [engine.read(file, memory.address + i * nbytes, nbytes, i * nbytes) for i in order]
    for op in reads:
        op.wait()
    assert torch.equal(memory.bytes, want)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("any_kind", KINDS)
def test_file_behaves_like_bytes(any_kind, tmp_path_factory, data):
    size = 5 * 4096
    model = bytearray(size)
    memory = Memory(size)
    engine = _native.IoEngine(any_kind, queue_depth=3, block_bytes=4096)
    file = add_file(engine, tmp_path_factory.getbasetemp(), size)
    for step in range(data.draw(st.integers(1, 8))):
        offset = data.draw(st.integers(0, size - 1))
        nbytes = data.draw(st.integers(0, size - offset))
        if data.draw(st.booleans()):
            memory.bytes.fill_(step + 1)
            engine.write(file, memory.address, nbytes, offset).wait()
            model[offset : offset + nbytes] = bytes([step + 1]) * nbytes
        else:
            engine.read(file, memory.address, nbytes, offset).wait()
            got = bytes(memory.bytes[:nbytes].tolist())
            assert got == bytes(model[offset : offset + nbytes])
    engine.close()


def test_use_from_many_threads(engine, tmp_path):
    count, nbytes, rounds = 6, 2 * BLOCK + 4096, 20
    memory = Memory(count * nbytes)
    file = add_file(engine, tmp_path)

    def worker(index):
        mine = memory.bytes[index * nbytes : (index + 1) * nbytes]
        address = memory.address + index * nbytes
        for value in range(rounds):
            mine.fill_(value + index)
            engine.write(file, address, nbytes, index * nbytes).wait()
            mine.zero_()
            engine.read(file, address, nbytes, index * nbytes).wait()
            assert bool((mine == value + index).all())

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(worker, index) for index in range(count)]:
            future.result()


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


def test_two_engines_in_one_process(tmp_path):
    kinds = ["threads", "threads"] if NO_URING else ["io_uring", "threads", "io_uring"]
    engines = [_native.IoEngine(kind, block_bytes=BLOCK) for kind in kinds]
    memories = [Memory(8 * BLOCK) for _ in engines]
    files = [add_file(engine, tmp_path) for engine in engines]
    for value, memory in enumerate(memories):
        memory.bytes.fill_(value + 1)
    everything = list(zip(engines, files, memories, strict=True))
    for op in [e.write(f, m.address, 8 * BLOCK, 0) for e, f, m in everything]:
        op.wait()
    for memory in memories:
        memory.bytes.zero_()
    engines[0].close()
    for value, (engine, file, memory) in enumerate(everything[1:], start=2):
        engine.read(file, memory.address, 8 * BLOCK, 0).wait()
        assert bool((memory.bytes == value).all())
        engine.close()


# Faults


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


# Arguments


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
    ]:
        with pytest.raises(ValueError, match=next(iter(options))):
            _native.IoEngine(kind, **options)
    with pytest.raises(ValueError, match="threads"):
        _native.IoEngine("threads", threads=0)
    with pytest.raises(ValueError, match="unknown I/O engine"):
        _native.IoEngine("aio")


# Files and lifetime


def test_remove_file_waits_and_closes(engine, tmp_path):
    memory = Memory(32 * BLOCK)
    before = len(os.listdir("/proc/self/fd"))
    file = add_file(engine, tmp_path)
    other = add_file(engine, tmp_path)
    ops = [engine.write(file, memory.address, 32 * BLOCK, 0) for _ in range(4)]
    engine.remove_file(file)
    assert all(op.done() for op in ops)
    for op in ops:
        op.wait()
    with pytest.raises(ValueError, match="no file"):
        engine.read(file, memory.address, 4096, 0)
    engine.write(other, memory.address, 4096, 0).wait()
    engine.remove_file(other)
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_files_than_the_kernel_table_has_room_for(engine, tmp_path):
    memory = Memory(4096)
    files = [add_file(engine, tmp_path) for _ in range(80)]
    assert len(set(files)) == 80
    for value, file in enumerate(files):
        memory.bytes.fill_(value)
        engine.write(file, memory.address, 4096, 0).wait()
    for value, file in enumerate(files):
        engine.read(file, memory.address, 4096, 0).wait()
        assert bool((memory.bytes == value).all())
        engine.remove_file(file)
    fresh = add_file(engine, tmp_path, 4096)
    engine.read(fresh, memory.address, 4096, 0).wait()
    assert not memory.bytes.any()


def stall(engine, milliseconds: int = 300) -> None:
    """Keeps the next read in flight for about that long: each retry pauses for a millisecond."""
    engine.inject("read", 0, error=errno.EAGAIN, count=milliseconds)


def test_close_fails_what_is_queued_and_waits_for_what_is_in_flight(kind, tmp_path):
    engine = _native.IoEngine(kind, queue_depth=1, block_bytes=BLOCK)
    memory = Memory(4 * BLOCK)
    file = add_file(engine, tmp_path, 4 * BLOCK)
    stall(engine)
    running = engine.read(file, memory.address, BLOCK, 0)
    queued = [engine.read(file, memory.address, BLOCK, 0) for _ in range(3)]
    assert not running.done()
    engine.close()
    assert running.done()
    running.wait()
    for op in queued:
        with pytest.raises(_native.NativeIoError) as caught:
            op.wait()
        assert caught.value.errno == errno.ECANCELED


def test_close_in_the_middle_of_an_operation(kind, tmp_path):
    engine = _native.IoEngine(kind, queue_depth=1, block_bytes=BLOCK)
    memory = Memory(4 * BLOCK)
    file = add_file(engine, tmp_path, 4 * BLOCK)
    stall(engine)
    op = engine.read(file, memory.address, 4 * BLOCK, 0)
    engine.close()
    with pytest.raises(_native.NativeIoError) as caught:
        op.wait()
    assert caught.value.errno == errno.ECANCELED
    assert caught.value.offset == BLOCK
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


def test_close_from_several_threads(kind, tmp_path):
    engine = _native.IoEngine(kind, queue_depth=2, block_bytes=BLOCK)
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
    assert not thread_names()


def test_nothing_is_left_after_close(kind, tmp_path):
    fds, threads = len(os.listdir("/proc/self/fd")), thread_names()
    for _ in range(10):
        engine = _native.IoEngine(kind, block_bytes=BLOCK)
        memory = Memory(8 * BLOCK)
        engine.register(memory.arena)
        file = add_file(engine, tmp_path, 8 * BLOCK)
        add_file(engine, tmp_path)
        op = engine.read(file, memory.address, 8 * BLOCK, 0)
        assert len(thread_names()) > len(threads)
        engine.close()
        assert op.done()
        assert len(os.listdir("/proc/self/fd")) == fds
        assert thread_names() == threads


def test_unclosed_engine_is_closed_with_its_object(kind, tmp_path):
    fds = len(os.listdir("/proc/self/fd"))
    engine = _native.IoEngine(kind, block_bytes=BLOCK)
    memory = Memory(64 * BLOCK)
    engine.write(add_file(engine, tmp_path), memory.address, 64 * BLOCK, 0)
    del engine
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert not thread_names()


def test_waiting_releases_the_gil(engine, tmp_path):
    memory = Memory(4096)
    file = add_file(engine, tmp_path, 4096)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    stall(engine)
    op = engine.read(file, memory.address, 4096, 0)
    begin = time.perf_counter()
    op.wait()
    end = time.perf_counter()
    stop.set()
    thread.join()
    assert end - begin > 0.1
    assert sum(begin < tick < end for tick in ticks) > 20


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
            for use in [op.wait, lambda: engine.read(file, arena.address, 4096, 0),
                        lambda: engine.stats, lambda: engine.unregister(arena)]:
                try:
                    use()
                except RuntimeError as error:
                    assert "belongs to process" in str(error)
                else:
                    os._exit(3)
            engine.close()
            own = _native.IoEngine({kind!r})
            own.read(own.add_file(fd, "scratch"), arena.address, 4096, 0).wait()
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


# Registered memory


def test_registered_arena_is_kept_and_cannot_be_discarded(kind, tmp_path):
    if kind == "threads":
        engine = _native.IoEngine(kind)
        memory = Memory(BLOCK)
        assert not engine.register(memory.arena)
        memory.arena.discard(0, BLOCK)
        engine.unregister(memory.arena)
        engine.close()
        return
    engine = _native.IoEngine(kind, block_bytes=BLOCK)
    memory = Memory(8 * MIB)
    assert engine.register(memory.arena)
    assert engine.register(memory.arena)
    with pytest.raises(RuntimeError, match="unregister it first"):
        memory.arena.discard(0, 4096)
    # The memory is still written to after its Python objects are gone.
    address, nbytes = memory.address, memory.arena.nbytes
    file = add_file(engine, tmp_path, nbytes)
    arena = memory.arena
    del memory, arena
    gc.collect()
    engine.read(file, address, nbytes, 0).wait()
    engine.close()


def test_unregister_waits_and_lets_go(engine, tmp_path):
    memory = Memory(64 * BLOCK)
    file = add_file(engine, tmp_path)
    memory.randomise()
    for _ in range(3):
        engine.register(memory.arena)
        op = engine.write(file, memory.address, 64 * BLOCK, 0)
        engine.unregister(memory.arena)
        if engine.kind == "io_uring":
            assert op.done()
        op.wait()
        memory.arena.discard(0, 4096)
    engine.unregister(memory.arena)
    engine.read(file, memory.address, 64 * BLOCK, 0).wait()
    assert not memory.bytes[:4096].any()


@needs_uring
def test_transfer_across_the_edge_of_registered_memory(tmp_path):
    engine = _native.IoEngine("io_uring", block_bytes=BLOCK)
    memories = sorted((Memory(4 * MIB) for _ in range(4)), key=lambda memory: memory.address)
    for memory in memories[::2]:
        assert engine.register(memory.arena)
    file = add_file(engine, tmp_path)
    for memory in memories:
        want = memory.randomise()
        engine.write(file, memory.address + 100, 4 * MIB - 100, 0).wait()
        memory.bytes.zero_()
        engine.read(file, memory.address + 100, 4 * MIB - 100, 0).wait()
        assert torch.equal(memory.bytes[100:], want[100:])
    engine.close()


@needs_uring
def test_locked_memory_limit_falls_back_to_plain_transfers(tmp_path):
    out = run_script(f"""
        import os, resource
        import torch
        from offload import _native
        fd = os.open({str(tmp_path)!r}, os.O_TMPFILE | os.O_RDWR)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)  # root is not limited
        engine = _native.IoEngine("io_uring")
        arena = _native.Arena(8 << 20)
        print(engine.register(arena))
        print(engine.notes)
        arena.discard(0, arena.nbytes)
        bytes_ = torch.from_dlpack(arena.export(0, arena.nbytes))
        file = engine.add_file(fd, "scratch")
        engine.write(file, bytes_.fill_(3).data_ptr(), arena.nbytes, 0).wait()
        engine.read(file, bytes_.zero_().data_ptr(), arena.nbytes, 0).wait()
        assert bool((bytes_ == 3).all())
        engine.close()
        """)
    registered, notes = out.splitlines()
    assert registered == "False"
    assert "registered buffers refused for 8388608 bytes" in notes
    assert "1048576 bytes" in notes


@needs_uring
@pytest.mark.slow
def test_arena_larger_than_one_kernel_buffer(tmp_path):
    nbytes = (1 << 30) + 4 * MIB
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() != 0 and limit not in (resource.RLIM_INFINITY, -1) and limit < nbytes:
        pytest.skip("the locked-memory limit is too small")
    engine = _native.IoEngine("io_uring", block_bytes=MIB)
    memory = Memory(nbytes)
    assert engine.register(memory.arena), engine.notes
    file = add_file(engine, tmp_path)
    # Blocks before, across and after the seam between the two kernel buffers.
    begin = (1 << 30) - 2 * MIB - 4096
    part = memory.bytes[begin : begin + 5 * MIB]
    want = part.random_(0, 256).clone()
    engine.write(file, memory.address + begin, 5 * MIB, 0).wait()
    part.zero_()
    engine.read(file, memory.address + begin, 5 * MIB, 0).wait()
    assert torch.equal(part, want)
    engine.close()


# A kernel that stops taking or giving


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
