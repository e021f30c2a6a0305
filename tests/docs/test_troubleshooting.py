"""docs/troubleshooting.md: every error that it names is one that the sources raise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
NAMED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def said() -> list[str]:
    """All strings of the sources; "…" stands for the values in them."""
    found = []
    for folder in ("hetero", "offload"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            found += [text for node in nodes if (text := _text(node))]
    return found


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_errors_are_raised_so() -> None:
    gone, strings = [], said()
    for message in NAMED:
        parts = [part.strip() for part in message.split("…") if part.strip()]
        pattern, longest = ".*".join(map(re.escape, parts)), max(parts, key=len)
        if not any(re.search(pattern, text) for text in strings if longest in text):
            gone.append(message)
    assert len(NAMED) > 20
    assert not gone, "no source says so; write the page as the errors are now"
