"""Sizes of classes, docstrings, words of the glossary, versions, extras and type stubs.

Which package may import which is in pyproject.toml, [tool.importlinter].
"""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch.utils._device import _device_constructors

import hetero
from hetero.cli.outcome import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
TREES = ("hetero", "offload", "native", "bench", "tests")


@cache
def sources() -> list[Path]:
    """Every source file, relative to the root; what a build or a run left behind is none."""
    suffixes = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh"}
    return sorted(
        path.relative_to(ROOT)
        for tree in TREES
        for path in (ROOT / tree).rglob("*")
        if path.suffix in suffixes and path.is_file()
    )


@cache
def trees() -> dict[Path, ast.Module]:
    """The product's files in Python, parsed, relative to the root."""
    return {
        path: ast.parse((ROOT / path).read_text())
        for path in sources()
        if path.suffix == ".py" and path.parts[0] != "tests"
    }


class Size(NamedTuple):
    """Numbers of a class by which a second noun inside it shows."""

    methods: int
    attributes: int  # assigned in __init__
    arguments: int  # of __init__, without self

    def within(self, other: Size) -> bool:
        return all(mine <= limit for mine, limit in zip(self, other, strict=True))


LARGEST = Size(methods=25, attributes=12, arguments=7)

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
    for path, tree in trees().items():
        foreign = str(path).startswith(FOREIGN_SIGNATURES)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                size = size_of(node)
                yield f"{path}:{node.name}", size._replace(arguments=0) if foreign else size


def test_a_class_is_one_noun() -> None:
    large = {name: size for name, size in classes() if not size.within(LARGEST)}
    assert not large, "these have more methods, attributes or arguments than they may have"


def test_a_name_is_of_one_class() -> None:
    names = Counter(name.rpartition(":")[2] for name, _ in classes())
    shared = {name for name, count in names.items() if count > 1 and not name.startswith("_")}
    assert not shared, "another class has this name, and a reader takes it for that"


def test_a_package_is_one_sentence() -> None:
    packages = [path for path in sources() if path.name == "__init__.py"]
    wrong = []
    for package in packages:
        said = ast.get_docstring(ast.parse((ROOT / package).read_text())) or ""
        sentence = said.split("\n\n")[0].replace("\n", " ")
        if not sentence.endswith(".") or ". " in sentence:
            wrong.append(f"{package}: {sentence}")
    assert packages
    assert not wrong


def test_a_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in trees() if path.parts[0] != "native"}
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


def test_tensors_say_where_they_are_made() -> None:
    """A program may make its own on a GPU by default, where the core's would be of no use."""
    makers = {function.__name__ for function in _device_constructors()}
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        if path.parts[0] in ("hetero", "offload") and path.parts[1] not in ("cli", "job")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in makers
        if ast.unparse(node.func).startswith("torch.")
        if not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert not wrong, "\n".join(wrong)


# Docstrings against the code


def test_documented_arguments_exist() -> None:
    wrong = [
        f"{path}:{function.lineno}: {function.name}() has no `{name}`"
        for path, tree in trees().items()
        for function, names in _documented(tree)
        for name in names - _parameters(function)
    ]
    assert not wrong, "\n".join(wrong)


def test_an_unknown_argument_is_found() -> None:
    docstring = "One.\n\n    Args:\n        a, c: two\n            more: of it\n    "
    text = f'def f(a, *, b):\n    """{docstring}"""'
    ((function, names),) = _documented(ast.parse(text))
    assert names - _parameters(function) == {"c"}


def test_what_a_test_says_it_tests_exists() -> None:
    first = re.compile(r'"""((?:hetero|offload)/[\w/]+):')
    named = {
        path: found[1]
        for path in (ROOT / "tests").rglob("test_*.py")
        if (found := first.match(path.read_text()))
    }
    gone = [f"{path.name}: {name}" for path, name in named.items() if not _exists(name)]
    assert named
    assert not gone, "\n".join(gone)


def _exists(name: str) -> bool:
    """Whether there is such a module or package; a folder left empty by a move is none."""
    return (ROOT / f"{name}.py").exists() or any((ROOT / name).glob("*.py"))


def _documented(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, set[str]]]:
    """Functions with the names under "Args:" of their docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            _, found, rest = (ast.get_docstring(node) or "").partition("Args:\n")
            if found:
                section = re.split(r"\n\n|\n(?=\S)", rest)[0]
                heads = re.findall(r"^ {4}((?:\*{0,2}\w+(?:, )?)+):", section, re.MULTILINE)
                yield node, {name.lstrip("*") for head in heads for name in head.split(", ")}


def _parameters(function: ast.FunctionDef) -> set[str]:
    spec = function.args
    listed = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    return {argument.arg for argument in listed if argument is not None}


# docs/glossary.md

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


def test_a_name_in_the_glossary_exists() -> None:
    gone = []
    for name in NAMES:
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            gone.append(name)
    assert NAMES
    assert not gone, "these are in docs/glossary.md and not in the code"


def test_no_term_stands_twice() -> None:
    terms = re.findall(r"^\| ([^|]+?) \*? ?\|", GLOSSARY, re.MULTILINE)
    terms = [term for term in terms if term not in ("term", "---")]
    assert len(terms) == len(set(terms))


def test_retired_words_are_in_no_name() -> None:
    found = {
        f"{path}:{line}: {name} (the glossary says {RETIRED[part.lower()]!r})"
        for path in trees()
        for line, name in _names(ROOT / path)
        for part in re.split(r"_|(?<=[a-z])(?=[A-Z])", name)
        if part.lower() in RETIRED
    }
    assert not found, "\n".join(sorted(found))


def _names(path: Path) -> Iterator[tuple[int, str]]:
    """Names of Python in a file that has a retired word in any place."""
    if re.search("|".join(RETIRED), path.read_text(), re.IGNORECASE):
        with open(path, "rb") as source:
            for token in tokenize.tokenize(source.readline):
                if token.type == tokenize.NAME:
                    yield token.start[0], token.string


# What says of hetero what it is

PROJECT = (ROOT / "pyproject.toml").read_text()

# What stubtest finds and is meant: names for type checkers alone, pybind11's metaclass, and
# pybind11's constructor of classes that have none.
MEANT = re.compile(
    r"Name is not present at runtime$|metaclass differs$|__init__ is inconsistent, stub does not"
    r' have \*args parameter "args"$'
)


def test_versions_agree() -> None:
    (version,) = re.findall(r'^version = "(.*)"', PROJECT, re.MULTILINE)
    assert hetero.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_what_an_extra_is_said_to_bring_it_brings() -> None:
    _, _, extras = PROJECT.partition("[project.optional-dependencies]")
    for extra, modules in EXTRAS.items():
        (listed,) = re.findall(rf"^{extra} = \[(.*?)\]$", extras, re.MULTILINE | re.DOTALL)
        for module in modules:
            assert f'"{module}>=' in listed, (extra, module)


def test_the_stubs_are_those_of_the_extension() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "offload._native", "--concise"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = checked.stdout.splitlines()
    assert lines, checked.stderr
    assert not [line for line in lines if not MEANT.search(line)]
