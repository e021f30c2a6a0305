"""Fixtures of the adapters' tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hetero.compat.key_table import forget_logged
from hetero.runtime.engine import Engine


@pytest.fixture(autouse=True)
def _engines_end(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the engines that a test has made; before nothing_left() looks for what they had."""
    if "nothing_left" in request.fixturenames:
        request.getfixturevalue("nothing_left")
    made: list[Engine] = []
    begin = Engine.__init__

    def note(self: Engine, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", note)
    yield
    for engine in made:
        engine.close()


@pytest.fixture
def not_needed(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Tells what was logged as not needed since the test began."""
    forget_logged()
    caplog.set_level(logging.WARNING, "hetero.compat")
    return lambda: [message.split(" is not needed")[0] for message in caplog.messages]
