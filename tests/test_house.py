"""The size of classes, and what packages say of themselves. Which package may import
which is in pyproject.toml, [tool.importlinter]."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = ("hetero", "offload", "native", "bench", "tests")


def sources() -> list[Path]:
    """Every source file, relative to the root; what a build or a run left behind is none."""
    suffixes = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh"}
    return sorted(
        path.relative_to(ROOT)
        for tree in TREES
        for path in (ROOT / tree).rglob("*")
        if path.suffix in suffixes and path.is_file()
    )


class Size(NamedTuple):
    """Numbers of a class by which a second noun inside it shows."""

    methods: int
    attributes: int  # assigned in __init__
    arguments: int  # of __init__, without self

    def within(self, other: Size) -> bool:
        return all(mine <= limit for mine, limit in zip(self, other, strict=True))


LARGEST = Size(methods=25, attributes=12, arguments=7)

# Names of classes that mean two things, most of which another project has chosen. Whoever renames a
# class deletes its entry; no name comes to the list.
NAMES_OF_SEVERAL = {
    "Case",
    "Collective",
    "DeepSpeedPeer",
    "Layout",
    "Managed",
    "Peer",
    "Plan",
    "Program",
    "Shape",
}
# Constructors whose arguments another project or torch chose.
FOREIGN_SIGNATURES = ("hetero/compat/", "hetero/api/optimizers.py", "hetero/tiling/tiled_linear.py")


def size_of(class_: ast.ClassDef) -> Size:
    methods = [n for n in class_.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    init = next((method for method in methods if method.name == "__init__"), None)
    if init is None:
        return Size(len(methods), 0, 0)
    attributes = {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    arguments = len(init.args.args) + len(init.args.kwonlyargs) - 1
    return Size(len(methods), len(attributes), arguments)


def classes() -> Iterator[tuple[str, Size]]:
    """Every class of the product as "file:name", and its size."""
    for path in sources():
        if path.suffix == ".py" and path.parts[0] != "tests":
            foreign = str(path).startswith(FOREIGN_SIGNATURES)
            for node in ast.walk(ast.parse((ROOT / path).read_text())):
                if isinstance(node, ast.ClassDef):
                    size = size_of(node)
                    yield f"{path}:{node.name}", size._replace(arguments=0) if foreign else size


def test_a_class_is_one_noun() -> None:
    large = {name: size for name, size in classes() if not size.within(LARGEST)}
    assert not large, "these have more methods, attributes or arguments than they may have"


def test_a_name_is_of_one_class() -> None:
    names = Counter(name.rpartition(":")[2] for name, _ in classes())
    shared = {name for name, count in names.items() if count > 1 and not name.startswith("_")}
    assert shared <= NAMES_OF_SEVERAL, "another class has this name, and a reader takes it for that"


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


def test_native_code_has_no_streams() -> None:
    """They crash where the extension has a C++ library of its own beside torch's."""
    streams = {"<fstream>", "<iomanip>", "<iostream>", "<sstream>"}
    for path in sources():
        if path.parts[0] == "native" and path.suffix in (".cpp", ".h"):
            assert not [name for name in streams if name in (ROOT / path).read_text()], path


def test_torch_distributed_checkpoint_is_imported_where_it_is_used() -> None:
    """Its import takes as long as half of torch's; the modules that need it are imported late."""
    slow = re.compile(
        r"^from (?:torch\.distributed\.checkpoint|hetero\.checkpoint\.dcp\.(?!metadata\b))",
        re.MULTILINE,
    )
    found = [path for path in (ROOT / "hetero").rglob("*.py") if slow.search(path.read_text())]
    assert found
    assert {path.parent for path in found} == {ROOT / "hetero" / "checkpoint" / "dcp"}
