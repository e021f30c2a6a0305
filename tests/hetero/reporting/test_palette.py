"""hetero/reporting/palette: colours of one picture can be told apart, and no file has others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from hetero.reporting.palette import (
    GROUND,
    INK,
    KIND_COLOURS,
    LINK_LINES,
    PHASE_COLOURS,
    QUIET,
    REST_COLOUR,
    TIER_COLOURS,
    ink_on,
)

ROOT = Path(__file__).resolve().parents[3]

# How people see who have none of a kind of cones: matrices on linear RGB, from Machado, Oliveira
# and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009).
SEEN = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no blue cones": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
WHITE = np.array([0.95047, 1.0, 1.08883])

TOGETHER = {
    "kinds": list(KIND_COLOURS.values()),
    "phases": [*PHASE_COLOURS.values(), REST_COLOUR],
    "tiers": [*TIER_COLOURS.values(), GROUND],
    "drawing of a step": [
        *list(KIND_COLOURS.values())[:3],
        PHASE_COLOURS["forward"],
        PHASE_COLOURS["backward"],
        PHASE_COLOURS["optimizer"],
    ],
}


def linear(colour: str) -> np.ndarray:
    """Red, green and blue as light."""
    found = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(found <= 0.04045, found / 12.92, ((found + 0.055) / 1.055) ** 2.4)


def lab(colour: str, cones: str) -> np.ndarray:
    """The colour as it is seen, in CIE L*a*b*."""
    t = TO_XYZ @ np.clip(np.array(SEEN[cones]) @ linear(colour), 0, 1) / WHITE
    x, y, z = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(some: str, other: str, cones: str) -> float:
    """CIE76: 2 is just seen between two fields that touch."""
    return float(np.linalg.norm(lab(some, cones) - lab(other, cones)))


@pytest.mark.parametrize("picture", TOGETHER)
def test_colours_of_a_picture_can_be_told_apart(picture: str) -> None:
    pairs = list(combinations(TOGETHER[picture], 2))
    least = min((distance(a, b, cones), a, b, cones) for a, b in pairs for cones in SEEN)
    assert least[0] >= 20, least


def test_hues_mean_one_thing() -> None:
    kinds, phases = set(KIND_COLOURS.values()), set(PHASE_COLOURS.values())
    assert not kinds & phases
    tiers = [*TIER_COLOURS.values(), *(colour for colour, _ in LINK_LINES.values())]
    assert all(len({c[1:3], c[3:5], c[5:7]}) == 1 for c in tiers), "tiers and links are grey"
    assert not kinds & set(tiers)


def test_words_have_contrast() -> None:
    def light(colour: str) -> float:
        return float(TO_XYZ[1] @ linear(colour)) + 0.05

    for ground in {colour for some in TOGETHER.values() for colour in some}:
        some, other = light(ground), light(ink_on(ground))
        assert max(some, other) / min(some, other) >= 4.5, ground
    assert light(GROUND) / light(QUIET) > 4.5
    assert light(GROUND) / light(INK) > 7


def lines_with_colours() -> Iterator[str]:
    """Lines outside of the palette that name a colour."""
    named = re.compile(r"#[0-9a-fA-F]{6}\b|colou?rs?=\"(?!none\")[\w.#]+\"|: #[0-9a-fA-F]{3}\b")
    for tree in ("hetero", "offload", "bench", "docs/site", "docs/examples"):
        for path in sorted((ROOT / tree).rglob("*.py")):
            if path.name != "palette.py":
                for number, line in enumerate(path.read_text().splitlines(), start=1):
                    if named.search(line):
                        yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_no_other_file_names_a_colour() -> None:
    assert list(lines_with_colours()) == []
