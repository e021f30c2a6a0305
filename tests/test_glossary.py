"""docs/glossary.md against the code: every name in it exists, and retired words are gone."""

from __future__ import annotations

import importlib
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
NAMES = sorted(set(re.findall(r"`((?:hetero|offload)\.[\w.]+)`", GLOSSARY)))
# Words that this project once used for what the glossary names; as parts of Python names.
RETIRED = {
    "bank": "chunk group",
    "banks": "chunk group",
    "lease": "pin",
    "leases": "pin",
    "leased": "pin",
    "payload": "state kind",
    "payloads": "state kind",
    "ferry": "home copy",
    "drain": "gradient offload",
    "drained": "gradient offload",
    "stepper": "UpdateTasks",
    "seats": "ParamState",
    "comfort": "headroom",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_the_glossary_exists(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return
    pytest.fail(f"{name} is in docs/glossary.md and not in the code")


def test_no_term_stands_twice() -> None:
    terms = re.findall(r"^\| ([^|]+?) \*? ?\|", GLOSSARY, re.MULTILINE)
    terms = [term for term in terms if term not in ("term", "---")]
    assert len(terms) == len(set(terms))


@pytest.mark.parametrize("top", ["hetero", "offload", "bench"])
def test_retired_words_are_in_no_name(top: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}: {name} (the glossary says {RETIRED[part.lower()]!r})"
        for path in sorted((ROOT / top).rglob("*.py"))
        for line, name in _names(path)
        for part in re.split(r"_|(?<=[a-z])(?=[A-Z])", name)
        if part.lower() in RETIRED
    }
    assert not found, "\n".join(sorted(found))


def _names(path: Path) -> Iterator[tuple[int, str]]:
    with open(path, "rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string
