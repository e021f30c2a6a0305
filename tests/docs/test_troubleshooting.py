"""docs/troubleshooting.md: every error that it names is one that the sources raise."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
NAMED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


@cache
def said() -> str:
    """All strings of the sources, one a line; "…" stands for the values in them."""
    found = []
    for folder in ("hetero", "offload"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            found += [text for node in nodes if (text := _text(node))]
    return "\n".join(found)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_there_are_some() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize("message", NAMED)
def test_an_error_is_raised_so(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.split("…")]
    pattern = ".*".join(part for part in parts if part)
    assert re.search(pattern, said()), "no source says so; write the page as the error is now"
