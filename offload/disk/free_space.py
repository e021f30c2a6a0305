"""Which parts of a file are free to be used again."""

from __future__ import annotations


class FreeSpace:
    """Free ranges of bytes, of which first fit gives some away; neighbours become one."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # (begin, end), ascending, never touching

    @property
    def nbytes(self) -> int:
        """Free bytes in all."""
        return sum(end - begin for begin, end in self._ranges)

    def take(self, nbytes: int) -> int | None:
        """The offset of `nbytes` that are free no more; None if no range is as long."""
        for index, (begin, end) in enumerate(self._ranges):
            if end - begin >= nbytes:
                rest = (begin + nbytes, end)
                self._ranges[index : index + 1] = [rest] if rest[0] < end else []
                return begin
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Bytes [offset, offset + nbytes) are free from now on."""
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
