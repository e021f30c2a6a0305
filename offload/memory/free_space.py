"""Which parts of a file, or of an arena, are free to be used again."""

from __future__ import annotations


class FreeSpace:
    """First-fit allocation of ranges of bytes, or of slots; neighbouring free ranges become one."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # (begin, end), ascending, never touching

    @property
    def nbytes(self) -> int:
        """Free bytes in all."""
        return sum(end - begin for begin, end in self._ranges)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The free ranges, (begin, end), ascending."""
        return tuple(self._ranges)

    def take(self, nbytes: int) -> int | None:
        """Allocates `nbytes`. Returns their offset, or None if no free range is as long."""
        for index, (begin, end) in enumerate(self._ranges):
            if end - begin >= nbytes:
                rest = (begin + nbytes, end)
                self._ranges[index : index + 1] = [rest] if rest[0] < end else []
                return begin
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Frees bytes [offset, offset + nbytes)."""
        begin, end = offset, offset + nbytes
        kept = []
        for other in self._ranges:
            assert other[1] <= offset or other[0] >= offset + nbytes, (other, offset, nbytes)
            if other[1] == begin:
                begin = other[0]
            elif other[0] == end:
                end = other[1]
            else:
                kept.append(other)
        self._ranges = sorted([*kept, (begin, end)])
