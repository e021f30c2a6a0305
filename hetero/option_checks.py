"""Checks of single options, whose errors name the option, what it was given, and what it takes."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, cast


def is_number(value: object) -> bool:
    """Whether it is an int or a float; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_integer(option: str, value: object, at_least: int | None = None) -> None:
    """Raises ValueError if it is no int, or a smaller one than `at_least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (at_least is not None and cast(int, value) < at_least):
        least = "" if at_least is None else f" of at least {at_least}"
        raise ValueError(f"{option} must be an integer{least}, not {value!r}")


def check_choice(option: str, value: object, choices: Sequence[object]) -> None:
    """Raises ValueError, with the nearest ones, if it is none of `choices`."""
    if isinstance(value, bool) or value not in choices:
        known = {str(choice): choice for choice in choices}
        near = difflib.get_close_matches(str(value), list(known), n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(repr(known[n]) for n in near)}?" if near else ""
        raise ValueError(f"{option} must be one of {', '.join(known)}, not {value!r}{hint}")


def checked_patterns(option: str, value: object, of: str, such_as: str) -> tuple[str, ...]:
    """A list of patterns as a tuple. Raises ValueError if it is none; `of` whose names they are."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        patterns: Sequence[object] | None = None
    else:
        patterns = value
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"{option} must be a list of patterns of {of}' names, such as [{such_as!r}], not "
            f"{value!r}"
        )
    return tuple(cast("Sequence[str]", patterns))


def options_by_name(
    options: Mapping[str, Any], known: Sequence[str], aliases: Mapping[str, str]
) -> dict[str, Any]:
    """Options by their `known` names; `aliases` are other names of some.

    Raises ValueError, with the nearest names, for an unknown one, and for one that has two values.
    """
    values: dict[str, Any] = {}
    for key, value in options.items():
        name = aliases.get(key, key)
        if name not in known:
            near = difflib.get_close_matches(str(key), [*known, *aliases], n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"unknown option {key!r}; {hint}")
        if values.setdefault(name, value) != value:
            raise ValueError(
                f"{' and '.join(k for k in options if aliases.get(k, k) == name)} are one option "
                f"and differ ({values[name]!r}, {value!r}); give one of them"
            )
    return values


def options_from_file(path: str | PathLike[str], name: str = "the configuration") -> dict[str, Any]:
    """The options in a JSON file, which errors call `name` and its path.

    Raises ValueError if it is not one, has no object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{path} has {', '.join(twice)} more than once")
        return dict(pairs)

    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=unique)
    except OSError as error:
        raise ValueError(f"cannot read {name} {path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} {path} must be a JSON object")
    return content
