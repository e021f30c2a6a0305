"""JSON as dataclasses: each member has its declared type, or an error names what is wrong.

An empty list takes two bytes of text and 56 of memory. So text that was made to harm may take
thirty times its size, and a header or manifest may have 100 MB. What hetero and safetensors write
has a list, an object or a pair of key and value in each 30 bytes or more; denser text is refused
before it is parsed.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from offload.errors import CheckpointError

LARGEST = 2**62  # of a number
_BYTES_OF_CONTAINER, _BYTES_OF_PAIR = 16, 14
_FEW = 10_000  # of either, that a text may have besides, in names and in free text
_WORDS = {str: "a string", bool: "true or false", int: "a whole number"}
_T = TypeVar("_T")
_hints = functools.cache(get_type_hints)


def check_density(text: bytes) -> None:
    """Raises ValueError for more lists, objects or pairs than a text of its size needs.

    Parsing what passes takes at most some 20 times the size of `text`.
    """
    containers, pairs = text.count(b"[") + text.count(b"{"), text.count(b":")
    most_containers = _FEW + len(text) // _BYTES_OF_CONTAINER
    if containers > most_containers or pairs > _FEW + len(text) // _BYTES_OF_PAIR:
        raise ValueError(
            f"its {len(text)} bytes of JSON have {containers} lists and objects and {pairs} pairs "
            f"of key and value, more than a file of hetero or safetensors has"
        )


def parse_json(content: bytes, path: str) -> dict[str, Any]:
    """A file's JSON object. Raises CheckpointError; `path` is the file's, for that."""
    try:
        check_density(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    try:
        found = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is no JSON: {error}") from None
    return _object(found, path)


def _no_constant(name: str) -> float:
    raise ValueError(f"it has the number {name}")


def shortened(value: object) -> str:
    """It as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


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
        hints, content = _hints(kind), _object(value, at)
        names = [each.name for each in fields(kind) if each.default is MISSING]
        return kind(**{name: member(content, name, hints[name], at) for name in names})
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
    found = tuple(typed(inner[0], each, f"item {i} of {at}") for i, each in enumerate(value))
    if inner[0] is str and len(set(found)) < len(found):
        raise CheckpointError(f"{at} must be strings, each once")
    return found


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{at} is {shortened(value)}, must be an object")
    return value
