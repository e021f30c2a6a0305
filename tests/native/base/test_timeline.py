"""native/timeline: when the core's resources are busy."""

import os
import signal
import threading
import time

import pytest
import torch

from offload import _native
from tests.support.native.io_tools import MIB, Memory, Pipe, needs_uring


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


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
def test_an_operation_of_the_engine_is_one_interval(kind, tmp_path):
    engine = _native.IoEngine(kind, queue_depth=2, block_bytes=4096)
    arena = _native.Arena(MIB)
    sizes = [4096, 65536, 12288]
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(MIB)
        number = engine.add_file(file.fileno(), "file")

        def run():
            ops = [engine.write(number, arena.address, n, 0) for n in sizes]
            for op in ops:
                op.wait()
            engine.read(number, arena.address, 8192, 0).wait()
            engine.read(number, arena.address, 0, 0).wait()

        _, _, lanes, dropped = record(run)
    engine.close()
    assert dropped == 0
    assert lanes.keys() == {"nvme_read", "nvme_write"}
    assert sorted(i[2] for i in lanes["nvme_write"]) == sorted(sizes)
    assert [i[2] for i in lanes["nvme_read"]] == [8192]


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
def test_a_failed_operation_shows_what_it_moved(kind, tmp_path):
    engine = _native.IoEngine(kind, queue_depth=1, block_bytes=4096)
    arena = _native.Arena(MIB)
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(MIB)
        number = engine.add_file(file.fileno(), "file")
        engine.inject("write", 2, 5)

        def run():
            with pytest.raises(_native.NativeIoError):
                engine.write(number, arena.address, 5 * 4096, 0).wait()

        _, _, lanes, _ = record(run)
    engine.close()
    assert [i[2] for i in lanes["nvme_write"]] == [2 * 4096]


def test_an_update_is_one_interval():
    moved = []
    _, _, lanes, _ = record(lambda: moved.append(update()))
    assert [i[2] for i in lanes["update"]] == moved


@needs_uring
def test_what_began_before_counts_from_the_beginning_on():
    engine, memory = _native.IoEngine("io_uring", block_bytes=4096), Memory(2 * 4096)
    pipe = Pipe(engine)
    op = engine.read(pipe.file, memory.address, 2 * 4096, 0)
    pipe.feed_first(engine)

    def run():
        pipe.feed(4096)
        op.wait()

    begin, _, lanes, _ = record(run)
    pipe.close()
    engine.close()
    assert [i[0] for i in lanes["nvme_read"]] == [begin]


def test_times_are_those_of_perf_counter():
    before = time.perf_counter_ns()
    begin, end, lanes, _ = record(update)
    after = time.perf_counter_ns()
    assert before <= begin <= lanes["update"][0][0] <= end <= after


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
    stop = threading.Event()

    def note():
        while not stop.is_set():
            update(64)

    def run():
        for _ in range(20):  # at any moment of another thread, which notes all the time
            child = os.fork()
            if child == 0:
                _native.set_threads(1)
                signal.alarm(20)
                _, _, lanes, _ = record(update)
                os._exit(0 if set(lanes) == {"update"} else 1)
            assert os.waitpid(child, 0)[1] == 0

    thread = threading.Thread(target=note)
    thread.start()
    try:
        record(run)
    finally:
        stop.set()
        thread.join()
