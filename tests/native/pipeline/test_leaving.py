"""native/step_task: an update leaves those parts of the file as they are that it is to leave."""

from collections.abc import Iterator

import numpy as np
import pytest

from offload import _native
from tests.support.native.step_tiles import (
    SEGMENTS,
    Filed,
    FileTiles,
    Tiles,
    hypers,
    ram,
    train_in_ram,
)

_COUNT = 3


def tasks(
    filed: Filed, leaves_state: bool, leaves_param: bool, state_in_file: bool = True
) -> Iterator[_native.StepTask]:
    """Updates of all tiles to where spare_..._at say, of the parts that are left."""
    for key in range(filed.tiles.count):
        param, optim_state = ram(filed.params[key]), ram(filed.tiles.optim_states[key])
        if filed.param_in_file:
            param = _native.Location(file_offset=filed.param_at[key])
        if state_in_file:
            optim_state = _native.Location(file_offset=filed.optim_state_at[key])
        to = (
            filed.spare_optim_state_at[key] if leaves_state else -1,
            filed.spare_param_at[key] if leaves_param else -1,
        )
        grad = ram(filed.tiles.grads[key])
        yield _native.StepTask(key, param, grad, optim_state, SEGMENTS, 0, *to)


def committed(filed: Filed) -> list[bytes]:
    """What is in the file before the update, by tile: the optimizer states, then the parameters."""
    tiles = filed.tiles
    states = zip(tiles.optim_states, filed.optim_state_at, strict=True)
    params = zip(filed.params, filed.param_at, strict=True)
    return [filed.in_file(*pair) for pair in (*states, *params)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("buffers", [1, 2, 6])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    ("param_in_file", "leaves_state", "leaves_param"),
    [(True, True, True), (True, True, False), (True, False, True), (False, True, False)],
)
def test_the_file_keeps_what_is_left(
    file_tiles: FileTiles,
    param_in_file: bool,
    leaves_state: bool,
    leaves_param: bool,
    steps_before: int,
    buffers: int,
) -> None:
    """Also what was, before the update, in a buffer alone."""
    tiles = Tiles(_COUNT, "bf16", "bf16")
    filed = file_tiles(tiles, buffers, param_in_file)
    for step in range(1, steps_before + 1):
        filed.pipeline.submit(filed.tasks(range(_COUNT)), hypers(step))
        filed.pipeline.wait_updated()
    train_in_ram(tiles, steps=steps_before)
    wanted = [array.tobytes() for array in tiles.optim_states + tiles.params]
    filed.pipeline.submit(list(tasks(filed, leaves_state, leaves_param)), hypers(steps_before + 1))
    filed.pipeline.flush()
    found = committed(filed)
    if leaves_state:
        assert found[:_COUNT] == wanted[:_COUNT]
        filed.optim_state_at = filed.spare_optim_state_at
    if leaves_param:
        assert found[_COUNT:] == wanted[_COUNT:]
        filed.param_at = filed.spare_param_at
    # The rest of the oracle: one more step with the same numbers.
    pipeline = _native.StepPipeline(
        None, 0, None, 0, tiles.kind, len(tiles.params[0]), False, False
    )
    pipeline.submit(tiles.tasks_in_ram(range(_COUNT)), hypers(steps_before + 1))
    pipeline.wait_updated()
    pipeline.close()
    assert filed.bytes() == tiles.bytes()


def test_parameters_alone_are_left_where_the_state_is_in_memory(file_tiles: FileTiles) -> None:
    tiles = Tiles(_COUNT, "bf16", "bf16")
    filed = file_tiles(tiles, 2, param_in_file=True)
    before = committed(filed)[_COUNT:]
    states = [state.copy() for state in tiles.optim_states]
    filed.pipeline.submit(list(tasks(filed, False, True, state_in_file=False)), hypers(1))
    filed.pipeline.flush()
    assert committed(filed)[_COUNT:] == before
    filed.param_at = filed.spare_param_at
    found = committed(filed)[_COUNT:]
    updated, tiles.optim_states = tiles.optim_states, states
    train_in_ram(tiles, steps=1)
    assert found == [param.tobytes() for param in tiles.params]
    assert all(map(np.array_equal, updated, tiles.optim_states))


def test_what_cannot_be_left_is_refused(file_tiles: FileTiles) -> None:
    filed = file_tiles(Tiles(_COUNT, "bf16", "bf16"), 2)
    with pytest.raises(ValueError, match="param_to is for a param in the file"):
        filed.pipeline.submit(list(tasks(filed, True, True)), hypers(1))
    with pytest.raises(ValueError, match="optim_state_to is for an optim_state in the file"):
        filed.pipeline.submit(list(tasks(filed, True, False, state_in_file=False)), hypers(1))
