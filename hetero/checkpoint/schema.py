"""JSON as dataclasses, and checksums: each member has its declared type, or an error names it."""

from __future__ import annotations

import functools
import json
import reprlib
import stat
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from offload._native import crc32c
from offload.errors import CheckpointError

LARGEST = 2**62  # of a number
_WORDS = {str: "a string", bool: "true or false", int: "a whole number"}
_T = TypeVar("_T")


def crc_of(content: bytes | memoryview, crc: int = 0) -> int:
    """The CRC-32C (RFC 3720) of `content`, which follows what has the checksum `crc`."""
    if not len(content):
        return crc
    array = np.frombuffer(content, dtype=np.uint8)  # (nothing is copied)
    return crc32c(int(array.ctypes.data), len(array), crc)


def content_of(path: Path, most_bytes: int, kind: str) -> bytes:
    """The content of a small file, without which a folder is no `kind`. Raises CheckpointError."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise CheckpointError(f"{path} is not a regular file")
        if status.st_size > most_bytes:
            raise CheckpointError(f"{path} has {status.st_size} bytes, and may have {most_bytes}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} is no {kind}: {path.name} cannot be read: {error.strerror}"
        ) from error


def parse_json(content: bytes, path: str) -> dict[str, Any]:
    """A file's JSON object. Raises CheckpointError; `path` is the file's, for that.

    Parsing takes at most some 30 times the size of `content`: of two bytes an empty list is made.
    """
    try:
        found = json.loads(
            content.decode(),
            object_pairs_hook=_without_duplicates,
            parse_int=_whole,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is no JSON: {error}") from None
    return _object(found, path)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has the key {shortened(key)} twice")
        found[key] = value
    return found


def _whole(digits: str) -> int | float:
    return -0.0 if digits == "-0" else int(digits)  # (Python would make 0 of it)


def _no_constant(name: str) -> float:
    raise ValueError(f"it has the number {name}")


class _Repr(reprlib.Repr):
    """The beginning of a value's text, of any depth and width, which takes no longer than that."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        """Of no more digits than Python gives."""
        return super().repr_int(x, level) if x.bit_length() < 10_000 else "a large int"


shortened = _Repr().repr  # a value as an error shows it


def member(content: Mapping[str, Any], name: str, kind: type[_T], at: str) -> _T:
    """A member of the object `at`. Raises CheckpointError unless it is there, and of that kind."""
    if name not in content:
        raise CheckpointError(f"{at} lacks {name!r}")
    found: _T = typed(kind, content[name], f"{name} in {at}")
    return found


def typed(kind: Any, value: Any, at: str) -> Any:
    """The value as the type `kind` has it, which may be nested; other members are passed over.

    Objects become dataclasses, without those of their fields that have defaults, or what `of_json`
    of the class makes; lists become tuples, whose strings are each there once; numbers are whole,
    0 or more. Raises CheckpointError; `at` is the place of the value, for that.
    """
    if kind is Any:
        return value
    if hasattr(kind, "of_json"):
        return kind.of_json(value, at)
    if isinstance(kind, type) and is_dataclass(kind):
        content = _object(value, at)
        return kind(**{name: member(content, name, own, at) for name, own in _members(kind)})
    if kind in _WORDS:
        if type(value) is not kind:
            raise CheckpointError(f"{at} is {shortened(value)}, must be {_WORDS[kind]}")
        if kind is int and not 0 <= value <= LARGEST:
            raise CheckpointError(f"{at} is {shortened(value)}, must be 0 to {LARGEST}")
        return value
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else typed(inner[0], value, at)
    if origin is Mapping:
        content = _object(value, at)
        return {k: typed(inner[1], v, f"{shortened(k)} of {at}") for k, v in content.items()}
    assert origin in (tuple, Sequence), kind
    if not isinstance(value, list):
        raise CheckpointError(f"{at} is {shortened(value)}, must be a list")
    if inner[0] is int and all(type(each) is int and 0 <= each <= LARGEST for each in value):
        return tuple(value)
    found = tuple(typed(inner[0], each, f"item {i} of {at}") for i, each in enumerate(value))
    if inner[0] is str and len(set(found)) < len(found):
        raise CheckpointError(f"{at} must be strings, each once")
    return found


@functools.cache
def _members(kind: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(each.name, hints[each.name]) for each in fields(kind) if each.default is MISSING]


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{at} is {shortened(value)}, must be an object")
    return value
