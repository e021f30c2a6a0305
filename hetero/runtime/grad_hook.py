"""The moment when a parameter's gradient is there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetero.state.managed_param import ManagedParam


class GradHook:
    """Hands a parameter's gradient over whenever autograd has made one.

    `.grad` holds the placeholder if there is a gradient already. It is taken away only when
    autograd is about to accumulate (torch.autograd.grad() does not), and put back if keeping the
    new gradient fails.
    """

    def __init__(
        self,
        managed: ManagedParam,
        check: Callable[[ManagedParam, torch.Tensor], None],
        keep: Callable[[ManagedParam, torch.Tensor, bool], None],
    ) -> None:
        """Installs the hooks.

        Args:
            check: called with (parameter, gradient) before it is accumulated; may raise.
            keep: called with (parameter, gradient, whether to add it to the one that is kept).
        """
        self._managed = managed
        self._check = check
        self._keep = keep
        self._nothing = False
        self._accumulating = False
        param = managed.param
        # The node that accumulates; its hooks last as long as something refers to it.
        self._node = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._handles = [
            self._node.register_prehook(self._before),  # type: ignore[union-attr]
            param.register_post_accumulate_grad_hook(self._after),
        ]

    def _before(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        self._nothing = grads[0] is None
        if grads[0] is None:  # a function of the user's gave none: autograd accumulates nothing
            return
        self._check(self._managed, grads[0])
        self._accumulating = self._managed.has_grad
        if self._accumulating:
            self._managed.param.grad = None

    def _after(self, param: torch.Tensor) -> None:
        if self._nothing:
            return
        grad, param.grad = param.grad, None
        assert grad is not None
        try:
            self._keep(self._managed, grad, self._accumulating)
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
