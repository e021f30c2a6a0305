"""native/io: what somebody waits for goes before what somebody is going to wait for."""

from __future__ import annotations

import pytest

from offload import _native
from tests.support.native.io_tools import BLOCK, Memory, Pipe, add_file, needs_uring


@needs_uring
@pytest.mark.parametrize("hurried", [False, True])
def test_the_order_of_transfers(hurried: bool, tmp_path) -> None:
    """One block is in flight at a time, and the first stays there until the pipe is fed: so all are
    queued before any goes. They write to one place, which has the last one's bytes in the end."""
    engine = _native.IoEngine("io_uring", queue_depth=1, block_bytes=BLOCK)
    memory = Memory(3 * BLOCK)
    file = add_file(engine, str(tmp_path), BLOCK)
    pipe = Pipe(engine)
    first = engine.read(pipe.file, memory.address, 4096, 0)
    memory.bytes[BLOCK : 2 * BLOCK] = 1
    memory.bytes[2 * BLOCK :] = 2
    soon = engine.write(file, memory.address + BLOCK, BLOCK, 0, soon=True)
    if hurried:
        soon.hurry()
    now = engine.write(file, memory.address + 2 * BLOCK, BLOCK, 0)
    assert [op.done() for op in (first, soon, now)] == [False] * 3
    pipe.feed(4096)
    for op in (first, soon, now):
        op.wait()
    engine.read(file, memory.address, BLOCK, 0, soon=True).wait()
    assert memory.bytes[:BLOCK].unique().tolist() == [2 if hurried else 1]
    now.hurry()  # nothing: it is done
    pipe.close()
    engine.close()
