"""Blocks in which what autograd saves outside of the model's forward counts as the model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from hetero.api.access import engine_of
from offload.interrupts import Uninterrupted


def offload_activations(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Inside the block all that autograd saves in this thread counts as the model's activations.

    Without it that is so while the model's forward runs: what is computed of its output, a loss
    say, is saved by autograd as always.

        with hetero.offload_activations(model):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.backward(loss)

    Args:
        model: went through hetero.initialize(), with the option activation_memory.

    Raises:
        UnmanagedParameterError: no engine has the model's parameters.
        ValueError: the model was initialized without activation_memory.
    """
    return Uninterrupted(_offloading(model))


@contextmanager
def _offloading(model: torch.nn.Module) -> Iterator[None]:
    engine = engine_of(model.parameters())
    engine.check_usable()
    if engine.watch.activations is None:
        raise ValueError(
            "offload_activations() needs memory that is left to activations: give "
            "activation_memory, a number of bytes or 'auto', to ZeroInitContext or initialize()"
        )
    hooks = engine.torch_function_uses.saved_tensors.hooks()
    if hooks is None:  # inside another such block, or the model's forward
        yield
        return
    with saved_tensors_hooks(*hooks):
        yield
