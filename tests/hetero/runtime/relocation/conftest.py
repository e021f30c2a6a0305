"""Limits of processes."""

import pytest

from tests.support.process_limits import Process


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """This process holds what the test says."""
    return Process(monkeypatch)
