"""Every native test leaves the instruction set and the threads as it found them."""

from collections.abc import Iterator

import pytest

from offload import _native


@pytest.fixture(autouse=True)
def restore_choices() -> Iterator[None]:
    isa, threads, cpus = _native.isa(), _native.threads(), _native.thread_cpus()
    yield
    _native.set_isa(isa)
    _native.set_threads(threads, cpus)
