"""The I/O engines that tests run with: each test that asks for one runs with all."""

import pytest

from offload import _native
from tests.io_tools import BLOCK, KINDS


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def engine(kind):
    engine = _native.IoEngine(kind, queue_depth=8, block_bytes=BLOCK)
    yield engine
    engine.close()
