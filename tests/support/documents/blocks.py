"""Code blocks of Markdown pages, with what comments right before them say of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[3]
# Those of the root and of the site.
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LANGUAGES = {"python", "bash", "text", "json", "yaml", "dockerfile"}
# Pages that developers and auditors read; a user reads all others.
_NOT_FOR_USERS = {
    "CHANGELOG.md",
    "benchmarks.md",
    "compatibility.md",
    "contributing.md",
    "decisions.md",
    "design.md",
    "formats.md",
    "glossary.md",
    "scaling.md",
}
USER_PAGES = [page for page in PAGES if page.name not in _NOT_FOR_USERS]
_COMMENT = re.compile(
    r"<!--\s*(setup|file|needs|not run|run|output)(?::\s*(.*?))?\s*-->\s*\Z", re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        page: the page, relative to the repository's root.
        line: of the block's first line of text, from 1.
        language: what stands behind the fence, "" if nothing does.
        text: the block.
        says: the comments right before it by their keyword: "setup" is Python that runs before it,
            "file" the name under which it is saved, "needs" a module without which it is passed
            over, "run" has a shell block executed, "output" says
            that a text is what that printed, and "not run" is why a block cannot be.
    """

    page: str
    line: int
    language: str
    text: str
    says: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where the block is, as compilers write it."""
        return f"{self.page}:{self.line}"


@cache
def all_blocks() -> dict[Path, list[Block]]:
    """Those of each page of PAGES. Tests ask for them when they run: reading all takes a second."""
    return {page: blocks_of(page) for page in PAGES}


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a page in order; what is indented in place of fenced has the language ""."""
    found, says = [], {}
    for token in MarkdownIt().enable("table").parse(path.read_text()):
        if token.type == "html_block" and (comment := _COMMENT.match(token.content.strip())):
            says[comment[1]] = comment[2] or ""
            continue
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            line = token.map[0] + (2 if token.type == "fence" else 1)
            page = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
            found.append(Block(page, line, token.info.strip(), token.content, says))
        says = {}
    return found
