"""The text of a page: what is read as sentences, without code, comments and addresses."""

from __future__ import annotations

import re

# Not read as sentences: comments, fenced blocks, lines of the API reference, addresses of links.
_NO_PROSE = re.compile(
    r"<!--.*?-->|^ *```.*?^ *```|^::: .*?(?:\n\n|\Z)|(?<=\])\([^)]*\)", re.DOTALL | re.MULTILINE
)
_CODE = re.compile(r"`[^`\n]*`")
# A sentence begins after a full stop, and in a new paragraph, list item, cell or heading.
_BEGIN = re.compile(
    r"(?:[.!?:] +|\n\n|\| *|^ *[-*] +|^ *\d+\. +|^#+ +|\A)[\"*_(\[]*(\w+)", re.MULTILINE
)


def prose_of(text: str) -> str:
    """The page without what is no prose; code spans stay."""
    return _NO_PROSE.sub(" ", text)


def words_of(text: str) -> list[str]:
    """The words of a page's prose, code spans included."""
    return [word for word in prose_of(text).split() if re.search(r"\w", word)]


def beginnings_of(text: str) -> list[str]:
    """The first word of each sentence, cell and heading."""
    return _BEGIN.findall(_CODE.sub("`", prose_of(text)))


def without_code(text: str) -> str:
    """The prose in one line, without code spans."""
    return " ".join(_CODE.sub(" ", prose_of(text)).split())
