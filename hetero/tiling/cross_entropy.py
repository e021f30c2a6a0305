"""Cross-entropy of a linear head's logits that are never in memory whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from hetero.tiling.log_probs import (
    Elementwise,
    RowTiles,
    TileOptions,
    check_tile_tokens,
    label_log_probs,
)

_REDUCTIONS = ("mean", "sum", "none")
_IGNORED = -100


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    tile_tokens: int | None = None,
    label_smoothing: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy(F.linear(hidden, weight, bias).float(), labels, ...).

    Neither the logits nor their gradient are in memory whole: at most about `tile_tokens` rows of
    them are, in forward and in backward, which computes them once more. `weight` may be a managed
    parameter whose values are elsewhere; its gradient comes in its dtype. The loss has the bits of
    the plain one as far as torch's matrix products of some rows have those of all rows (on x86
    CPUs they do, for some 16 tokens and more). So has the gradient of `weight`, but for an
    exponential of fp32 that may differ in its last bit. That of `hidden` is a sum in fp32 of
    products in the dtype of `hidden`.

    On CUDA liger-kernel's fused loss is used where it is installed, unless `tile_tokens`, a scale,
    a cap or reduction="none" is asked for. It makes the gradients in forward.

    Args:
        hidden: (..., w), what the head is applied to.
        weight: (V, w), the head's weight, whole; in the dtype of `hidden`.
        labels: (...) int64, the class of each token, or `ignore_index`. They are not shifted.
        bias: (V,), or None.
        ignore_index: tokens with this label count for nothing.
        reduction: "mean" over the tokens that count, "sum", or "none": (...), 0 for those that do
            not.
        tile_tokens: tokens whose logits are in memory at a time. Default: so many that there are
            2^24 logits (64 MiB of fp32; backward takes up to twice that). Fewer take less memory,
            and make smaller matrix products.
        label_smoothing: as torch's.
        scale: logits are multiplied by it (Cohere, Granite), before the cap.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).

    Returns:
        The loss in fp32.

    Raises:
        ValueError: for sizes and options that do not fit together.
    """
    given = (hidden, weight, labels, *(() if bias is None else (bias,)))
    if has_torch_function(given):
        # A managed parameter that is absent is brought in once, for the whole function.
        made: torch.Tensor = handle_torch_function(
            tiled_cross_entropy,
            given,
            hidden,
            weight,
            labels,
            bias,
            ignore_index,
            reduction,
            tile_tokens,
            label_smoothing,
            scale,
            softcap,
        )
        return made
    _check(hidden, weight, labels, bias, reduction, label_smoothing, softcap)
    check_tile_tokens(tile_tokens)
    elementwise: tuple[Elementwise, ...] = ()
    if scale is not None:
        elementwise += (partial(torch.mul, other=scale),)
    if softcap is not None:
        elementwise += (partial(_capped, softcap=softcap),)
    options = TileOptions(tile_tokens, elementwise)
    return reduced_loss(
        hidden, weight, labels, bias, ignore_index, reduction, label_smoothing, options
    )


class TiledCrossEntropy(torch.nn.Module):
    """tiled_cross_entropy() with its options, as a module without parameters.

    Args:
        options: those of tiled_cross_entropy() after `bias`, as keywords.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss; arguments and errors are those of tiled_cross_entropy()."""
        return tiled_cross_entropy(hidden, weight, labels, bias, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


def reduced_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor | RowTiles,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    options: TileOptions,
    weight_grad_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of tiled_cross_entropy(), whose arguments are right.

    `weight_grad_to`, (V, w), gets the gradient of a weight that is whole in place of it, if it is
    not None.
    """
    # A weight that is whole is brought in once, for the whole function; tiles one after another.
    given = [each for each in (hidden, weight, bias) if isinstance(each, torch.Tensor)]
    if has_torch_function(given):
        made: torch.Tensor = handle_torch_function(
            reduced_loss,
            given,
            hidden,
            weight,
            labels,
            bias,
            ignore_index,
            reduction,
            label_smoothing,
            options,
            weight_grad_to,
        )
        return made
    shape = labels.shape
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if weight_grad_to is not None:
        weight = _GradTo.apply(weight, weight_grad_to)  # type: ignore[no-untyped-call]
    tiles = weight if isinstance(weight, RowTiles) else RowTiles([weight])
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # backward has none, so nothing may depend on it
        dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    fused = _liger() if _on_cuda(hidden) and options == TileOptions() else None
    if fused is not None and reduction != "none" and isinstance(weight, torch.Tensor):
        loss: torch.Tensor = fused(
            hidden,
            weight.to(hidden.dtype),
            labels,
            bias=bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        return loss.float()
    ignored = labels == ignore_index
    with torch.autocast(device, enabled=False):
        labels = labels.masked_fill(ignored, 0)
        found, sums = label_log_probs(
            hidden, tiles, bias, labels, options, with_sums=bool(label_smoothing)
        )
        # What torch does to the log-probabilities, on those of the labels alone: the same order of
        # summation, hence the same bits.
        target = torch.where(ignored, _IGNORED, 0)
        nll = torch.nn.functional.nll_loss(
            found.unsqueeze(1), target, ignore_index=_IGNORED, reduction=reduction
        )
        if label_smoothing:
            smooth = (-sums).masked_fill(ignored, 0.0)
            if reduction != "none":
                smooth = smooth.sum()
            if reduction == "mean":
                smooth = smooth / (~ignored).sum()
            nll = (1 - label_smoothing) * nll + label_smoothing / tiles.rows * smooth
    return nll.reshape(shape) if reduction == "none" else nll


class _GradTo(torch.autograd.Function):
    """A tensor whose gradient another one of the same shape gets."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, grad_to: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
    softcap: float | None,
) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} does not fit weight of shape "
            f"{tuple(weight.shape)}: they must be (..., w) and (V, w)"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} must have one class for each token of hidden, "
            f"of shape {tuple(hidden.shape)}"
        )
    if labels.is_floating_point():
        raise ValueError(f"labels must be classes, of an integer dtype, got {labels.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} does not fit weight of shape {tuple(weight.shape)}"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")


def _capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(logits / softcap)


def _on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _liger() -> Any:
    """liger-kernel's fused linear cross-entropy as a function; None if it is not installed."""
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        return None
    return liger_fused_linear_cross_entropy
