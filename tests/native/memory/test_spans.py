"""native/memory: what a transfer holds of an arena until it is done, with a handle or without."""

import errno
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from offload import _native
from tests.support.native.io_tools import (
    BLOCK,
    Memory,
    add_file,
    error_of,
    hold,
    needs_uring,
    stall,
)
from tests.support.waiting import in_time

SLOT = 2 * BLOCK


@pytest.fixture
def slots():
    return _native.Arena(8 * SLOT, SLOT)


def test_a_transfer_counts_in_the_slots_that_it_uses(engine, slots, tmp_path):
    file = add_file(engine, tmp_path, 8 * SLOT)
    assert len(slots.transfers) == 8
    stall(engine, 50)
    reads = [
        engine.read(file, slots.address + SLOT - 4096, 4096, 0),
        engine.read(file, slots.address + SLOT - 4096, 4096, 0),
        engine.write(file, slots.address + 4 * SLOT - 4096, SLOT + 2 * 4096, 0),
        engine.read(file, 0, 0, 0),
    ]
    for op in reads:
        op.wait()
        assert op.done()
    assert slots.transfers.in_use() == []


def test_the_count_falls_when_the_transfer_is_done(make_engine, slots, tmp_path):
    engine = make_engine(queue_depth=1)
    file = add_file(engine, tmp_path, 8 * SLOT)
    hold(engine)  # so that the others wait
    running = engine.read(file, slots.address, 4096, 0)
    queued = engine.write(file, slots.address + 2 * SLOT - 4096, SLOT, 0)
    again = engine.read(file, slots.address + 2 * SLOT, 4096, 0)
    assert slots.transfers.in_use() == [0, 1, 2]
    assert [slots.transfers[slot] for slot in range(4)] == [1, 1, 2, 0]
    queued.cancel()
    assert [slots.transfers[slot] for slot in range(4)] == [1, 0, 1, 0]
    running.cancel()
    with pytest.raises(_native.NativeIoError):
        running.wait()
    del again
    assert slots.transfers.in_use() == []


def test_a_refused_transfer_counts_nothing(engine, slots, tmp_path):
    file = add_file(engine, tmp_path, 4096)
    with pytest.raises(ValueError, match="no file"):
        engine.read(77, slots.address, 4096, 0)
    with pytest.raises(ValueError, match="outside an arena"):
        engine.read(file, slots.address + 7 * SLOT, 2 * SLOT, 0)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.read(file, slots.address, 4096, 0)
    assert slots.transfers.in_use() == []


def test_a_lost_handle_ends_its_transfer(make_engine, slots, tmp_path):
    engine = make_engine(queue_depth=1)
    file = add_file(engine, tmp_path, 8 * SLOT)
    hold(engine)
    engine.read(file, slots.address, 4 * SLOT, 0)  # lost at once
    assert slots.transfers.in_use() == []
    assert engine.stats["in_flight"] == 0


@needs_uring
def test_a_lost_handle_waits_without_the_gil(piped, slots):
    engine, pipe = piped(2)
    held = [engine.read(pipe.file, slots.address, 4 * 4096, 0)]
    pipe.feed_first(engine)

    def feed():
        assert slots.transfers.in_use() == [0]
        pipe.feed(3 * 4096)

    with ThreadPoolExecutor(1) as pool:
        feeder = pool.submit(feed)
        held.clear()  # waits for the feeder, who needs the GIL
        feeder.result()
    assert slots.transfers.in_use() == []


def test_memory_outlives_an_arena_that_is_transferred(make_engine, tmp_path):
    engine = make_engine(queue_depth=1)
    file = add_file(engine, tmp_path, SLOT)
    memory = Memory(SLOT)
    counts, address = memory.arena.transfers, memory.address
    hold(engine)
    op = engine.read(file, address, SLOT, 0)
    del memory
    gc.collect()
    assert counts[0] == 1
    op.cancel()
    assert error_of(op).errno == errno.ECANCELED
    assert counts[0] == 0
    with pytest.raises(ValueError, match="in no arena"):
        engine.read(file, address, SLOT, 0)


def test_memory_of_others_is_an_arena_too(engine, tmp_path):
    file = add_file(engine, tmp_path, 4096)
    outer = _native.Arena(2 * SLOT)
    inner = _native.Arena.over(outer.address + SLOT, SLOT, 1, 0, outer, 4096)
    engine.read(file, inner.address, 4096, 0).wait()
    assert (len(inner.transfers), len(outer.transfers)) == (SLOT // 4096, 1)
    del inner
    engine.read(file, outer.address + SLOT - 4096, 4096, 0).wait()
    assert in_time(lambda: outer.transfers.in_use(), []) == []
