"""bench/activations/search.py: few tries, and the largest that works among them."""

from __future__ import annotations

import pytest

from bench.activations.search import longest


def search(border: int, first: int, most: int, bisections: int = 2) -> tuple[int, list[int]]:
    tried: list[int] = []

    def works(number: int) -> bool:
        tried.append(number)
        return number <= border

    return longest(works, first, 64, most, bisections), tried


@pytest.mark.parametrize(
    ("border", "first", "most", "found", "tried"),
    [
        (5000, 1024, 1 << 17, 4096, [1024, 2048, 4096, 8192, 6144, 5120]),
        (6000, 1024, 1 << 17, 5120, [1024, 2048, 4096, 8192, 6144, 5120]),
        (300, 1024, 1 << 17, 256, [1024, 64, 512, 256, 384, 320]),
        (900, 1024, 1 << 17, 896, [1024, 64, 512, 768, 896]),
        (70, 1024, 1 << 17, 64, [1024, 64, 512, 256, 128]),
        (10, 1024, 1 << 17, 0, [1024, 64]),
        (10, 64, 1 << 17, 0, [64]),
        (9999, 1024, 3072, 3072, [1024, 2048, 3072]),
        (2500, 1024, 3072, 2304, [1024, 2048, 3072, 2560, 2304]),
        (64, 64, 64, 64, [64]),
        (100, 64, 1 << 17, 64, [64, 128]),
    ],
)
def test_what_is_tried(border: int, first: int, most: int, found: int, tried: list[int]) -> None:
    assert search(border, first, most) == (found, tried)


def test_no_bisection() -> None:
    assert search(5000, 1024, 1 << 17, 0) == (4096, [1024, 2048, 4096, 8192])
