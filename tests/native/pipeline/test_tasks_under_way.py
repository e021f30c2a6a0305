"""native/step_pipeline: many small tiles under way at once, on more threads than one has blocks."""

import random

import pytest

from offload import _native
from tests.support.native.step_tiles import (
    KIND,
    TILE,
    FileTiles,
    Tiles,
    hypers,
    train_in_ram,
    zig_zag,
)
from tests.support.waiting import until

COUNT = 40
STEPS = 10


@pytest.fixture(autouse=True)
def more_threads_than_blocks() -> None:
    """The three segments of a tile are three blocks."""
    _native.set_threads(16)


def pipeline_in_ram() -> _native.StepPipeline:
    return _native.StepPipeline(None, 0, None, 0, KIND, TILE, False, False)


def train_one_by_one(tiles: Tiles, order: list[int], steps: int) -> None:
    """No task begins before the one before it has ended."""
    pipeline = pipeline_in_ram()
    for step in range(1, steps + 1):
        for key in order:
            pipeline.submit(tiles.tasks_in_ram([key]), hypers(step))
            pipeline.wait_updated()
    pipeline.close()


def params(tiles: Tiles) -> list[bytes]:
    return [param.tobytes() for param in tiles.params]


@pytest.mark.covering(1)
@pytest.mark.parametrize("buffers", [2, COUNT])
def test_many_tiles_in_the_file(file_tiles: FileTiles, buffers: int) -> None:
    tiles = Tiles(COUNT, "bf16", "bf16")
    filed = file_tiles(tiles, buffers, param_in_file=True, grad_in_file=True)
    steps = 4
    for step in range(1, steps + 1):
        filed.pipeline.submit(filed.tasks(zig_zag(COUNT, step)), hypers(step))
    filed.pipeline.flush()
    train_one_by_one(tiles, list(range(COUNT)), steps)
    assert filed.bytes() == tiles.bytes()
    # Tasks end in their order, so traffic does not depend on which is computed first.
    read = (steps * COUNT - (steps - 1) * buffers) * (tiles.optim_state_bytes + tiles.param_bytes)
    assert filed.pipeline.stats["read_bytes"] == read + steps * COUNT * tiles.grad_bytes
    assert filed.pipeline.stats["hits"] == (steps - 1) * buffers


def test_tasks_of_one_tile_come_one_after_the_other() -> None:
    order = [0] * 5 + [1, 0, 1, 1, 2, 0, 3, 2, 2, 0]
    tiles, wanted = Tiles(4, "bf16", "bf16"), Tiles(4, "bf16", "bf16")
    pipeline = pipeline_in_ram()
    steps = 10
    for step in range(1, steps + 1):
        pipeline.submit(tiles.tasks_in_ram(order), hypers(step))
    pipeline.wait_updated()
    pipeline.close()
    train_one_by_one(wanted, order, steps)
    assert tiles.bytes() == wanted.bytes()


def test_tasks_of_one_tile_in_ram_and_in_the_file(file_tiles: FileTiles) -> None:
    """A tile with all parts in RAM, whose tasks wait for no buffer, among others that do."""
    tiles = Tiles(6, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=3, param_in_file=True)
    wanted = Tiles(6, "bf16", "bf16")
    for step in range(1, 9):
        tasks = filed.tasks([0, 1, 2, 3]) + tiles.tasks_in_ram([4, 5, 4]) + filed.tasks([3, 0])
        filed.pipeline.submit(tasks, hypers(step))
    filed.pipeline.flush()
    train_one_by_one(wanted, [0, 1, 2, 3, 4, 5, 4, 3, 0], 8)
    for key in (0, 1, 2, 3):
        assert filed.in_file(tiles.params[key], filed.param_at[key]) == params(wanted)[key]
    assert params(tiles)[4:] == params(wanted)[4:]


def test_updates_before_one_that_is_held_end() -> None:
    """Also on one thread, where the updater alone computes."""
    for threads in (16, 1):
        _native.set_threads(threads)
        tiles = Tiles(COUNT, "bf16", "bf16")
        pipeline = pipeline_in_ram()
        pipeline.hold(COUNT - 2)
        pipeline.submit(tiles.tasks_in_ram(range(COUNT)), hypers(1))
        until(lambda pipeline=pipeline: pipeline.stats["tasks"] == COUNT - 2)
        assert pipeline.is_updated(COUNT - 3)
        assert not pipeline.is_updated(COUNT - 2)
        pipeline.release()
        pipeline.wait_updated()
        pipeline.close()


@pytest.mark.parametrize("nth", [0, 17])
def test_an_update_that_fails_ends_after_those_before_it(nth: int) -> None:
    tiles, wanted = Tiles(COUNT, "bf16", "bf16"), Tiles(COUNT, "bf16", "bf16")
    pipeline = pipeline_in_ram()
    pipeline.inject(nth)
    pipeline.submit(tiles.tasks_in_ram(range(COUNT)), hypers(1))
    again = tiles.tasks_in_ram([0])
    for call in (pipeline.wait_updated, pipeline.flush, lambda: pipeline.submit(again, hypers(2))):
        with pytest.raises(RuntimeError, match=f"the update of tile {nth} was made to fail"):
            call()
    assert pipeline.stats["tasks"] == nth
    pipeline.close()
    train_one_by_one(wanted, list(range(nth)), 1)
    assert tiles.bytes() == wanted.bytes()


def test_close_ends_what_is_under_way_and_begins_no_more() -> None:
    pause = random.Random(0)
    for _ in range(4):
        tiles, wanted = Tiles(COUNT, "bf16", "bf16"), Tiles(COUNT, "bf16", "bf16")
        pipeline = pipeline_in_ram()
        for step in range(1, STEPS + 1):
            pipeline.submit(tiles.tasks_in_ram(range(COUNT)), hypers(step))
        most = pause.randrange(STEPS * COUNT)
        until(lambda pipeline=pipeline, most=most: pipeline.stats["tasks"] >= most)
        pipeline.close()
        made = pipeline.stats["tasks"]
        if (left := STEPS * COUNT - made) > 0:
            with pytest.raises(RuntimeError, match=rf"closed before {left} submitted"):
                pipeline.wait_updated()
        steps, rest = divmod(made, COUNT)
        train_in_ram(wanted, steps)
        last = pipeline_in_ram()
        last.submit(wanted.tasks_in_ram(range(rest)), hypers(steps + 1))
        last.wait_updated()
        last.close()
        assert tiles.bytes() == wanted.bytes()


def test_a_task_without_segments_is_updated_at_once(file_tiles: FileTiles) -> None:
    tiles = Tiles(2, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=1)
    empty = filed.task(1, segments=[])
    before = filed.in_file(tiles.optim_states[1], filed.optim_state_at[1])
    filed.pipeline.submit([empty, *filed.tasks([0]), empty], hypers(1))
    filed.pipeline.flush()
    assert filed.pipeline.stats["tasks"] == 3
    assert filed.in_file(tiles.optim_states[1], filed.optim_state_at[1]) == before
