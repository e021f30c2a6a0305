"""The largest of a row that works, found in few tries."""

from __future__ import annotations

from collections.abc import Callable


def climb(count: int, guess: int, works: Callable[[int], bool], tries: int) -> int | None:
    """The largest index below `count` of which `works` was true in at most `tries` calls.

    Up to an index all work, and from there on none, or else it is one of several such borders.
    From `guess` it goes up or down in doubling strides until it has one that works and one that
    does not, and halves what is between them. None: nothing that was tried works.
    """
    low, high, stride = -1, count, 1  # the largest that works, the smallest that does not
    at = min(max(guess, 0), count - 1)
    for _ in range(tries):
        if high - low <= 1:
            break
        if works(at):
            low = at
        else:
            high = at
        if low >= 0 and high < count:
            at = (low + high) // 2
        else:
            at = min(low + stride, count - 1) if low >= 0 else max(high - stride, 0)
            stride *= 2
    return low if low >= 0 else None
