"""One project whose own tests are run over hetero's adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


def _no_names(module: str) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Peer:
    """A project, the modules that stand in for its own, and its tests.

    Attributes:
        name: of the project, as the command takes it.
        stand_ins: a package of the project, and the package of hetero that has its names. Imports
            of the former, and of all below it, get the latter's modules; a name that hetero has
            not is a Missing, which raises NotThere when it is used.
        tests: the ones that are run by default, relative to `folder`.
        folder: where the project's tests are run, relative to its repository.
        names: of a module of the project, by its full name, further names that its tests import
            and hetero's users do not need.
        overlays: changes a module of another project after it was imported (by its full name).
        internals: a regular expression: an AttributeError that it matches is about the project's
            own insides.
    """

    name: str
    stand_ins: Mapping[str, str]
    tests: tuple[str, ...]
    folder: str = "tests"
    names: Callable[[str], Mapping[str, Any]] = _no_names
    overlays: Mapping[str, Callable[[ModuleType], None]] = field(default_factory=dict)
    internals: str = r"(?!)"
