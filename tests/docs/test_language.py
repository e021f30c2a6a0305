"""The pages that users read: how many words they have, and words that they do without."""

from __future__ import annotations

import re

from tests.support.documents.blocks import USER_PAGES

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


MOST_WORDS = 12_000
# A clause as the subject hides who does what; a sentence begins with its actor.
BEGINNINGS = {"What", "Whether", "Those", "Of"}
# Each with what to write in its place.
WORDS = {
    r"beside\b": "compared with, next to, in addition to",
    r"likewise\b": "also",
    r"(?:whoever|anybody|somebody)\b": "name the actor",
    r"comes? of\b": "results from, or the result itself",
    r"so many\b": "a number of",
    r"what autograd (?:saves|keeps|holds)\b": "activations",
    r"means of gradients\b": "gradient reduction",
    r"products\b": "matmuls",
    r"of (?:[A-Z]\w+ )?\w+'s(?=[,.;:|)]| (?:that|itself|in)\b)": "of hetero, a hetero optimizer",
    r"(?:goes|go) on\b": "continue, resume",
    r"takes? [^.|]{1,40} to (?:about|less|one)\b": "reduces",
    r"is of use\b": "helps",
    r"(?<=, )too\b": "also, as well",
}


def test_a_user_has_little_to_read() -> None:
    counts = {page.name: len(words_of(page.read_text())) for page in USER_PAGES}
    assert sum(counts.values()) <= MOST_WORDS, counts


def test_sentences_begin_with_their_subject() -> None:
    begun = {page.name: set(beginnings_of(page.read_text())) for page in USER_PAGES}
    assert not {name: words & BEGINNINGS for name, words in begun.items() if words & BEGINNINGS}


def test_words() -> None:
    found = [
        f"{page.name}: {text[max(0, hit.start() - 40) : hit.end() + 20]!r}: {instead}"
        for page in USER_PAGES
        for text in [without_code(page.read_text())]
        for word, instead in WORDS.items()
        for hit in re.finditer(rf"\b(?:{word})", text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
