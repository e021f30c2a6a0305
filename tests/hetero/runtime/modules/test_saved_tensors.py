"""hetero/runtime/modules/saved_tensors: what autograd saves goes with its graph."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from tests.support.training.small_net import (
    EMULATED,
    SETTINGS,
    Settings,
    loss_of,
    managed,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


class Stop(Exception):
    """A user's exception."""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("settings", [*SETTINGS, EMULATED])
def test_a_forward_without_a_backward_keeps_nothing(
    fails: bool, settings: Settings, tmp_path: Path
) -> None:
    """tanh() saves its own result, which would keep the node that has saved it."""
    model, optimizer = managed(settings, tmp_path)
    activations: list[weakref.ref[torch.Tensor]] = []

    def note(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        activations.append(weakref.ref(inputs[0]))
        if fails:
            raise Stop

    handle = model.last.register_forward_pre_hook(note)
    for _ in range(2):
        try:
            loss_of(model)
        except Stop:
            assert fails
    handle.remove()
    gc.collect()
    assert [ref() for ref in activations] == [None, None]
    engine = weakref.ref(optimizer.engine)
    optimizer.engine.close()
    del model, optimizer, handle, note
    gc.collect()
    assert engine() is None
