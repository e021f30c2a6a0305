"""native/step_pipeline: file and RAM give the same bytes, and files the checksums of them."""

import ctypes
import errno
import itertools
import os

import numpy as np
import pytest

from offload import _native
from tests.support.native.step_tiles import (
    BYTES,
    SEGMENTS,
    TILE,
    FileTiles,
    Tiles,
    hypers,
    ram,
    train_in_ram,
    zig_zag,
)
from tests.support.waiting import until

PLACES = [(False, False), (True, False), (True, True)]
PAGE = 4096


def checksums(content: np.ndarray) -> bytes:
    begin = content.ctypes.data
    pages = [_native.crc32c(begin + at, PAGE) for at in range(0, content.nbytes, PAGE)]
    return np.array(pages, np.uint32).tobytes()


@pytest.mark.covering(2)
@pytest.mark.parametrize("buffers", [1, 3, 6])
@pytest.mark.parametrize(("param_in_file", "grad_in_file"), PLACES)
@pytest.mark.parametrize(("dtype", "grad_dtype"), [("bf16", "bf16"), ("fp16", "fp32")])
def test_file_and_ram_give_the_same_bytes(
    file_tiles: FileTiles,
    buffers: int,
    param_in_file: bool,
    grad_in_file: bool,
    dtype: str,
    grad_dtype: str,
) -> None:
    count, steps = 5, 4
    tiles = Tiles(count, dtype, grad_dtype)
    filed = file_tiles(tiles, buffers, param_in_file, grad_in_file, checksums=True)
    for step in range(1, steps + 1):
        filed.pipeline.submit(filed.tasks(zig_zag(count, step)), hypers(step, 0.5))
        filed.pipeline.wait_updated()
    # Zig-zag: each step begins with what the one before left in the buffers, and only what the
    # buffers do not hold is read, and written.
    hits = (steps - 1) * min(buffers, count)
    param_bytes = tiles.param_bytes if param_in_file else 0
    filed.pipeline.wait_written()
    written = steps * max(0, count - buffers) * tiles.optim_state_bytes
    written += steps * count * param_bytes
    assert filed.pipeline.stats["written_bytes"] == written == filed.engine.stats["written_bytes"]
    filed.pipeline.flush()
    written += min(buffers, count) * tiles.optim_state_bytes
    assert filed.pipeline.stats["written_bytes"] == written == filed.engine.stats["written_bytes"]
    filed.pipeline.flush()
    assert filed.engine.stats["written_bytes"] == written
    train_in_ram(tiles, steps, 0.5)
    assert filed.bytes() == tiles.bytes()

    read = (steps * count - hits) * (tiles.optim_state_bytes + param_bytes)
    read += steps * count * (tiles.grad_bytes if grad_in_file else 0)
    stats = filed.pipeline.stats
    assert stats["tasks"] == steps * count
    assert stats["hits"] == hits
    assert stats["read_bytes"] == read == filed.engine.stats["read_bytes"]
    assert stats["busy_s"] >= stats["compute_s"] > 0
    in_file = [(tiles.optim_states, filed.optim_state_at)]
    in_file += [(tiles.params, filed.param_at)] if param_in_file else []
    for array, offset in (pair for pairs in in_file for pair in zip(*pairs, strict=True)):
        assert filed.engine.checksums(filed.file, offset, array.nbytes) == checksums(array)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", ["threads"])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("rule", ["adam", "lion", "adagrad", "sgd", "muon"])
@pytest.mark.parametrize("dtype", BYTES)
def test_tasks_are_updates_of_the_segments(
    file_tiles: FileTiles, dtype: str, rule: str, state_dtype: str
) -> None:
    """In RAM and through buffers: the parts of an optimizer state are where the layout says."""
    of = (2, dtype, "bf16", rule, state_dtype)
    tiles, wanted = Tiles(*of), Tiles(*of)
    filed = file_tiles(tiles, buffers=1, param_in_file=True)
    kind = tiles.kind
    pipeline = _native.StepPipeline(None, 0, None, 0, kind, TILE, False, False)
    master_bytes = kind.state_at(0, 1)
    for step in range(1, 4):
        now = hypers(step, decoupled=rule not in ("adagrad", "sgd"))
        pipeline.submit(tiles.tasks_in_ram(range(2)), now)
        pipeline.wait_updated()
        filed.pipeline.submit(filed.tasks(range(2)), now)
        filed.pipeline.flush()
        for key, (first, numel, hyper, index) in itertools.product(range(2), SEGMENTS):
            optim_state = wanted.optim_states[key].ctypes.data
            _native.update(
                kind,
                wanted.params[key].ctypes.data + first * BYTES[dtype],
                wanted.grads[key].ctypes.data + first * 2,
                optim_state + first * master_bytes if master_bytes else 0,
                [
                    optim_state + kind.state_at(i, TILE) + kind.state_bytes(first)
                    for i in range(kind.states)
                ],
                numel,
                now[hyper],
                index,
            )
    pipeline.close()
    assert tiles.bytes() == wanted.bytes()
    assert filed.bytes() == wanted.bytes()


def test_a_payload_that_was_in_ram_is_not_taken_from_the_buffer(file_tiles: FileTiles) -> None:
    tiles = Tiles(1, "bf16", "bf16")
    filed = file_tiles(tiles, 1, param_in_file=True)
    filed.pipeline.submit(filed.tasks([0]), hypers(1))
    filed.pipeline.flush()
    # The parameter goes to RAM for one step and comes back to the file.
    param = np.frombuffer(filed.in_file(filed.params[0], 0 + filed.param_at[0]), np.uint16).copy()
    optim_state = _native.Location(file_offset=filed.optim_state_at[0])
    task = _native.StepTask(0, ram(param), ram(tiles.grads[0]), optim_state, SEGMENTS)
    filed.pipeline.submit([task], hypers(2))
    filed.pipeline.flush()
    os.pwrite(filed.fd, param.tobytes(), filed.param_at[0])
    filed.pipeline.submit(filed.tasks([0]), hypers(3))
    filed.pipeline.flush()
    train_in_ram(tiles, steps=3)
    assert filed.bytes() == tiles.bytes()


def test_content_of_tasks_that_do_not_come_again_makes_room(file_tiles: FileTiles) -> None:
    """Counted: tiles that are read and written in each step."""
    filed = file_tiles(Tiles(7, "bf16", "bf16"), 3)
    found, before = [], {"read_bytes": 0, "written_bytes": 0}
    for step, order in enumerate([[0, 1, 2], [3, 4, 5, 6], [5, 6], [0, 1, 2]], start=1):
        filed.pipeline.submit(filed.tasks(order), hypers(step))
        filed.pipeline.wait_updated()
        filed.pipeline.wait_written()
        stats = filed.pipeline.stats
        found.append(
            tuple((stats[name] - before[name]) / filed.tiles.optim_state_bytes for name in before)
        )
        before = {name: stats[name] for name in before}
    assert found == [(3, 0), (4, 4), (0, 0), (3, 3)]


def test_what_buffers_cannot_keep_is_written_when_it_is_updated(file_tiles: FileTiles) -> None:
    """And not when its buffer is needed: no task is given one while another one is staged."""
    filed = file_tiles(Tiles(4, "bf16", "bf16"), 3)
    filed.pipeline.hold(1)
    filed.pipeline.submit(filed.tasks(range(4)), hypers(1))
    until(lambda: filed.pipeline.stats["tasks"] == 1)
    assert filed.pipeline.stats["written_bytes"] == filed.tiles.optim_state_bytes
    filed.pipeline.release()
    filed.pipeline.wait_updated()
    assert filed.pipeline.stats["written_bytes"] == filed.tiles.optim_state_bytes


def test_where_all_content_is_wanted_what_is_wanted_last_goes(file_tiles: FileTiles) -> None:
    filed = file_tiles(Tiles(3, "bf16", "bf16"), 2)
    for step, order in enumerate([[0, 1], [2, 0, 2, 0, 1]], start=1):
        filed.pipeline.submit(filed.tasks(order), hypers(step))
        filed.pipeline.wait_updated()
        filed.pipeline.wait_written()
    assert filed.pipeline.stats["read_bytes"] == 4 * filed.tiles.optim_state_bytes


def test_a_key_is_waited_for_or_flushed_alone(file_tiles: FileTiles) -> None:
    tiles = Tiles(6, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=3, param_in_file=True)
    filed.pipeline.submit(filed.tasks(range(6)), hypers(1))
    train_in_ram(tiles, steps=1)
    for key in (2, 0, 5, 1):
        filed.pipeline.wait_written(key)
        param = tiles.params[key]
        assert filed.in_file(param, filed.param_at[key]) == param.tobytes()
    # The last three optimizer states are in buffers only.
    filed.pipeline.wait_written()
    for key, optim_state in enumerate(tiles.optim_states):
        assert (filed.in_file(optim_state, filed.optim_state_at[key]) == optim_state.tobytes()) == (
            key < 3
        )
    filed.pipeline.flush(4)
    for key, optim_state in enumerate(tiles.optim_states):
        assert (filed.in_file(optim_state, filed.optim_state_at[key]) == optim_state.tobytes()) == (
            key in (0, 1, 2, 4)
        )
    for key in (77, -1):  # 77 was never submitted
        filed.pipeline.wait_written(key)
        filed.pipeline.flush(key)
    assert filed.bytes() == tiles.bytes()


@pytest.mark.parametrize(("buffers", "in_flight"), [(1, 1), (3, 2), (8, 5)])
def test_the_next_tasks_are_read_while_an_update_is_computed(
    file_tiles: FileTiles, buffers: int, in_flight: int
) -> None:
    """Half of the buffers have reads ahead of the update, besides the one being updated."""
    tiles = Tiles(10, "bf16", "bf16")
    filed = file_tiles(tiles, buffers)
    filed.pipeline.hold(0)
    filed.pipeline.submit(filed.tasks(range(10)), hypers(1))
    until(lambda: filed.engine.stats["read_bytes"] == in_flight * tiles.optim_state_bytes)
    assert filed.pipeline.stats["tasks"] == 0
    filed.pipeline.release()
    filed.pipeline.flush()
    train_in_ram(tiles, steps=1)
    assert filed.bytes() == tiles.bytes()


def test_a_task_that_is_taken_back_leaves_those_before_it(file_tiles: FileTiles) -> None:
    """Its key is waited for as long as an earlier task of the same tile is under way."""
    tiles = Tiles(1, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=2, param_in_file=True)
    filed.pipeline.hold(0)
    filed.pipeline.submit(filed.tasks([0]), hypers(1))
    filed.pipeline.submit(filed.speculative([0]), hypers(2))
    # (While both are queued, none is taken back: which one is meant is not known.)
    until(lambda: filed.pipeline.take_back(0, 1))
    assert not filed.pipeline.is_updated(0)
    filed.pipeline.release()
    filed.pipeline.flush(0)
    assert filed.pipeline.stats["tasks"] == 1
    train_in_ram(tiles, steps=1)
    assert filed.bytes() == tiles.bytes()


def test_checksums_are_made_when_the_update_ends(file_tiles: FileTiles) -> None:
    """Not when the write is submitted, with the pipeline's lock held, which would stop all others.

    So a byte that changes in the buffer between the update and its write is not what was meant.
    """
    tiles = Tiles(1, "bf16", "bf16")
    filed = file_tiles(tiles, 2, checksums=True)
    pipeline, offset = filed.pipeline, filed.optim_state_at[0]
    pipeline.submit(filed.tasks([0]), hypers(1))
    pipeline.wait_updated()
    pipeline.wait_written()
    assert filed.engine.checksums(filed.file, offset, PAGE) == bytes(4)  # not written yet
    train_in_ram(tiles, 1)
    meant = tiles.optim_states[0]
    buffers = [filed.arena.address, filed.arena.address + filed.arena.nbytes // 2]
    (buffer,) = [at for at in buffers if ctypes.string_at(at, meant.nbytes) == meant.tobytes()]
    byte = ctypes.c_ubyte.from_address(buffer + PAGE + 7)
    byte.value ^= 1
    pipeline.flush()
    assert filed.engine.checksums(filed.file, offset, meant.nbytes) == checksums(meant)
    into = _native.Arena(meant.nbytes)
    with pytest.raises(OSError, match="is not what was written there") as caught:
        filed.engine.read(filed.file, into.address, meant.nbytes, offset).wait()
    assert caught.value.errno == errno.EBADMSG
