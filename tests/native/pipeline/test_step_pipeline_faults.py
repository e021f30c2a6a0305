"""native/step_pipeline when things go wrong: a typed error for whoever waits, and nothing else."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from offload import _native
from tests.support.native.step_tiles import (
    LIMIT_S,
    SEGMENTS,
    TILE,
    FileTiles,
    Tiles,
    hypers,
    pipeline_threads,
    ram,
    train_in_ram,
    zig_zag,
)
from tests.support.waiting import until

BLOCK = 8192  # of the engine that Filed makes


def within(call: Callable[[], object]) -> None:
    """Calls it on a thread of its own, so that a wait for ever fails the test."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it waits for ever"
    if errors:
        raise errors[0]


@pytest.mark.covering(2)
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("nth", [0, 7, 28, 49])
def test_any_failed_block_ends_in_a_typed_error(
    file_tiles: FileTiles, tmp_path: Path, op: str, nth: int
) -> None:
    """Blocks of optimizer states and parameters alike: 6 a tile, 5 tiles, two steps."""
    tiles = Tiles(5, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=1, param_in_file=True)
    filed.engine.inject(op, nth, error=errno.EIO)
    with pytest.raises(_native.NativeIoError) as caught:
        for step in (1, 2):
            filed.pipeline.submit(filed.tasks(zig_zag(5, step)), hypers(step))
            within(filed.pipeline.wait_updated)
        within(filed.pipeline.flush)
    assert caught.value.errno == errno.EIO
    assert caught.value.op == op
    assert caught.value.filename == str(tmp_path / "file")
    for call in (
        filed.pipeline.wait_updated,
        filed.pipeline.wait_written,
        filed.pipeline.flush,
        filed.pipeline.forget,
        lambda: filed.pipeline.submit(filed.tasks([0]), hypers(9)),
    ):
        with pytest.raises(_native.NativeIoError):
            within(call)
    within(filed.pipeline.close)
    assert pipeline_threads() == []


def test_an_engine_closed_too_early_fails_the_wait(file_tiles: FileTiles) -> None:
    tiles = Tiles(5, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=2)
    filed.pipeline.hold(3)
    for step in range(1, 4):
        filed.pipeline.submit(filed.tasks(range(5)), hypers(step))
    until(lambda: filed.pipeline.stats["tasks"] == 3)
    filed.engine.close()
    filed.pipeline.release()
    # What was queued in the engine is cancelled, what comes later is refused.
    with pytest.raises((_native.NativeIoError, RuntimeError)):
        within(filed.pipeline.wait_updated)
    within(filed.pipeline.close)
    assert pipeline_threads() == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("fault", ["read", "write", "update"])
def test_a_pipeline_that_fails_leaves_another_on_the_engine_and_its_tiles_alone(
    file_tiles: FileTiles, kind: str, fault: str
) -> None:
    """Even keys are one pipeline's, odd keys another's: all optimizer states are neighbours in one
    file."""
    tiles = Tiles(8, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=2)
    shape = (tiles.kind, TILE, False, False)
    arena = _native.Arena(2 * _native.StepPipeline.buffer_bytes(*shape))
    other = _native.StepPipeline(filed.engine, filed.file, arena, 2, *shape)
    evens, odds = [0, 2, 4, 6], [1, 3, 5, 7]
    if fault == "update":
        filed.pipeline.inject(1)
    else:
        filed.engine.inject(fault, 3, error=errno.EIO)
    filed.pipeline.submit(filed.tasks(evens), hypers(1))
    with pytest.raises((_native.NativeIoError, RuntimeError)):
        within(filed.pipeline.wait_updated)
        within(filed.pipeline.flush)
    within(filed.pipeline.close)
    for step, order in ((1, odds), (2, odds[::-1])):
        other.submit(filed.tasks(order), hypers(step))
        within(other.wait_updated)
    within(other.flush)
    other.close()
    train_in_ram(tiles, steps=2)
    for key in odds:
        optim_state = tiles.optim_states[key]
        assert filed.in_file(optim_state, filed.optim_state_at[key]) == optim_state.tobytes()


def test_a_child_forked_with_tasks_in_flight_can_compute_and_end(file_tiles: FileTiles) -> None:
    tiles = Tiles(5, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=2)
    steps = 40
    for step in range(1, steps + 1):
        filed.pipeline.submit(filed.tasks(zig_zag(5, step)), hypers(step))
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (filed.pipeline.flush, lambda: filed.pipeline.inject(0)):
            try:
                call()
            except RuntimeError:
                refused += 1
        filed.pipeline.close()
        own = Tiles(3, "bf16", "bf16")
        train_in_ram(own, steps=2)  # by a pool of its own
        computed = own.bytes() != Tiles(3, "bf16", "bf16").bytes()
        os._exit(0 if refused == 2 and computed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    within(filed.pipeline.flush)
    train_in_ram(tiles, steps)
    assert filed.bytes() == tiles.bytes()


def test_an_optimizer_state_moved_without_forget_is_refused(file_tiles: FileTiles) -> None:
    tiles = Tiles(2, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=2, param_in_file=True)
    filed.pipeline.submit(filed.tasks([0]), hypers(1))
    filed.pipeline.wait_written()
    params = _native.Location(file_offset=filed.param_at[0])
    optim_state = ram(tiles.optim_states[0].copy())
    moved = _native.StepTask(0, params, ram(tiles.grads[0]), optim_state, SEGMENTS)
    filed.pipeline.submit([moved], hypers(2))
    with pytest.raises(RuntimeError, match="StepTask 0: its optimizer state was moved.*forget"):
        within(filed.pipeline.wait_updated)
