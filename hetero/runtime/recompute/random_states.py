"""States of random number generators, so that a call that is made again draws the same numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch


class _Source(Protocol):
    """A generator of random numbers."""

    def get(self) -> Any:
        """Its state, of which later numbers are no part."""

    def set(self, state: Any) -> None:
        """Goes back to a state."""


class _OfTorch:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def get(self) -> Any:
        return self._generator.get_state()

    def set(self, state: Any) -> None:
        self._generator.set_state(state)


class _OfPython:
    def __init__(self, generator: Any) -> None:
        self._generator = generator  # a random.Random, or the module

    def get(self) -> Any:
        return self._generator.getstate()

    def set(self, state: Any) -> None:
        self._generator.setstate(state)


class _OfNumpy:
    def __init__(self, generator: Any) -> None:
        self._generator = generator  # a BitGenerator

    def get(self) -> Any:
        return self._generator.state

    def set(self, state: Any) -> None:
        self._generator.state = state


class _OfNumpyLegacy:
    """It has half a pair of normal numbers beside its bits."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator  # a RandomState, or the module

    def get(self) -> Any:
        return self._generator.get_state(legacy=False)

    def set(self, state: Any) -> None:
        self._generator.set_state(state)


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers, and its state can be put back."""
    return _source(value) is not None


def _source(value: Any) -> _Source | None:
    if isinstance(value, torch.Generator):
        return _OfTorch(value)
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else _OfPython(value)
    # (numpy is no dependency; what is not imported draws nothing.)
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.Generator):
        return _OfNumpy(value.bit_generator)
    if isinstance(value, numpy.BitGenerator):
        return _OfNumpy(value)
    return _OfNumpyLegacy(value) if isinstance(value, numpy.RandomState) else None


def _of_process() -> Iterator[_Source]:
    yield _OfTorch(torch.default_generator)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield from map(_OfTorch, torch.cuda.default_generators)
    yield _OfPython(random)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield _OfNumpyLegacy(numpy)


class RandomStates:
    """The states of some generators at one moment, the process's own ones among them."""

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        """`generators`: beside those that the process has: is_generator() is true of each."""
        own = (_source(each) for each in generators)
        self._states = [(s, s.get()) for s in (*_of_process(), *own) if s is not None]

    def keep_drawn(self) -> None:
        """Keeps those alone whose states are others now: it forgets who has drawn nothing."""
        self._states = [(s, old) for s, old in self._states if not _is_same(old, s.get())]

    def put_back(self) -> None:
        """Each generator goes back to its state, unless it is in that."""
        for source, state in self._states:
            if not _is_same(state, source.get()):
                source.set(state)


def _is_same(first: Any, second: Any) -> bool:
    """Compares states, which are numbers, tensors and arrays in tuples and dicts."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_is_same(first[k], second[k]) for k in first)
    if hasattr(first, "tobytes"):
        return bool(first.tobytes() == second.tobytes())
    return bool(first == second)
