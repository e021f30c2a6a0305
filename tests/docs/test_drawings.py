"""docs/site/drawings.py: the drawings in docs/pictures are those that it makes."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

from tests.support.documents.blocks import ROOT


def test_files_are_those_that_it_writes() -> None:
    module = runpy.run_path(str(ROOT / "docs/site/drawings.py"), run_name="drawings")
    drawings: dict[str, Callable[[], Any]] = module["DRAWINGS"]
    assert {path.name for path in (ROOT / "docs/pictures").glob("*.svg")} == set(drawings)
    for name, draw in drawings.items():
        text = draw().text
        said = "run python docs/site/drawings.py"
        assert (ROOT / "docs/pictures" / name).read_text() == text, said
        check_texts(ElementTree.fromstring(text))


def check_texts(drawing: ElementTree.Element) -> None:
    """A letter is at most 0.6 of its size wide: nothing leaves the drawing, and nothing is tiny."""
    width = float(drawing.attrib["width"])
    for element in drawing.iter("{http://www.w3.org/2000/svg}text"):
        size = float(element.attrib["font-size"])
        length = 0.6 * size * len(element.text or "")
        share = {"start": 0.0, "middle": 0.5, "end": 1.0}[element.attrib["text-anchor"]]
        begin = float(element.attrib["x"]) - share * length
        assert size >= 13
        assert begin >= 0
        assert begin + length <= width
