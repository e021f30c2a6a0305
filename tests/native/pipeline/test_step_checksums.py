"""native/step_pipeline on files with checksums, which are made by the thread that ends an update.

Not when the write is submitted, with the pipeline's lock held, which would stop all other threads.
"""

from __future__ import annotations

import ctypes
import errno

import numpy as np
import pytest

from offload import _native
from tests.support.native.step_tiles import (
    FileTiles,
    Tiles,
    hypers,
    train_in_ram,
    zig_zag,
)

PAGE = 4096


def checksums(content: np.ndarray) -> bytes:
    begin = content.ctypes.data
    pages = [_native.crc32c(begin + at, PAGE) for at in range(0, content.nbytes, PAGE)]
    return np.array(pages, np.uint32).tobytes()


@pytest.mark.covering(2)
@pytest.mark.parametrize("buffers", [1, 3, 8])
@pytest.mark.parametrize("in_file", [(), (True,), (True, True)])
def test_the_file_has_those_of_what_was_written(
    file_tiles: FileTiles, buffers: int, in_file: tuple[bool, ...]
) -> None:
    tiles = Tiles(8, "bf16", "bf16")
    filed = file_tiles(tiles, buffers, *in_file, checksums=True)
    for step in range(1, 4):
        filed.pipeline.submit(filed.tasks(zig_zag(8, step)), hypers(step))
    filed.pipeline.flush()
    train_in_ram(tiles, 3)
    assert filed.bytes() == tiles.bytes()
    written = [(tiles.optim_states, filed.optim_state_at)]
    if in_file:
        written.append((tiles.params, filed.param_at))
    for arrays, offsets in written:
        for array, offset in zip(arrays, offsets, strict=True):
            found = filed.engine.checksums(filed.file, offset, array.nbytes)
            assert found == checksums(array)


def test_they_are_made_when_the_update_ends(file_tiles: FileTiles) -> None:
    """A byte that changes in the buffer between the update and its write is not what was meant."""
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
