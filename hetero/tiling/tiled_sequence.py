"""A module that acts on each token by itself, applied to one part of the sequence at a time.

Autograd sums the gradients of parameters over the parts, in their dtype. The parameters are
gathered once a part, from slots that still have them if they fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hetero.tiling.forward_swap import ForwardSwap


def tile_sequence(module: torch.nn.Module, tiles: int, dim: int = -2) -> ForwardSwap:
    """From here on the module is applied to `tiles` parts of the sequence, one after another.

    For what acts on each token by itself: a feed-forward layer (MLP, SwiGLU), a norm, a router with
    its experts. Each part is an activation checkpoint: backward computes it once more, so what the
    module makes between its input and its output is in memory for one part only. That costs the
    module's forward once more. The module's names, parameters and state stay.

    Outputs have the same bits as far as torch's matrix products of some rows have those of all
    rows. Gradients of parameters are sums over the parts, which autograd makes in their dtype.
    Dropout draws other numbers than without tiles, and the same ones in backward as in forward.
    Under hetero a module of modules, as most are, gathers their parameters one at a time. Slots for
    two are needed where backward of one has its weight when it asks for what is computed once
    more, as with every activation checkpoint. Of a module that has parameters itself and takes
    views of them, backward makes copies that no budget counts.

    Args:
        module: its first argument is (..., tokens, width), and its result a tensor of as many
            tokens; other arguments are given to every part as they are.
        tiles: number of parts, of equal size but for the last. A sequence of fewer tokens has as
            many parts as tokens.
        dim: the dimension of the sequence.

    Returns:
        A handle: remove() makes the module plain again, and so does the end of a `with` block.

    Raises:
        ValueError: for fewer than one part.
    """
    if tiles < 1:
        raise ValueError(f"tiles must be 1 or more, got {tiles}")
    plain = type(module).forward

    def forward(module: torch.nn.Module, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # split(), not slices: its backward makes one gradient of the input, and not one a part.
        parts = input.split(max(1, -(-input.shape[dim] // tiles)), dim)

        def own(part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # Here, so that the copy is made once more in backward, and not kept.
            return plain(module, part.contiguous(), *args, **kwargs)

        made = [_part(own, part, *args, **kwargs) for part in parts]
        for part, output in zip(parts, made, strict=True):
            if not isinstance(output, torch.Tensor) or output.dim() <= -dim - 1:
                raise TypeError(
                    f"{type(module).__name__} returned a {type(output).__name__} for a part of the "
                    f"sequence; tile_sequence() is for modules that return one tensor"
                )
            if output.shape[dim] != part.shape[dim]:
                raise ValueError(
                    f"{type(module).__name__} returned {output.shape[dim]} tokens for "
                    f"{part.shape[dim]}; tile_sequence() is for modules that act on each token"
                )
        return made[0] if len(made) == 1 else torch.cat(made, dim)

    return ForwardSwap((module, forward))


def _part(own: Any, part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return own(part, *args, **kwargs)
    return checkpoint(own, part, *args, use_reentrant=False, **kwargs)
