"""Another forward for a module that stays as it is otherwise, and handles that take it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class ForwardSwap:
    """Gives one module another forward, until it is removed.

    The module's class changes, as torch's parametrizations change it: its parameters, hooks, names
    and state stay. Copies of the module, and what is unpickled, are of the class that it had.
    """

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        """`forward` is called with the module first, in place of its own forward.

        Raises ValueError if somebody has put another one into the module itself.
        """
        plain = type(module)
        if "forward" in module.__dict__:
            raise ValueError(
                f"a {plain.__name__} has a forward of its own in place of its class's (accelerate "
                f"and others set one); tile before that is done"
            )
        self._module, self._plain = module, plain

        def reduce_ex(module: torch.nn.Module, protocol: Any) -> Any:
            made: Any = object.__reduce_ex__(module, 2)
            return (_new, (plain,), *made[2:])

        members = {
            "forward": forward,
            "__reduce_ex__": reduce_ex,
            "__doc__": plain.__doc__,
            "__module__": plain.__module__,
        }
        swapped = type(plain.__name__, (plain,), members)
        self._swapped = swapped
        module.__class__ = swapped

    @property
    def is_on(self) -> bool:
        """Whether the module still has this forward."""
        return type(self._module) is self._swapped

    def remove(self) -> None:
        """Gives the module its class back; idempotent.

        Raises RuntimeError if the class was changed once more since then.
        """
        if self.is_on:
            self._module.__class__ = self._plain
        elif type(self._module) is not self._plain:
            raise RuntimeError(
                f"the class of a {self._plain.__name__} was changed to "
                f"{type(self._module).__name__} since its forward was swapped; undo that first"
            )


def _new(plain: type[torch.nn.Module]) -> torch.nn.Module:
    """An empty module, for a copy to fill. (copyreg.__newobj__ may make the same class only.)"""
    return plain.__new__(plain)


class Swaps:
    """A handle of forwards that were swapped; a context manager that changes them back."""

    def __init__(
        self, swaps: Sequence[ForwardSwap], at_end: Callable[[], None] = lambda: None
    ) -> None:
        """`at_end` is called when they are changed back."""
        self._swaps, self._at_end = list(swaps), at_end

    def remove(self) -> None:
        """Makes the modules plain again; idempotent. Raises RuntimeError if others have changed
        them since."""
        for swap in reversed(self._swaps):
            swap.remove()
        self._swaps.clear()
        self._at_end()

    def __enter__(self) -> Swaps:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
