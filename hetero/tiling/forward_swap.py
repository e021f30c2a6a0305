"""Another forward for modules that stay as they are otherwise, and a handle that takes it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ForwardSwap:
    """Gives modules other forwards, until it is removed; a context manager removes it at its end.

    A module's class changes, as torch's parametrizations change it: its parameters, hooks, names
    and state stay. Copies of the module, and what is unpickled, are of the class that it had.
    """

    def __init__(
        self,
        *swaps: tuple[torch.nn.Module, Callable[..., Any]],
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Each forward is called with its module first; `at_end` is called by remove().

        Raises ValueError if somebody has put another forward into a module itself.
        """
        for module, _ in swaps:
            if "forward" in module.__dict__:
                raise ValueError(
                    f"a {type(module).__name__} has a forward of its own in place of its class's "
                    f"(accelerate and others set one); tile before that is done"
                )
        self._swapped: list[tuple[torch.nn.Module, type, type]] = []
        for module, own in swaps:
            plain = type(module)
            module.__class__ = swapped_class(plain, plain.__name__, (), forward=own)
            self._swapped.append((module, plain, type(module)))
        self._at_end = at_end

    def remove(self) -> None:
        """Gives the modules their classes back; idempotent.

        Raises RuntimeError if a class was changed once more since then.
        """
        for module, plain, swapped in reversed(self._swapped):
            if type(module) is swapped:
                module.__class__ = plain
            elif type(module) is not plain:
                raise RuntimeError(
                    f"the class of a {plain.__name__} was changed to {type(module).__name__} since "
                    f"its forward was swapped; undo that first"
                )
        self._swapped.clear()
        self._at_end()

    def __enter__(self) -> ForwardSwap:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def swapped_class(plain: type, name: str, bases: tuple[type, ...], **members: Any) -> Any:
    """A class for a module of the class `plain`, whose copies stay plain, as pickles do.

    Args:
        plain: is the last base of the class.
        name: of the class.
        bases: those before `plain`.
        members: what the class itself has.
    """

    def reduce_ex(module: torch.nn.Module, protocol: Any) -> Any:
        made: Any = object.__reduce_ex__(module, 2)
        return (_new, (plain,), *made[2:])

    members |= {"__reduce_ex__": reduce_ex, "__module__": plain.__module__}
    return type(name, (*bases, plain), {"__doc__": plain.__doc__, **members})


def _new(plain: type[torch.nn.Module]) -> torch.nn.Module:
    """An empty module, for a copy to fill. (copyreg.__newobj__ may make the same class only.)"""
    return plain.__new__(plain)
