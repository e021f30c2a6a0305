"""A hook on a module that stays behind when the module is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload.errors import HeteroError


class _NotScriptableError(HeteroError, AttributeError):
    """Whoever may do without a name sees that there is none."""


class ModelHook:
    """Calls `function`; in a copy of the module, and in what is unpickled, nothing.

    A copy of a managed model, by copy.deepcopy() or pickle, has plain parameters, so it must not
    have the hooks either.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def __name__(self) -> str:
        """torch.jit.script() alone needs one, to compile the hook."""
        raise _NotScriptableError(
            "torch.jit.script() cannot compile the hooks that bring in the parameters of a managed "
            "model, nor what a copy has in their place; build the model anew, without hetero, load "
            "state_dict() into it, and script that"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> Any:
        return _unpickled, ()


def no_hook(*args: Any, **kwargs: Any) -> None:
    """What a copy has instead."""


def _unpickled() -> Callable[..., None]:
    return no_hook
