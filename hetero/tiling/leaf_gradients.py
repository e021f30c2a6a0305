"""Gradients that a parameter gets at once, in the middle of a backward.

A parameter that is used in two places of a graph gets one gradient at the end of backward: until
then autograd holds the first one, to add the second one to it. What is accumulated at once here is
kept where gradients are kept, and the second one is added to that, as that of another backward is.

In one backward the result is the sum that autograd makes, rounded to the grad dtype: the same bits
if that is the compute dtype. If it is wider, the sum is not rounded to the compute dtype first.
With micro-batches it is (kept + head's) + embedding's in place of kept + (head's + embedding's). A
parameter's hooks are called twice.
"""

from __future__ import annotations

from typing import Any

import torch


def accumulate_now(param: torch.Tensor, grad: torch.Tensor) -> bool:
    """Accumulates a gradient of a parameter, inside of a backward.

    Returns False, with nothing done, if autograd must have it: this backward accumulates nothing
    (torch.autograd.grad), or not in this parameter; or there are several ranks, between which each
    accumulated gradient would be a message more.
    """
    if _are_several_ranks() or not param.is_leaf:
        return False
    with torch.enable_grad(), torch._C.DisableTorchFunction():
        node: Any = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    try:
        if not torch._C._will_engine_execute_node(node):
            return False
    except RuntimeError:  # torch.autograd.grad() of the parameter
        return False
    with torch.enable_grad():
        given: torch.Tensor = _Given.apply(param, grad)  # type: ignore[no-untyped-call]
        given.backward()
    return True


def _are_several_ranks() -> bool:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1


class _Given(torch.autograd.Function):
    """A scalar of which a parameter has a gradient that is known."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.grad = grad
        return grad.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = ctx.grad
        del ctx.grad  # autograd need not copy what nobody else holds
        return grad, None
