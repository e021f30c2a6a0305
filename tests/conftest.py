"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from offload import _native
from tests.support.ranks.processes import RankPool

# Two tests at a time leave a core each; bits do not depend on it.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

# Predictions know no profile unless a test says so, whatever this machine has saved.
os.environ["XDG_CACHE_HOME"] = "/dev/null/none"

# For builds that run many times slower.
settings.register_profile("sanitized", deadline=None, max_examples=20)


def open_files() -> set[str]:
    """Descriptors of regular files and rings that are open now."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "hetero" in target or "(deleted)" in target or "io_uring" in target:
            found.add(f"{fd} -> {target}")
    return found


def own_threads() -> set[str]:
    """Native threads of this project that are alive."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("hetero"):
            found.add(f"{task} {name}")
    return found


def pytest_collection_finish() -> None:
    """What importing all tests has made stays for good: no collection need go through it again.
    With it, each of nothing_left()'s takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Fails if the test leaves a file, a descriptor or a thread behind."""
    gc.collect()
    gc.freeze()  # as above: models' code is imported when it is first used
    _native.shutdown_workers()
    files, threads = open_files(), own_threads()
    yield
    gc.collect()
    _native.shutdown_workers()
    assert open_files() <= files
    # The kernel lists a thread for a moment after it was joined.
    deadline = time.monotonic() + 5
    while not own_threads() <= threads and time.monotonic() < deadline:
        time.sleep(0.001)
    assert own_threads() <= threads
    assert not list(tmp_path.rglob("*hetero*"))


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two ranks for all tests of the session, started when the first one needs them."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four ranks, likewise."""
    with RankPool(4) as pool:
        yield pool
