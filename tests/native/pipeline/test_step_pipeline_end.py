"""native/step_pipeline: how it ends, after a failure or closed, and what it refuses."""

import errno
import gc
import os
from pathlib import Path

import pytest

from offload import _native
from tests.support.native.step_tiles import (
    KIND,
    TILE,
    Filed,
    FileTiles,
    Tiles,
    hypers,
    pipeline_threads,
    ram,
    train_in_ram,
)
from tests.support.waiting import until


def test_the_last_writes_failure_is_not_lost(file_tiles: FileTiles) -> None:
    tiles = Tiles(1, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=1, param_in_file=True)
    filed.engine.inject("write", 0, error=errno.EIO)
    filed.pipeline.submit(filed.tasks([0]), hypers(1))
    until(lambda: filed.pipeline.stats["tasks"] == 1)
    filed.pipeline.close()
    with pytest.raises(_native.NativeIoError):
        filed.pipeline.wait_written(0)


def test_close_in_the_middle_leaves_every_tile_whole(file_tiles: FileTiles) -> None:
    made = 7
    tiles = Tiles(2, "bf16", "bf16")
    filed = file_tiles(tiles, buffers=1)
    filed.pipeline.hold(made)
    for step in range(1, 6):
        filed.pipeline.submit(filed.tasks([0, 1]), hypers(step))
    until(lambda: filed.pipeline.stats["tasks"] == made)
    filed.pipeline.close()
    filed.pipeline.close()
    assert pipeline_threads() == []
    with pytest.raises(RuntimeError, match="closed before"):
        filed.pipeline.wait_updated()
    with pytest.raises(RuntimeError, match="closed"):
        filed.pipeline.submit(filed.tasks([0]), hypers(1))
    # Every update that was made is whole: in RAM, and in the file but for the state that only the
    # buffer had. That is older by one update, never torn.
    assert filed.pipeline.stats["tasks"] == made
    pipeline = _native.StepPipeline(None, 0, None, 0, KIND, TILE, False, False)
    older = tiles.optim_states[(made - 1) % 2].copy()
    for task in range(made):
        older = tiles.optim_states[task % 2].copy()
        pipeline.submit(tiles.tasks_in_ram([task % 2]), hypers(task // 2 + 1))
        pipeline.wait_updated()
    pipeline.close()
    if filed.bytes() != tiles.bytes():
        tiles.optim_states[(made - 1) % 2][:] = older
        assert filed.bytes() == tiles.bytes()


def test_close_of_an_idle_pipeline_lets_waits_return() -> None:
    tiles = Tiles(1, "fp32", "fp32")
    pipeline = _native.StepPipeline(
        None, 0, None, 0, _native.UpdateKind("fp32", "fp32"), TILE, False, False
    )
    pipeline.submit(tiles.tasks_in_ram([0]), hypers(1))
    pipeline.wait_updated()
    pipeline.close()
    pipeline.wait_updated()
    pipeline.wait_written()
    with pytest.raises(RuntimeError, match="closed"):
        pipeline.submit(tiles.tasks_in_ram([0]), hypers(2))


def test_the_pipeline_keeps_engine_and_arena_alive(tmp_path: Path, kind: str) -> None:
    tiles = Tiles(3, "bf16", "bf16")
    filed = Filed(tiles, tmp_path / "file", kind, buffers=2)
    pipeline = filed.pipeline
    tasks = filed.tasks(range(3))
    del filed.engine, filed.arena
    gc.collect()
    pipeline.submit(tasks, hypers(1))
    pipeline.flush()
    train_in_ram(tiles, steps=1)
    assert filed.bytes() == tiles.bytes()
    pipeline.submit(tasks, hypers(2))
    del filed.pipeline, pipeline  # the destructor closes
    assert pipeline_threads() == []
    os.close(filed.fd)


def test_bad_pipelines_are_refused() -> None:
    shape = (KIND, TILE, False, False)
    assert _native.StepPipeline.buffer_bytes(*shape) == 10 * TILE
    for names, nbytes in [
        (("fp32", "fp32"), 16),
        (("fp16", "bf16"), 16),
        (("bf16", "bf16", "lion", "bf16"), 8),
    ]:
        kind = _native.UpdateKind(*names)
        assert _native.StepPipeline.buffer_bytes(kind, TILE, True, True) == nbytes * TILE
    for numel in (0, 1000, TILE + 1):
        with pytest.raises(ValueError, match=f"tile_numel is {numel}"):
            _native.StepPipeline.buffer_bytes(KIND, numel, False, False)
    engine, arena = _native.IoEngine("threads"), _native.Arena(10 * TILE)
    with pytest.raises(ValueError, match="2 buffers of 40960 bytes"):
        _native.StepPipeline(engine, 0, arena, 2, *shape)
    with pytest.raises(ValueError, match="buffers is 0"):
        _native.StepPipeline(engine, 0, arena, 0, *shape)
    with pytest.raises(ValueError, match="arena"):
        _native.StepPipeline(engine, 0, None, 1, *shape)
    with pytest.raises(TypeError):
        _native.StepPipeline(None, 0, None, 0, None, TILE, False, False)
    engine.close()


def test_bad_tasks_are_refused_and_nothing_is_queued() -> None:
    tiles = Tiles(1, "bf16", "bf16")
    engine, arena = _native.IoEngine("threads"), _native.Arena(10 * TILE)
    pipeline = _native.StepPipeline(engine, 0, arena, 1, KIND, TILE, False, False)
    no_engine = _native.StepPipeline(None, 0, None, 0, KIND, TILE, False, False)
    lion = _native.StepPipeline(
        None, 0, None, 0, _native.UpdateKind("bf16", "bf16", "lion"), TILE, False, False
    )
    param, grad, optim_state = ram(tiles.params[0]), ram(tiles.grads[0]), ram(tiles.optim_states[0])
    filed = _native.Location(file_offset=8192)

    def task(
        key=3, param=param, grad=grad, optim_state=optim_state, segments=((0, TILE, 0, 0),), to=()
    ):
        return _native.StepTask(key, param, grad, optim_state, segments, 0, *to)

    before = tiles.bytes()
    for bad, fact in [
        (task(key=-1), "key"),
        (task(param=_native.Location()), "param has neither"),
        (task(grad=_native.Location(64, 4096)), "grad has both"),
        (task(optim_state=_native.Location(file_offset=100)), "100 is not a multiple of 4096"),
        (task(param=filed), "no room"),
        (task(segments=[(1, TILE, 0, 0)]), "outside the tile of 4096"),
        (task(segments=[(0, TILE + 1, 0, 0)]), "outside"),
        (task(segments=[(10, 10, 0, 0), (0, 11, 0, 0)]), "overlaps"),
        (task(segments=[(0, 10, 2, 0)]), "hyper-parameters 2 of 2"),
        (task(to=(8192, -1)), "optim_state_to is for an optim_state in the file"),
        (task(to=(-1, 8192)), "param_to is for a param in the file"),
    ]:
        with pytest.raises(ValueError, match=rf"StepTask (3|-1): .*{fact}"):
            pipeline.submit([task(), bad], hypers(1))
    with pytest.raises(ValueError, match="no engine"):
        no_engine.submit([task(optim_state=filed)], hypers(1))
    with pytest.raises(ValueError, match="decoupled"):
        lion.submit([task()], hypers(1, decoupled=False))
    kind = _native.UpdateKind("bf16", "bf16", "adam", "8bit")
    in_blocks = _native.StepPipeline(None, 0, None, 0, kind, TILE, False, False)
    with pytest.raises(ValueError, match="begins inside a state block of 64 elements"):
        in_blocks.submit([task(segments=[(32, 10, 0, 0)])], hypers(1))
    pipeline.flush()
    assert pipeline.stats["tasks"] == 0
    assert tiles.bytes() == before
    for closing in (pipeline, no_engine, lion, in_blocks, engine):
        closing.close()
