"""Docstrings against the code: arguments are parameters, and what a test names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("top", ["hetero", "offload", "bench"])
def test_documented_arguments_exist(top: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{function.lineno}: {function.name}() has no `{name}`"
        for path in sorted((ROOT / top).rglob("*.py"))
        for function, names in _documented(ast.parse(path.read_text()))
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
