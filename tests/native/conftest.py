"""What native tests share: choices left as they were found, and the I/O engines to run with."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from offload import _native
from tests.support.native.io_tools import BLOCK, KINDS
from tests.support.native.step_tiles import (
    Filed,
    FileTiles,
    Tiles,
    leave_out_older_threads,
    pipeline_threads,
)


@pytest.fixture(autouse=True)
def restore_choices() -> Iterator[None]:
    isa, threads = _native.isa(), _native.threads()
    yield
    _native.set_isa(isa)
    _native.set_threads(threads)


@pytest.fixture(autouse=True)
def own_pipelines() -> None:
    """An engine that another test has left open is no reason to wait for its threads' end."""
    leave_out_older_threads()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each test that asks for an engine runs with all kinds."""
    return request.param


@pytest.fixture
def engine(kind: str) -> Iterator[_native.IoEngine]:
    engine = _native.IoEngine(kind, queue_depth=8, block_bytes=BLOCK, patience_s=1.0)
    yield engine
    engine.close()


@pytest.fixture
def file_tiles(kind: str, tmp_path: Path) -> Iterator[FileTiles]:
    """Makes a Filed, which is closed in the end; no thread is left."""
    with ExitStack() as opened:

        def make(tiles: Tiles, buffers: int, *in_file: bool, **named: bool) -> Filed:
            filed = Filed(tiles, tmp_path / "file", kind, buffers, *in_file, **named)
            opened.callback(filed.close)
            return filed

        yield make
    assert pipeline_threads() == []
