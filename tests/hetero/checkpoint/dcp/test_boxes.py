"""Ranges of flat tensors as boxes."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.checkpoint.dcp.metadata import Box, boxes_of, rows_around


@st.composite
def ranges(draw: Any) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    begin = draw(st.integers(0, math.prod(shape) - 1))
    end = draw(st.integers(begin + 1, math.prod(shape)))
    return shape, begin, end


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return box.cut(tensor, Box((0,) * tensor.ndim, tuple(tensor.shape)))


@given(ranges(), st.data())
def test_what_two_boxes_have_in_common(
    given_range: tuple[tuple[int, ...], int, int], data: st.DataObject
) -> None:
    """It is what the elements' numbers say, seen from either."""
    shape, _, _ = given_range
    tensor = torch.arange(math.prod(shape)).view(shape)

    def drawn() -> Box:
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        pairs = zip(shape, offsets, strict=True)
        return Box(offsets, tuple(data.draw(st.integers(1, size - o)) for size, o in pairs))

    one, other = drawn(), drawn()
    wanted = set(cut(tensor, one).reshape(-1).tolist())
    wanted &= set(cut(tensor, other).reshape(-1).tolist())
    common = one.common_with(other)
    if common is None:
        assert not wanted
    else:
        for box in (one, other):
            found = common.cut(cut(tensor, box), box).reshape(-1).tolist()
            assert sorted(found) == sorted(wanted)


@given(ranges())
def test_boxes_are_the_range_in_order(given_range: tuple[tuple[int, ...], int, int]) -> None:
    """Each lies flat in one piece, and there are few of them."""
    shape, begin, end = given_range
    tensor = torch.arange(math.prod(shape)).view(shape)
    boxes = list(boxes_of(shape, begin, end))
    found = torch.cat([cut(tensor, box).reshape(-1) for box in boxes])
    assert found.tolist() == list(range(begin, end))
    assert [box.numel for box in boxes] == [cut(tensor, box).numel() for box in boxes]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(ranges())
def test_rows_have_the_range(given_range: tuple[tuple[int, ...], int, int]) -> None:
    shape, begin, end = given_range
    tensor = torch.arange(math.prod(shape)).view(shape)
    box, first = rows_around(shape, begin, end)
    flat = cut(tensor, box).reshape(-1)
    assert flat[begin - first : end - first].tolist() == list(range(begin, end))
    row = math.prod(shape[1:])
    assert flat.numel() < end - begin + 2 * row
