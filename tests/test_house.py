"""The size of files and folders, and what packages say of themselves. Which package may import
which is in pyproject.toml, [tool.importlinter]."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = ("hetero", "offload", "native", "bench", "tests")
MAX_LINES = 500
MAX_NOUNS = 12

# Each with the reason, and each to be deleted when the file or folder has become small enough.
LONG_FILES: dict[str, str] = {}
WIDE_FOLDERS: dict[str, str] = {}


def sources() -> list[Path]:
    """Every source file, relative to the root; what a build or a run left behind is none."""
    suffixes = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh"}
    return sorted(
        path.relative_to(ROOT)
        for tree in TREES
        for path in (ROOT / tree).rglob("*")
        if path.suffix in suffixes and path.is_file()
    )


def nouns_of_folders() -> dict[str, set[str]]:
    """The names of each folder's files, a header and its source as one. What every
    package or folder of tests may have, __init__.py and conftest.py, is none."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sources():
        if path.name not in ("__init__.py", "conftest.py"):
            found[str(path.parent)].add(path.stem)
    return found


def test_no_file_is_long() -> None:
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in sources()}
    long = {path: count for path, count in lines.items() if count > MAX_LINES}
    assert set(long) == set(LONG_FILES), long


def test_no_folder_is_wide() -> None:
    wide = {
        folder: sorted(nouns)
        for folder, nouns in nouns_of_folders().items()
        if len(nouns) > MAX_NOUNS
    }
    assert set(wide) == set(WIDE_FOLDERS), wide


@pytest.mark.parametrize(
    "package", [path for path in sources() if path.name == "__init__.py"], ids=str
)
def test_a_package_is_one_sentence(package: Path) -> None:
    said = ast.get_docstring(ast.parse((ROOT / package).read_text()))
    assert said, "no docstring"
    sentence = said.split("\n\n")[0].replace("\n", " ")
    assert sentence.endswith("."), sentence
    assert ". " not in sentence, sentence


@pytest.mark.parametrize("tree", ["hetero", "offload", "bench"])
def test_a_folder_of_modules_is_a_package(tree: str) -> None:
    folders = {path.parent for path in sources() if path.parts[0] == tree and path.suffix == ".py"}
    assert not [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()]
