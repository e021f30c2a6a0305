"""Calls that change folders and files, before each of which a test does something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def before_each(
    calls: Iterable[tuple[Any, str]], action: Callable[[str, tuple[Any, ...]], None]
) -> Iterator[None]:
    """`action` gets the name and the arguments of each call of these, (owner, name), before it."""

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            action(name, args)
            return real(*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in calls:
            patch.setattr(owner, name, wrapped(name, getattr(owner, name)))
        yield
