"""Ctrl-C at a place that a test chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def interrupt_in(owner: object, method: str, done: bool = True) -> Iterator[None]:
    """The block is ended by Ctrl-C in the owner's method: when all is `done`, or before."""
    call = getattr(owner, method)

    def interrupt(*args: Any, **more: Any) -> None:
        if done:
            call(*args, **more)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield
