"""The largest number that works, found in few tries, each of which may take minutes."""

from __future__ import annotations

from collections.abc import Callable


def longest(
    works: Callable[[int], bool], first: int, least: int, most: int, bisections: int
) -> int:
    """The largest multiple of `least`, up to `most`, of which `works` was true; 0 if of none.

    Up to some number all work, and from there on none. From `first` it doubles until one does not
    work; if `first` does not, and `least` does, it halves until one works. Then it halves what is
    between so many times.
    """
    low, high = 0, None
    if works(first):
        low = first
    elif first > least and works(least):
        low, high = least, first
        while low == least and high // 2 > least:
            at = high // 2 // least * least
            if works(at):
                low = at
            else:
                high = at
    if not low:
        return 0
    while high is None and low < most:
        at = min(2 * low, most)
        if works(at):
            low = at
        else:
            high = at
    if high is None:
        return low
    for _ in range(bisections):
        at = (low + high) // 2 // least * least
        if at <= low:
            break
        if works(at):
            low = at
        else:
            high = at
    return low
