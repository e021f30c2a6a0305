"""What a call of a block finds beside its arguments, its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hetero.runtime.recompute.random_states import RandomStates, is_generator
from hetero.runtime.recompute.reach import ATOMS

_OF_TORCH = frozenset(vars(torch.nn.Module()))  # attributes that each module has
_SAME = object()  # stands for a value of the program's that the call has left in its place


class Surroundings:
    """The attributes of a block's modules, states of random numbers, and autocast, as one call has
    found them; it puts them back for the time that the call is made again."""

    def __init__(self, block: torch.nn.Module, generators: Sequence[Any]) -> None:
        """
        Args:
            block: whose call begins now.
            generators: of random numbers, that it can reach. Those that its modules have got since
                they were searched are found here.
        """
        modules = list(block.modules())
        self._attributes = [dict(vars(each)) for each in modules]
        known = set(map(id, generators))
        self._generators = [*generators]
        for attributes in self._attributes:
            for name, value in attributes.items():
                if type(value) in ATOMS or name in _OF_TORCH or id(value) in known:
                    continue
                if is_generator(value):
                    self._generators.append(value)
        self._autocast = [_autocast(kind) for kind in ("cpu", "cuda")]
        self._random = RandomStates(self._generators)

    def settle(self, block: torch.nn.Module) -> None:
        """The call has ended: what it has found and not changed is not kept."""
        self._random.keep_drawn()
        for module, attributes in zip(block.modules(), self._attributes, strict=False):
            now = vars(module)
            for name, value in attributes.items():
                if type(value) not in ATOMS and now.get(name) is value:
                    attributes[name] = _SAME

    @contextmanager
    def put_back(self, block: torch.nn.Module) -> Iterator[None]:
        """Inside it all is as the call has found it; after it, as before."""
        modules = list(block.modules())
        before = [dict(vars(each)) for each in modules]
        random = RandomStates(self._generators)
        with ExitStack() as contexts:
            for kind, enabled, dtype in self._autocast:
                if (kind, enabled, dtype) != _autocast(kind):
                    contexts.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            try:
                if len(modules) == len(self._attributes):
                    for module, attributes in zip(modules, self._attributes, strict=True):
                        _set_attributes(module, attributes)
                self._random.put_back()
                yield
            finally:
                random.put_back()
                for module, attributes in zip(modules, before, strict=True):
                    _set_attributes(module, attributes)


def _set_attributes(module: torch.nn.Module, attributes: dict[str, Any]) -> None:
    now = vars(module)
    now.update({name: value for name, value in attributes.items() if value is not _SAME})
    for name in now.keys() - attributes.keys():
        del now[name]


def _autocast(kind: str) -> tuple[str, bool, torch.dtype]:
    """A kind of device, whether it casts now, and to what."""
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
