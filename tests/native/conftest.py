"""What native tests share: choices left as they were found, and the I/O engines to run with."""

from collections.abc import Iterator

import pytest

from offload import _native
from tests.support.native.io_tools import BLOCK, KINDS
from tests.support.native.step_tiles import Filed, pipeline_threads


@pytest.fixture(autouse=True)
def restore_choices() -> Iterator[None]:
    isa, threads, cpus = _native.isa(), _native.threads(), _native.thread_cpus()
    yield
    _native.set_isa(isa)
    _native.set_threads(threads, cpus)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each test that asks for an engine runs with all kinds."""
    return request.param


@pytest.fixture
def engine(kind: str) -> Iterator[_native.IoEngine]:
    engine = _native.IoEngine(kind, queue_depth=8, block_bytes=BLOCK)
    yield engine
    engine.close()


@pytest.fixture
def opened() -> Iterator[list[Filed]]:
    """Whatever a test appends here is closed, and no thread is left."""
    files: list[Filed] = []
    yield files
    for filed in files:
        filed.close()
    assert pipeline_threads() == []
