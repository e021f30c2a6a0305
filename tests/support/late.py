"""Modules that are imported when a test first needs them.

Each process of `make test` reads all files of tests and runs a part of them: what takes seconds to
import, and few files need, is not to be imported by all processes.
"""

from __future__ import annotations

import pkgutil
from typing import Any


class _Late:
    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # which pytest asks of everything
            raise AttributeError(name)
        return getattr(pkgutil.resolve_name(self._path), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return pkgutil.resolve_name(self._path)(*args, **options)


def late(path: str) -> Any:
    """What `path`, "module" or "module:name", names: to be called, or asked for its attributes."""
    return _Late(path)
