"""What native tests share: choices left as they were found, and the I/O engines to run with."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from offload import _native
from tests.support.native.io_tools import BLOCK, KINDS, Pipe
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
def make_engine(kind: str) -> Iterator[Callable[..., _native.IoEngine]]:
    """Makes engines, of 8 blocks in flight or as is said, which are closed in the end."""
    with ExitStack() as opened:

        def make(**options: Any) -> _native.IoEngine:
            engine = _native.IoEngine(kind, **{"queue_depth": 8, "block_bytes": BLOCK, **options})
            opened.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def engine(make_engine: Callable[..., _native.IoEngine]) -> _native.IoEngine:
    return make_engine(patience_s=1.0)


@pytest.fixture
def piped() -> Iterator[Callable[[int], tuple[_native.IoEngine, Pipe]]]:
    """Makes an io_uring engine with so many pages in flight, and a pipe of it."""
    with ExitStack() as opened:

        def make(queue_depth: int) -> tuple[_native.IoEngine, Pipe]:
            engine = _native.IoEngine("io_uring", queue_depth=queue_depth, block_bytes=4096)
            opened.callback(engine.close)
            pipe = Pipe(engine)
            opened.callback(pipe.close)
            return engine, pipe

        yield make


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
