"""What a block's forward can reach beside its tensors: generators, and data of the program.

A call that is made again draws the same random numbers and finds the same options, because both are
put back. A list that it appends to, a dict in which it counts, or a variable of the program cannot
be put back in general, so the first call of each kind is watched: if it changes one of them, calls
of its kind are not made again. Found are attributes of the block's modules and of their classes,
containers and objects in these, and what their functions name: variables of theirs and of their
modules. Libraries are not searched, torch and this package among them.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from hetero.runtime.recompute.random_states import is_generator

_MOST = 20_000  # objects that are looked at, and elements of a container
_MOST_BYTES = 1 << 24  # of an array that is compared
# Values that nothing changes in place. What compares by value is first.
ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device))
_LIBRARIES = {"torch", "numpy", "transformers", "accelerate", "peft", "hetero", "offload"}
_LIBRARIES |= set(sys.stdlib_module_names) - {"__main__"}
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, SimpleNamespace, CellType)


class Reach:
    """The data that a block's forward can reach, as it was when this was made."""

    def __init__(self, block: torch.nn.Module) -> None:
        """
        Args:
            block: its submodules are searched, too.

        Attributes:
            generators: of random numbers.
            iterator: the name of an iterator, of which no state can be put back; None: it has none.
        """
        self.generators: list[Any] = []
        self.iterator: str | None = None
        self._modules = set(map(id, block.modules()))
        self._seen: set[int] = set()
        # Whatever can change in place: its name, and what it has now.
        self._data: list[tuple[str, Any, Hashable]] = []
        self._search(block)

    @property
    def changed(self) -> str | None:
        """The name of what has changed since; None: nothing has."""
        return next((name for name, each, had in self._data if _contents(each) != had), None)

    def _search(self, block: torch.nn.Module) -> None:
        left: list[tuple[str, Any]] = [("self", block)]
        while left and len(self._seen) < _MOST:
            name, each = left.pop()
            if type(each) in ATOMS or id(each) in self._seen:
                continue
            self._seen.add(id(each))
            left += self._visit(name, each)

    def _visit(self, name: str, each: Any) -> Iterable[tuple[str, Any]]:
        """Notes what it is, and gives what it leads to."""
        if isinstance(each, torch.nn.Module):
            return self._visit_module(name, each)
        if is_generator(each):
            self.generators.append(each)
        elif isinstance(each, FunctionType):
            return () if _is_of_library(each.__module__) else self._visit_function(name, each)
        elif isinstance(each, MethodType):
            return [(name, each.__func__), (name, each.__self__)]
        elif isinstance(each, functools.partial):
            return [(name, each.func), (name, each.args), (name, each.keywords)]
        elif isinstance(each, torch.Tensor) or hasattr(each, "tobytes"):
            self._data.append((name, each, _contents(each)))
        elif isinstance(each, _CONTAINERS) or _is_of_program(each):
            self._data.append((name, each, _contents(each)))
            return _parts(name, each)
        elif isinstance(each, Iterator):
            self.iterator = self.iterator or name
        return ()

    def _visit_module(self, name: str, module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        if id(module) not in self._modules:  # of the rest of the model its own numbers alone
            self._data.append((name, module, _contents(module)))
            return
        # Its own attributes are put back, and tensors have versions.
        for key, value in vars(module).items():
            if key == "_modules":
                yield from ((f"{name}.{k}", v) for k, v in value.items())
            elif key.endswith("_hooks"):
                yield from ((f"a hook of {name}", hook) for hook in list(value.values()))
            elif key not in ("_parameters", "_buffers", "_compiled_call_impl"):
                yield f"{name}.{key}", value
        for kind in type(module).__mro__:
            if not _is_of_library(kind.__module__):
                yield kind.__name__, kind

    def _visit_function(self, name: str, function: FunctionType) -> Iterable[tuple[str, Any]]:
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from ((f"{variable} in {function.__name__}()", cell) for variable, cell in free)
        yield name, function.__defaults__ or ()
        yield name, function.__kwdefaults__ or {}
        if vars(function):
            yield f"{function.__name__}()", vars(function)
        named = _Globals(function)
        self._data.append((f"a variable of {function.__module__}", named, _contents(named)))
        yield from named.found.items()


class _Globals:
    """The variables of its module that a function names."""

    def __init__(self, function: FunctionType) -> None:
        self._all = function.__globals__
        self._names = sorted(set(_names(function.__code__)) & self._all.keys())

    @property
    def found(self) -> dict[str, Any]:
        """Those that are there now, other modules excepted."""
        found = {name: self._all.get(name) for name in self._names}
        return {k: v for k, v in found.items() if not isinstance(v, ModuleType)}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:  # lambdas, comprehensions
        if isinstance(const, CodeType):
            yield from _names(const)


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _is_of_program(each: Any) -> bool:
    """Whether it is a class of the program's, or an object of one."""
    kind = each if isinstance(each, type) else type(each)
    return not (isinstance(each, (torch.Tensor, ModuleType)) or _is_of_library(kind.__module__))


def _members(each: Any) -> Any:
    """What a container or object has: a dict, or an iterable of values."""
    if isinstance(each, _Globals):
        return each.found
    if isinstance(each, CellType):
        try:
            return (each.cell_contents,)
        except ValueError:  # nothing is in it yet
            return ()
    if isinstance(each, _CONTAINERS) and not isinstance(each, SimpleNamespace):
        return each
    found = dict(getattr(each, "__dict__", {}))
    for kind in type(each).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(each, slot):
                found[slot] = getattr(each, slot)
    return found


def _parts(name: str, each: Any) -> list[tuple[str, Any]]:
    members = _members(each)
    if isinstance(members, dict):
        at = "{}[{!r}]" if isinstance(each, dict) else "{}.{}"
        parts = [(at.format(name, key), value) for key, value in list(members.items())[:_MOST]]
    else:
        parts = [(name, value) for value in list(members)[:_MOST]]
    if isinstance(each, type):  # of what a class has, functions and data
        return [part for part in parts if not part[0].endswith("__")]
    return parts


def _contents(each: Any) -> Hashable:
    """What it has now, to be compared; objects in it count as the same as long as they are."""
    if isinstance(each, torch.Tensor) or hasattr(each, "tobytes"):
        return _brief(each)
    members = _members(each)
    if isinstance(members, dict):
        kept = list(members.items())[:_MOST]
        if isinstance(each, torch.nn.Module):
            kept = [(key, value) for key, value in kept if type(value) in ATOMS]
        return len(members), tuple((_brief(key), _brief(value)) for key, value in kept)
    return len(members), tuple(map(_brief, list(members)[:_MOST]))


def _brief(value: Any) -> Hashable:
    if type(value) in ATOMS:
        return type(value), value
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    # An array of numpy's, or of Python's, which has no version.
    if hasattr(value, "tobytes") and getattr(value, "nbytes", 0) <= _MOST_BYTES:
        return id(value), hash(value.tobytes())
    return id(value)
