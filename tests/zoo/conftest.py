"""What all tests of the zoo share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small take longer with more threads, much longer beside other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def imports_are_not_garbage() -> None:
    """Collections, which tests for leaks make often, do not look at what libraries hold."""
    gc.collect()
    gc.freeze()
