"""initialize() by the first training forward, for loops that make the optimizer themselves.

A Hugging Face Trainer is given the class of the optimizer, and calls the model with one that no
user code has seen. A model that was built in ZeroInitContext has its options: nothing is missing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from hetero.api.optimizer import HybridOptimizer, unmanaged
from hetero.setup.construction import ConstructionArena
from hetero.setup.initialize import initialize
from hetero.stand_ins.construction_uses import arena_of

_waiting: weakref.WeakSet[ConstructionArena] = weakref.WeakSet()
_plain_call: Callable[..., Any] = torch.nn.Module.__call__


def await_forward(arena: ConstructionArena) -> None:
    """From now on the first training forward of the model that the arena has initializes it.

    Unless initialize() was called before; and only if one optimizer of hetero, and no more, was
    made from its parameters.
    """
    _waiting.add(arena)
    torch.nn.Module.__call__ = _call  # type: ignore[method-assign]


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """torch.nn.Module.__call__(), while some model waits. (A hook could not add the hooks that
    initialize() adds to the call that has begun.)"""
    if torch.compiler.is_compiling():  # what is traced lies inside of a call that was not
        return _plain_call(module, *args, **kwargs)
    if module.training and torch.is_grad_enabled():
        for arena in list(_waiting):
            if arena.is_closed:
                _waiting.discard(arena)
            else:
                _initialize(module, arena)
    if not _waiting:
        torch.nn.Module.__call__ = _plain_call  # type: ignore[method-assign]
    return _plain_call(module, *args, **kwargs)


def _initialize(module: torch.nn.Module, arena: ConstructionArena) -> None:
    optimizers = [optimizer for optimizer in unmanaged if _is_of(optimizer, arena)]
    if len(optimizers) == 1 and arena.has_no_others_than(module.parameters()):
        initialize(module, optimizers[0])


def _is_of(optimizer: HybridOptimizer, arena: ConstructionArena) -> bool:
    """Whether it was made of some of the arena's parameters."""
    return any(arena_of(p) is arena for group in optimizer.param_groups for p in group["params"])
