"""Modules of hetero under the names of another project's, in every process of a test run."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from bench.peers_tests.names import names_of
from bench.peers_tests.overlays import NotThere
from bench.peers_tests.peers import Peer


class Missing(type):
    """The type of names that hetero has not: they can be imported, and subclassed, not used."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_missing" in cls.__dict__:
            raise NotThere(cls.__dict__["_missing"])
        return super().__call__(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(f"{cls.__dict__.get('_missing', cls.__name__)}.{name}")

    def __instancecheck__(cls, value: object) -> bool:
        if "_missing" in cls.__dict__:
            raise NotThere(f"isinstance of {cls.__dict__['_missing']}")
        return super().__instancecheck__(value)


def missing(name: str) -> Any:
    """What stands for the project's `name`."""
    return Missing(name.rpartition(".")[2], (), {"_missing": name})


class _StandIn(ModuleType):
    """A module of the project: hetero's names, those of the tests, and Missing for all others."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.__dict__["__hetero__"]
        return getattr(found, name, None) or missing(f"{self.__name__}.{name}")


class _Overlaid(importlib.abc.Loader):
    """Loads a module as its own loader does, and changes it."""

    def __init__(self, loader: Any, change: Callable[[ModuleType], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for a peer's modules, and lays others over modules that are there."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._sought: set[str] = set()  # modules that other finders are being asked for

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if any(name == own or name.startswith(f"{own}.") for own in self._peer.stand_ins):
            return ModuleSpec(name, self, is_package=True)
        change = self._peer.overlays.get(name)
        if change is None or name in self._sought:
            return None
        self._sought.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._sought.discard(name)
        if spec is not None:
            spec.loader = _Overlaid(spec.loader, change)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        found = self._of_hetero(module.__name__)
        vars(module)["__hetero__"] = found
        names = {key: value for key, value in vars(found).items() if not key.startswith("__")}
        for name, value in {**names, **names_of(module.__name__)}.items():
            if getattr(value, "__package__", "").startswith("hetero.compat."):
                # A module below this one, which tests may use without an import.
                value = importlib.import_module(f"{module.__name__}.{name}")
            setattr(module, name, value)

    def _of_hetero(self, name: str) -> ModuleType:
        """hetero's module; an empty one if there is no such module."""
        package = max((own for own in self._peer.stand_ins if name.startswith(own)), key=len)
        found = self._peer.stand_ins[package] + name[len(package) :]
        try:
            return importlib.import_module(found)
        except ModuleNotFoundError as error:
            if error.name is None or not found.startswith(error.name):
                raise
            return ModuleType(found)


def install(peer: Peer) -> None:
    """Makes this process import the stand-ins, whatever else is installed."""
    sys.meta_path.insert(0, _Finder(peer))
