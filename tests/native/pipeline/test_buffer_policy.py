"""native/pipeline/buffer_policy: what a step reads and writes, without threads or transfers."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.native.native_build import build_program, succeed
from tests.support.native.step_tiles import zig_zag


@pytest.fixture(scope="module")
def program() -> Path:
    return build_program("policy", "policy") / "tests" / "native" / "policy" / "policy"


def traffic(
    program: Path, buffers: int, streaming: int, orders: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Of each step: tiles read, written after their updates, and written when their buffers are
    needed."""
    keys = [",".join(map(str, order)) for order in orders]
    lines = succeed([str(program), str(buffers), str(streaming), *keys]).splitlines()
    return [tuple(map(int, line.split())) for line in lines]


@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 9, 16])
def test_an_order_that_alternates_moves_what_does_not_fit(program: Path, tiles: int) -> None:
    for buffers in range(1, tiles + 3):
        steps = traffic(program, buffers, 0, [zig_zag(tiles, step) for step in range(1, 6)])
        lacking = max(0, tiles - buffers)
        assert steps == [(tiles, lacking, 0), *[(lacking, lacking, 0)] * 4]


@pytest.mark.parametrize("tiles", [2, 3, 5, 9, 16])
def test_an_order_that_repeats_keeps_all_but_what_streams(program: Path, tiles: int) -> None:
    for buffers in range(1, tiles + 3):
        for streaming in range(1, buffers + 1):
            steps = traffic(program, buffers, streaming, [range(tiles)] * 5)
            lacking = max(0, tiles - buffers)
            missed = min(tiles, lacking + min(streaming, lacking))
            assert [written for _, *written in steps] == [[missed, 0]] * 5
            # Without reading ahead a buffer that streams may still have what it had.
            assert all(lacking <= read <= missed for read, *_ in steps[1:])


def test_content_of_tasks_that_do_not_come_again_makes_room(program: Path) -> None:
    steps = traffic(program, 3, 0, [[0, 1, 2], [3, 4, 5, 6], [5, 6], [0, 1, 2]])
    assert steps == [(3, 0, 0), (4, 1, 3), (0, 0, 0), (3, 0, 3)]


def test_where_all_content_is_wanted_what_is_wanted_last_goes(program: Path) -> None:
    ((read, *_),) = traffic(program, 2, 0, [[0, 1, 2, 0, 1, 2]])
    assert read == 4
