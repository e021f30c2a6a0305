"""native/timeline: when the core's resources are busy."""

import errno
import threading
import time

import pytest
import torch

from offload import _native
from tests.support.native.io_tools import (
    MIB,
    Memory,
    add_file,
    error_of,
    needs_uring,
    run_script,
)


def by_lane(intervals):
    found = {}
    for lane, *rest in intervals:
        found.setdefault(lane, []).append(tuple(rest))
    return found


def record(run, capacity=1000):
    """(begin, end, intervals by lane, dropped) while `run` runs."""
    _native.start_timeline(capacity)
    try:
        run()
    finally:
        begin, end, intervals, dropped = _native.stop_timeline()
    for _, first, last, _ in intervals:
        assert begin <= first <= last <= end
    assert [i[2] for i in intervals] == sorted(i[2] for i in intervals)
    return begin, end, by_lane(intervals), dropped


def update(numel=1000):
    arrays = [torch.zeros(numel) for _ in range(4)]
    param, grad, *states = (a.data_ptr() for a in arrays)
    kind = _native.UpdateKind("fp32", "fp32")
    _native.update(kind, param, grad, 0, states, numel, _native.Hyper(lr=1e-3))
    return kind.bytes_moved(numel)


def test_an_operation_of_the_engine_is_one_interval(make_engine, tmp_path):
    """Of what it moved, where it failed."""
    engine = make_engine(queue_depth=1, block_bytes=4096)
    memory, sizes = Memory(MIB), [4096, 65536, 12288]
    file = add_file(engine, tmp_path, MIB)

    def run():
        for op in [engine.write(file, memory.address, n, 0) for n in sizes]:
            op.wait()
        engine.read(file, memory.address, 8192, 0).wait()
        engine.read(file, memory.address, 0, 0).wait()
        engine.inject("read", 2, errno.EIO)
        assert error_of(engine.read(file, memory.address, 5 * 4096, 0)).errno == errno.EIO

    _, _, lanes, dropped = record(run)
    assert dropped == 0
    assert lanes.keys() == {"nvme_read", "nvme_write"}
    assert sorted(i[2] for i in lanes["nvme_write"]) == sorted(sizes)
    assert [i[2] for i in lanes["nvme_read"]] == [8192, 2 * 4096]


def test_an_update_is_one_interval():
    moved = []
    _, _, lanes, _ = record(lambda: moved.append(update()))
    assert [i[2] for i in lanes["update"]] == moved


@needs_uring
def test_what_began_before_counts_from_the_beginning_on(piped):
    (engine, pipe), memory = piped(8), Memory(2 * 4096)
    op = engine.read(pipe.file, memory.address, 2 * 4096, 0)
    pipe.feed_first(engine)

    def run():
        pipe.feed(4096)
        op.wait()

    begin, _, lanes, _ = record(run)
    assert [i[0] for i in lanes["nvme_read"]] == [begin]


def test_what_finds_no_room_is_counted():
    _, _, lanes, dropped = record(lambda: [update() for _ in range(5)], capacity=3)
    assert len(lanes["update"]) == 3
    assert dropped == 2


def test_nothing_is_kept_while_nobody_records():
    update()
    _, _, lanes, dropped = record(lambda: None)
    update()
    assert lanes == {}
    assert dropped == 0


def test_one_recording_at_a_time():
    with pytest.raises(RuntimeError, match="no timeline is being recorded"):
        _native.stop_timeline()
    _native.start_timeline(10)
    with pytest.raises(RuntimeError, match="recorded already"):
        _native.start_timeline(10)
    _native.stop_timeline()


def test_recordings_begin_and_end_while_others_note():
    stop = threading.Event()

    def work():
        while not stop.is_set():
            update(64)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    found = 0
    deadline = time.monotonic() + 30
    try:
        while found < 100 and time.monotonic() < deadline:
            _, _, lanes, _ = record(lambda: time.sleep(0.001), capacity=50)
            found += len(lanes.get("update", []))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert found >= 100


def test_a_forked_child_has_no_recording_and_may_make_its_own():
    """In a small process, of which a fork takes no time."""
    out = run_script("""
        import ctypes, os, signal, threading, warnings
        from offload import _native
        warnings.simplefilter("ignore")  # Python's own about threads and fork
        kind, hyper = _native.UpdateKind("fp32", "fp32"), _native.Hyper(lr=1e-3)

        def update():
            arrays = (ctypes.c_float * 256)()
            param, grad, *states = (ctypes.addressof(arrays) + 256 * i for i in range(4))
            _native.update(kind, param, grad, 0, states, 64, hyper)

        def note():
            while not stop.is_set():
                update()

        stop, thread = threading.Event(), threading.Thread(target=note)
        thread.start()
        _native.start_timeline(1000)
        for _ in range(40):  # at any moment of another thread, which notes all the time
            child = os.fork()
            if child == 0:
                _native.set_threads(1)
                signal.alarm(20)
                _native.start_timeline(1000)
                update()
                _, _, intervals, _ = _native.stop_timeline()
                os._exit(0 if {lane for lane, *_ in intervals} == {"update"} else 1)
            if os.waitpid(child, 0)[1] != 0:
                break
        else:
            print("all could")
        stop.set()
        thread.join()
        _native.stop_timeline()
        """)
    assert out == "all could\n"
