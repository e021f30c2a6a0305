"""The moment at which autograd has a parameter's gradient."""

from __future__ import annotations

import torch

from hetero.runtime.gradients.grad_intake import GradIntake
from hetero.state.managed_param import ManagedParam
from offload.interrupts import uninterrupted


class GradHook:
    """Hands each gradient of a parameter to GradIntake.keep().

    `.grad` holds the placeholder if there is a gradient already; it is taken away only when
    autograd is about to accumulate (torch.autograd.grad() does not), and put back if keeping
    fails. GradIntake.check() may refuse by raising.
    """

    def __init__(self, managed: ManagedParam, intake: GradIntake) -> None:
        self._managed = managed
        self._intake = intake
        self._nothing = False
        self._accumulating = False
        param = managed.param
        # The node that accumulates; its hooks last as long as it is referred to.
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            node = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._node: torch.autograd.graph.Node | None = node
        self._handles = [
            node.register_prehook(self._before),  # type: ignore[union-attr]
            param.register_post_accumulate_grad_hook(self._after),
        ]

    @uninterrupted
    def _before(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        self._nothing = grads[0] is None
        if grads[0] is None:  # a function of the user's gave none: autograd accumulates nothing
            return
        self._intake.check(self._managed, grads[0])
        self._accumulating = self._managed.has_grad
        if self._accumulating:
            self._managed.param.grad = None

    @uninterrupted
    def _after(self, param: torch.Tensor) -> None:
        if self._nothing:
            return
        grad, param.grad = param.grad, None
        assert grad is not None
        try:
            self._intake.keep(self._managed, grad, self._accumulating)
        except BaseException:
            if self._accumulating:
                param.grad = self._managed.absent_grad
            raise

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        # The node owns the parameter in C++, where the garbage collector does not see the cycle.
        self._node = None
