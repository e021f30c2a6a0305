"""torch.optim's names for hetero's optimizers, and torch's own optimizers made hetero's.

An adapter is given the optimizer that the loop has made, and loops, schedulers and callbacks keep
it: they set a group's "lr", call step(), save its state_dict(). So it becomes one of hetero's
itself (its class changes), instead of being replaced by another one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from hetero.api.optimizer import HybridOptimizer, unmanaged
from hetero.api.optimizers import Adam, AdamW
from hetero.api.optimizers import HybridAdagrad as Adagrad
from hetero.api.optimizers import HybridMuon as Muon
from hetero.api.optimizers import HybridSGD as SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Muon"]

# (torch.optim.Muon is newer than the oldest torch that hetero runs with.)
_KINDS: dict[str, type[HybridOptimizer]] = {
    "AdamW": AdamW,
    "Adam": Adam,
    "SGD": SGD,
    "Adagrad": Adagrad,
    "Muon": Muon,
}


def hybrid_optimizer(optimizer: torch.optim.Optimizer) -> HybridOptimizer:
    """Makes an optimizer of torch's one of hetero's; the object and its param groups stay.

    Args:
        optimizer: torch.optim.Adam, AdamW, SGD, Adagrad or Muon, before its first step; or one of
            hetero's, which stays as it is.

    Returns:
        The same object.

    Raises:
        ValueError: it is another one, it was stepped already, its step() was replaced, or it has
            options that hetero's has not. It is as it was.
    """
    if isinstance(optimizer, HybridOptimizer):
        return optimizer
    name = type(optimizer).__name__
    if name not in _KINDS or type(optimizer) is not getattr(torch.optim, name, None):
        raise ValueError(
            f"the optimizer must be one of hetero's, or torch.optim.{', '.join(_KINDS)}, not "
            f"{name}: the update runs where the state lives"
        )
    # (Adagrad has its states, with steps of 0, from the beginning.)
    if any(
        float(state.get("step", 0)) or state.get("momentum_buffer") is not None
        for state in optimizer.state.values()
    ):
        raise ValueError(
            f"this {name} was stepped already; give it before its first step, and load its state "
            f"afterwards"
        )
    own_step = optimizer.__dict__.get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"step() of this {name} was replaced by {own_step!r}, which hetero's update would not "
            f"go through; register_step_pre_hook() and register_step_post_hook() work"
        )
    defaults = dict(optimizer.defaults)
    if name in ("Adam", "AdamW"):
        defaults["adamw_mode"] = defaults.pop("decoupled_weight_decay", name == "AdamW")
    kind: Any = _KINDS[name]
    made: HybridOptimizer = kind([dict(group) for group in optimizer.param_groups], **defaults)
    unmanaged.discard(made)
    _become(optimizer, made, tracked=own_step is not None)
    assert isinstance(optimizer, HybridOptimizer)
    return optimizer


def _become(optimizer: Any, made: HybridOptimizer, tracked: bool) -> None:
    """Makes `optimizer` what `made` is; its groups, defaults and hooks stay the same objects.

    `tracked`: a scheduler of learning rates has wrapped step(), to see whether it is called.
    """
    for kept, new in zip(
        (*optimizer.param_groups, optimizer.defaults),
        (*made.param_groups, made.defaults),
        strict=True,
    ):
        kept.clear()
        kept.update(new)
    own = vars(optimizer)
    for name in ("state", "step"):
        own.pop(name, None)
    own.update({name: value for name, value in vars(made).items() if name not in own})
    optimizer.__class__ = type(made)
    unmanaged.add(optimizer)
    if tracked:
        _track_steps(optimizer)


def _track_steps(optimizer: Any) -> None:
    """Wraps step() as torch's schedulers do, which warn if none has, or if it was not called."""
    this, update = weakref.ref(optimizer), type(optimizer).step

    def step(*args: Any, **kwargs: Any) -> Any:
        called: Any = this()
        called._opt_called = True
        return update(called, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
