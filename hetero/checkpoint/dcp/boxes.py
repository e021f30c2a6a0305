"""Ranges of a flat tensor as the boxes that DCP cuts tensors into: offsets and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

METADATA_NAME = ".metadata"  # the file of a DCP checkpoint that says which boxes there are


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins and how large it is in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    def common_with(self, other: Box) -> Box | None:
        """What both boxes of a tensor have; None if that is nothing."""
        places = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        both = [
            (max(first, begin), min(first + size, begin + more))
            for first, size, begin, more in places
        ]
        if any(end <= begin for begin, end in both):
            return None
        return Box(tuple(b for b, _ in both), tuple(e - b for b, e in both))

    def cut(self, values: torch.Tensor, around: Box) -> torch.Tensor:
        """A view of this box in `values`, which are those of the box `around` it."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            values = values.narrow(dim, offset - around.offsets[dim], size)
        return values


def boxes_of(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Elements [begin, end) of the flat tensor, in order, as boxes that lie flat in one piece.

    There are at most 2 n - 1 of n dimensions: whole rows, and what is before and after them.
    """
    if not shape:
        yield Box((), ())
        return
    if len(shape) == 1:
        yield Box((begin,), (end - begin,))
        return
    row = math.prod(shape[1:])
    if begin % row:
        number, stop = begin // row, min(end, (begin // row + 1) * row)
        yield from _in_row(shape, number, begin - number * row, stop - number * row)
        begin = stop
    rows = (end - begin) // row
    if rows:
        yield Box((begin // row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        begin += rows * row
    if begin < end:
        yield from _in_row(shape, begin // row, 0, end - begin)


def _in_row(shape: Sequence[int], number: int, begin: int, end: int) -> Iterator[Box]:
    for box in boxes_of(shape[1:], begin, end):
        yield Box((number, *box.offsets), (1, *box.sizes))


def rows_around(shape: Sequence[int], begin: int, end: int) -> tuple[Box, int]:
    """The rows of a tensor that have its flat elements [begin, end), and the first row's element.

    Rows are along the first dimension.
    """
    if not shape:
        return Box((), ()), 0
    row = max(1, math.prod(shape[1:]))
    first, last = begin // row, -(-end // row)
    return Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])), first * row
