"""Checks of single options, whose errors name the option, what it was given, and what it takes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import cast


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
        known = [str(choice) for choice in choices]
        near = difflib.get_close_matches(str(value), known, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
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
