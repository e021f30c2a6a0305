"""native/step_pipeline: what is read ahead of tasks, and what is kept meanwhile."""

import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from offload import _native
from tests.support.native.io_tools import Memory, Pipe, needs_uring
from tests.support.native.step_tiles import (
    TILE,
    Filed,
    FileTiles,
    Tiles,
    hypers,
    ram,
    train_in_ram,
    zig_zag,
)
from tests.support.waiting import until


def expected(
    filed: Filed, order: Sequence[int], priority: Mapping[int, int] = MappingProxyType({})
) -> list[tuple]:
    """What is to be read ahead for filed.tasks(order)."""
    return [
        (
            key,
            _native.Location(file_offset=filed.param_at[key])
            if filed.param_in_file
            else ram(filed.params[key]),
            _native.Location(file_offset=filed.optim_state_at[key]),
            priority.get(key, 0),
        )
        for key in order
    ]


@pytest.mark.covering(2)
@pytest.mark.parametrize("buffers", [1, 3, 8])
@pytest.mark.parametrize("param_in_file", [False, True])
def test_reads_ahead_as_many_as_there_are_buffers(
    file_tiles: FileTiles, buffers: int, param_in_file: bool
) -> None:
    """Nothing is read twice, and what buffers keep from the last step is not read at all."""
    count, steps = 5, 4
    tiles = Tiles(count, "bf16", "bf16")
    filed = file_tiles(tiles, buffers, param_in_file)
    each = tiles.optim_state_bytes + (tiles.param_bytes if param_in_file else 0)
    ahead = min(buffers, count)
    for step in range(1, steps + 1):
        order = zig_zag(count, step)
        before = filed.pipeline.stats["read_bytes"]
        filed.pipeline.expect(expected(filed, order))
        read = ahead * each if step == 1 else 0
        until(lambda read=read, before=before: filed.engine.stats["read_bytes"] == before + read)
        filed.pipeline.submit(filed.tasks(order), hypers(step))
        filed.pipeline.wait_updated()
        missed = count if step == 1 else count - ahead
        assert filed.pipeline.stats["read_bytes"] == before + missed * each
    stats = filed.pipeline.stats
    assert (stats["ahead"], stats["hits"]) == (ahead, (steps - 1) * ahead)
    filed.pipeline.flush()
    train_in_ram(tiles, steps)
    assert filed.bytes() == tiles.bytes()


@pytest.mark.covering(2)
@pytest.mark.parametrize("streaming", [1, 3])
@pytest.mark.parametrize("buffers", [1, 5, 12])
@pytest.mark.parametrize("param_in_file", [False, True])
def test_an_order_that_stays_the_same_keeps_its_end(
    file_tiles: FileTiles, streaming: int, buffers: int, param_in_file: bool
) -> None:
    """Tasks come one by one: all but `streaming` buffers keep their tiles from step to step."""
    count, steps = 10, 4
    tiles = Tiles(count, "bf16", "bf16")
    filed = file_tiles(tiles, buffers, param_in_file)
    random = np.random.default_rng(buffers)
    written = []
    for step in range(1, steps + 1):
        filed.pipeline.expect(expected(filed, range(count)), streaming)
        for key in range(count):
            if random.random() < 0.3:
                time.sleep(0.002)  # the traffic must not depend on when they come
            filed.pipeline.submit(filed.tasks([key]), hypers(step))
        filed.pipeline.wait_updated()
        filed.pipeline.wait_written()
        written.append(filed.pipeline.stats["written_bytes"])
        if step > 1:
            params = count * tiles.param_bytes if param_in_file else 0
            lacking = max(0, count - buffers)
            missed = min(count, lacking + min(streaming, lacking))
            assert written[-1] - written[-2] == missed * tiles.optim_state_bytes + params
    filed.pipeline.flush()
    train_in_ram(tiles, steps)
    assert filed.bytes() == tiles.bytes()


def test_what_is_due_first_is_kept(file_tiles: FileTiles) -> None:
    """Whatever its place in the order, and whatever comes between."""
    tiles = Tiles(10, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=5)
    order = [9, 8, 1, 7, 2, 6, 0, 5, 4, 3]
    priority = {key: key for key in order}
    for step in range(1, 5):
        filed.pipeline.expect(expected(filed, order, priority), streaming=2)
        filed.pipeline.expect([], streaming=2)  # which lets go of nothing
        filed.pipeline.wait_written()
        before = dict(filed.pipeline.stats)
        filed.pipeline.submit(filed.tasks([1, 2, 0]), hypers(step))
        filed.pipeline.wait_updated()
        if step > 1:
            assert filed.pipeline.stats["read_bytes"] == before["read_bytes"]
        filed.pipeline.submit(filed.tasks([9, 8, 7, 6, 5, 4, 3]), hypers(step))
        filed.pipeline.wait_updated()
        filed.pipeline.wait_written()
        after = filed.pipeline.stats
        assert after["written_bytes"] - before["written_bytes"] == 7 * tiles.optim_state_bytes
    filed.pipeline.expect([])  # an order that alternates: they are as any others
    filed.pipeline.submit(filed.tasks(order), hypers(5))
    filed.pipeline.wait_updated()
    filed.pipeline.flush()
    train_in_ram(tiles, 5)
    assert filed.bytes() == tiles.bytes()


def test_reading_ahead_is_given_up(file_tiles: FileTiles) -> None:
    """forget() drops what was read ahead, and reads no more: the file may be written behind it."""
    tiles = Tiles(4, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=4)
    filed.pipeline.expect(expected(filed, range(4)))
    filed.pipeline.forget()
    read = filed.engine.stats["read_bytes"]
    tiles.optim_states[2][:] = tiles.optim_states[1]
    os.pwrite(filed.fd, tiles.optim_states[2].tobytes(), filed.optim_state_at[2])
    # The thread that reads ahead looks for more as it takes any task, and before it sleeps again.
    in_ram = Tiles(1, "bf16", "bf16")
    filed.pipeline.submit(in_ram.tasks_in_ram([0]), hypers(1))
    filed.pipeline.wait_updated()
    assert filed.engine.stats["read_bytes"] == read
    assert filed.engine.stats["in_flight"] == 0
    filed.pipeline.submit(filed.tasks(range(4)), hypers(1))
    filed.pipeline.flush()
    assert filed.pipeline.stats["ahead"] == 0
    train_in_ram(tiles, 1)
    assert filed.bytes() == tiles.bytes()


def test_a_failed_read_ahead_is_made_again(file_tiles: FileTiles) -> None:
    """Where its task has not come for it: nothing depended on it."""
    tiles = Tiles(2, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=2)
    filed.engine.inject("read", 0, error=errno.EIO)
    filed.pipeline.expect(expected(filed, [0]))
    until(lambda: filed.engine.stats["errors"] == 1)
    until(lambda: filed.engine.stats["in_flight"] == 0)
    filed.pipeline.wait_written()
    filed.pipeline.submit(filed.tasks(range(2)), hypers(1))
    filed.pipeline.flush()
    train_in_ram(tiles, 1)
    assert filed.bytes() == tiles.bytes()


@pytest.mark.parametrize("kind", ["threads"])
def test_expectations_are_checked(file_tiles: FileTiles) -> None:
    tiles = Tiles(1, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=1)
    place = _native.Location(file_offset=filed.optim_state_at[0])
    with pytest.raises(ValueError, match="no room for it"):
        filed.pipeline.expect([(0, place, place, 0)])
    with pytest.raises(ValueError, match="at least 0"):
        filed.pipeline.expect([(-1, ram(tiles.params[0]), place, 0)])
    with pytest.raises(ValueError, match="not a multiple of 4096"):
        filed.pipeline.expect([(0, ram(tiles.params[0]), _native.Location(file_offset=12), 0)])
    filed.pipeline.expect(
        [(0, ram(tiles.params[0]), ram(tiles.optim_states[0]), 0)]
    )  # nothing to read
    filed.pipeline.close()
    with pytest.raises(RuntimeError, match="closed"):
        filed.pipeline.expect([])
    assert filed.engine.stats["read_bytes"] == 0


@pytest.mark.parametrize("kind", ["threads"])
def test_updates_of_one_key_can_be_waited_for(file_tiles: FileTiles) -> None:
    tiles = Tiles(3, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=2)
    filed.pipeline.submit(filed.tasks(range(3)), hypers(1))
    filed.pipeline.wait_updated(1)
    train_in_ram(tiles, 1)
    for key in (0, 1):
        assert filed.params[key].tobytes() == tiles.params[key].tobytes()


@needs_uring
@pytest.mark.parametrize("kind", ["io_uring"])
def test_what_can_wait_is_transferred_after_all_else(tmp_path: Path, kind: str) -> None:
    """Another read is behind the block in flight alone, however much is to be read ahead.

    The pipeline's file is a pipe: a read of it lasts until the test writes a block. (Only io_uring
    reads pipes at an offset; which operation comes next is decided above the engines.)
    """
    block = 4096
    tiles = Tiles(8, "bf16", "bf16")
    filed = Filed(tiles, tmp_path / "file", kind, buffers=8)
    engine = _native.IoEngine(kind, queue_depth=1, block_bytes=block)
    reads_end, writes_end = os.pipe()
    shape = (tiles.kind, TILE, False, False)
    arena = _native.Arena(8 * _native.StepPipeline.buffer_bytes(*shape))
    pipe = engine.add_file(reads_end, "pipe")
    pipeline = _native.StepPipeline(engine, pipe, arena, 8, *shape)
    pipeline.expect(expected(filed, range(8)))
    until(lambda: engine.stats["in_flight"] == 1)
    other = _native.Arena(block)
    read = engine.read(engine.add_file(filed.fd, "file"), other.address, block, 0)
    os.write(writes_end, bytes(block))
    until(read.done)
    read.wait()
    assert engine.stats["read_bytes"] == 2 * block
    os.close(writes_end)  # which ends all reads of the pipe, with an error
    pipeline.close()
    engine.close()
    os.close(reads_end)
    filed.close()


@needs_uring
def test_an_update_that_is_waited_for_goes_before_reads_ahead(tmp_path: Path) -> None:
    """There are always more reads ahead than the engine has in flight: in its own turn the update
    would never begin."""
    tiles = Tiles(1, "bf16", "bf16")
    filed = Filed(tiles, tmp_path / "file", "io_uring", 1)
    memory, pipe = Memory(4096), Pipe(filed.engine)

    def read_ahead() -> object:
        return filed.engine.read(pipe.file, memory.address, 4096, 0, soon=True)

    ahead = [read_ahead() for _ in range(12)]
    filed.pipeline.submit(filed.tasks([0]), hypers(1))
    waiter = threading.Thread(target=filed.pipeline.wait_updated, daemon=True)
    waiter.start()

    def is_updated() -> bool:
        for i, op in enumerate(ahead):
            if op.done():
                ahead[i] = read_ahead()
                pipe.feed(4096)
        return filed.pipeline.is_updated()

    pipe.feed(4096)
    until(is_updated)
    waiter.join()
    pipe.feed(4096 * 12)
    for op in ahead:
        op.wait()
    filed.pipeline.flush()
    train_in_ram(tiles, 1)
    assert filed.bytes() == tiles.bytes()
    pipe.close()
    filed.close()
