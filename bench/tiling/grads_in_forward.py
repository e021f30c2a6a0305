"""The other way to tile the loss, for comparison: gradients are made in forward.

It computes logits once. The gradient of the weight is held from forward on, it is a sum over token
tiles, which are rounded to the sum's dtype, and it is made before the scale of the loss is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from hetero.tiling.cross_entropy import TileOptions


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        tile_tokens: int | None,
        in_fp32: bool,
    ) -> torch.Tensor:
        size = TileOptions(tile_tokens).tokens(weight.shape[0])
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32 if in_fp32 else weight.dtype)
        loss = torch.zeros(())
        for begin in range(0, hidden.shape[0], size):
            part = slice(begin, begin + size)
            log_probs = F.linear(hidden[part], weight).float().log_softmax(1)
            loss -= log_probs.gather(1, labels[part, None]).sum()
            grad = log_probs.exp_()
            grad.scatter_add_(1, labels[part, None], torch.full_like(grad[:, :1], -1.0))
            grad = grad.div_(hidden.shape[0]).to(hidden.dtype)
            torch.mm(grad, weight, out=hidden_grad[part])
            if in_fp32 and weight.dtype is not torch.float32:
                weight_grad += grad.t() @ hidden[part]
            else:
                weight_grad.addmm_(grad.t(), hidden[part])
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.dtype = weight.dtype
        return loss / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad, weight_grad.mul_(grad).to(ctx.dtype), None, None, None


def loss_with_grads(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tile_tokens: int | None,
    in_fp32: bool,
) -> torch.Tensor:
    """The mean cross-entropy; `in_fp32`: the weight's gradient is summed in fp32."""
    given = (hidden, weight, labels, tile_tokens, in_fp32)
    loss: torch.Tensor = _Loss.apply(*given)  # type: ignore[no-untyped-call]
    return loss
