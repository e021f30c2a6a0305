"""States of random number generators, so that a call that is made again draws the same numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch


class _Source(NamedTuple):
    """How the state of a generator is read, of which later numbers are no part, and put back."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers, and its state can be put back."""
    return _source(value) is not None


def _source(value: Any) -> _Source | None:
    if isinstance(value, torch.Generator):
        return _Source(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        is_system = isinstance(value, random.SystemRandom)
        return None if is_system else _Source(value.getstate, value.setstate)
    # (numpy is no dependency; what is not imported draws nothing.)
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        return _of_numpy_legacy(value)
    bits = value.bit_generator if isinstance(value, numpy.Generator) else value
    if not isinstance(bits, numpy.BitGenerator):
        return None
    return _Source(lambda: bits.state, partial(setattr, bits, "state"))


def _of_numpy_legacy(generator: Any) -> _Source:
    """Of a RandomState, or the module: it has half a pair of normal numbers beside its bits."""
    return _Source(partial(generator.get_state, legacy=False), generator.set_state)


def _of_process() -> Iterator[_Source]:
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    yield from (_Source(each.get_state, each.set_state) for each in generators)
    yield _Source(random.getstate, random.setstate)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield _of_numpy_legacy(numpy)


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
