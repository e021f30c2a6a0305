"""native/step_task: an update leaves those parts of the file as they are that it is to leave."""

import numpy as np
import pytest

from tests.support.native.step_tiles import Filed, FileTiles, Tiles, hypers, train_in_ram

_COUNT = 3


def committed(filed: Filed) -> list[bytes]:
    """What is in the file before the update, by tile: the optimizer states, then the parameters."""
    tiles = filed.tiles
    states = zip(tiles.optim_states, filed.optim_state_at, strict=True)
    params = zip(filed.params, filed.param_at, strict=True)
    return [filed.in_file(*pair) for pair in (*states, *params)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("buffers", [1, 6])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    ("param_in_file", "leaves"),
    [(True, "state, param"), (True, "state"), (True, "param"), (False, "state")],
)
def test_the_file_keeps_what_is_left(
    file_tiles: FileTiles, param_in_file: bool, leaves: str, steps_before: int, buffers: int
) -> None:
    """Also what was, before the update, in a buffer alone."""
    tiles = Tiles(_COUNT, "bf16", "bf16")
    filed = file_tiles(tiles, buffers, param_in_file)
    for step in range(1, steps_before + 1):
        filed.pipeline.submit(filed.tasks(range(_COUNT)), hypers(step))
        filed.pipeline.wait_updated()
    train_in_ram(tiles, steps_before)
    wanted = [array.tobytes() for array in tiles.optim_states + tiles.params]
    tasks = [filed.task(key, leaves=leaves) for key in range(_COUNT)]
    filed.pipeline.submit(tasks, hypers(steps_before + 1))
    filed.pipeline.flush()
    found = committed(filed)
    if "state" in leaves:
        assert found[:_COUNT] == wanted[:_COUNT]
        filed.optim_state_at = filed.spare_optim_state_at
    if "param" in leaves:
        assert found[_COUNT:] == wanted[_COUNT:]
        filed.param_at = filed.spare_param_at
    train_in_ram(tiles, 1, before=steps_before)
    assert filed.bytes() == tiles.bytes()


def test_parameters_alone_are_left_where_the_state_is_in_memory(file_tiles: FileTiles) -> None:
    tiles = Tiles(_COUNT, "bf16", "bf16")
    filed = file_tiles(tiles, 2, param_in_file=True)
    before = committed(filed)[_COUNT:]
    states = [state.copy() for state in tiles.optim_states]
    tasks = [filed.task(key, leaves="param", state_in_file=False) for key in range(_COUNT)]
    filed.pipeline.submit(tasks, hypers(1))
    filed.pipeline.flush()
    assert committed(filed)[_COUNT:] == before
    filed.param_at = filed.spare_param_at
    found = committed(filed)[_COUNT:]
    updated, tiles.optim_states = tiles.optim_states, states
    train_in_ram(tiles, 1)
    assert found == [param.tobytes() for param in tiles.params]
    assert all(map(np.array_equal, updated, tiles.optim_states))
