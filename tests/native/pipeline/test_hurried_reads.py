"""native/step_pipeline: reads of an update that somebody waits for go before reads ahead."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.support.native.io_tools import Memory, Pipe, needs_uring
from tests.support.native.step_tiles import Filed, Tiles, hypers, train_in_ram, until

READS = 12  # more than the engine has in flight


@needs_uring
def test_an_update_that_is_waited_for_goes_before_reads_ahead(tmp_path: Path) -> None:
    """There are always more reads ahead: in its own turn the update would never begin."""
    tiles = Tiles(1, "bf16", "bf16")
    filed = Filed(tiles, tmp_path / "file", "io_uring", 1)
    memory, pipe = Memory(4096), Pipe(filed.engine)

    def read_ahead() -> object:
        return filed.engine.read(pipe.file, memory.address, 4096, 0, soon=True)

    ahead = [read_ahead() for _ in range(READS)]
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
    pipe.feed(4096 * READS)
    for op in ahead:
        op.wait()
    filed.pipeline.flush()
    train_in_ram(tiles, 1)
    assert filed.bytes() == tiles.bytes()
    pipe.close()
    filed.close()
