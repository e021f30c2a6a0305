"""docs/site/drawings.py: the drawings in docs/pictures are those that it makes."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.documents.blocks import ROOT

MODULE = runpy.run_path(str(ROOT / "docs/site/drawings.py"), run_name="drawings")
DRAWINGS: dict[str, Callable[[], Any]] = MODULE["DRAWINGS"]


def test_all_drawings_are_made_here() -> None:
    assert {p.name for p in (ROOT / "docs/pictures").glob("*.svg")} == set(DRAWINGS)


@pytest.mark.parametrize("name", DRAWINGS)
def test_files_are_those_that_it_writes(name: str) -> None:
    text = DRAWINGS[name]().text
    assert (ROOT / "docs/pictures" / name).read_text() == text, "run python docs/site/drawings.py"
    drawing = ElementTree.fromstring(text)
    width = float(drawing.attrib["width"])
    # A letter is at most 0.6 of its size wide: nothing leaves the drawing, and nothing is tiny.
    for element in drawing.iter("{http://www.w3.org/2000/svg}text"):
        size = float(element.attrib["font-size"])
        length = 0.6 * size * len(element.text or "")
        share = {"start": 0.0, "middle": 0.5, "end": 1.0}[element.attrib["text-anchor"]]
        begin = float(element.attrib["x"]) - share * length
        assert size >= 13
        assert begin >= 0
        assert begin + length <= width
