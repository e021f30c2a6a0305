"""Parameters used outside of their modules (torch_function_uses), and graphs over them.

tests/support/compatibility compares reads, writes and losses with plain PyTorch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import utils

from tests.support.training.small_net import (
    EMULATED,
    SETTINGS,
    Settings,
    assert_nothing_is_used,
    assert_same,
    loss_of,
    managed,
    plain,
    train,
    without_grad,
)

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.parametrize("settings", [*SETTINGS, EMULATED]),
]


def test_reads_of_more_than_there_is_room_for(settings: Settings, tmp_path: Path) -> None:
    """Of what does not fit in slots together copies are made, one after the other."""
    model, optimizer = managed(settings, tmp_path)
    expected, _ = plain()
    for read in (
        lambda net: without_grad(utils.parameters_to_vector, net.parameters()),
        lambda net: torch.cat([net.first.weight, net.last.weight] * 3).detach(),
        lambda net: type(net.last.weight)(net.last.weight.data.clone()).detach(),
    ):
        torch.testing.assert_close(read(model), read(expected), rtol=1e-5, atol=1e-6)
        assert_nothing_is_used(optimizer)
    optimizer.engine.close()


def test_a_parameter_that_changed_after_its_use_is_stale(
    settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = managed(settings, tmp_path)
    for write in (lambda p: p.mul_(2), lambda p: p.data.mul_(2)):
        loss = model.last.weight.square().sum()
        with torch.no_grad():
            write(model.last.weight)
        with pytest.raises(RuntimeError, match="modified by an inplace|as it was before"):
            loss.backward()
        optimizer.zero_grad()
    train(model, optimizer)
    optimizer.engine.close()


def test_what_a_write_leaves_alone_is_not_stale(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    bias, other = model.first.bias, model.unused.weight
    assert optimizer.engine.find(bias).chunk is optimizer.engine.find(other).chunk
    loss = bias.square().sum()
    with torch.no_grad():
        other.zero_()
    loss.backward()
    optimizer.engine.close()


def test_backward_to_some_parameters_brings_none_of_them_in(
    settings: Settings, tmp_path: Path
) -> None:
    """autograd needs their nodes alone, as long as it runs."""
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    members, in_use = optimizer.engine.params.in_order(), []
    model.first.weight.register_hook(lambda _: in_use.extend(m.name for m in members if m.uses))
    found: list[list[torch.Tensor]] = []
    for each, its in ((model, optimizer), (expected, adam)):
        some = [each.last.weight, each.first.weight, each.scale]
        loss_of(each).backward(inputs=some)
        assert [p.grad is None for p in each.parameters()].count(False) == len(some)
        params = list(each.parameters())
        grads = torch.autograd.grad(loss_of(each, 2), params, allow_unused=True)
        zeros = torch.autograd.grad(loss_of(each, 3), params, materialize_grads=True)
        found.append([*(g for g in grads if g is not None), *zeros])
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss_of(each), [each.unused.weight, each.scale])
        its.step()
    assert in_use == []
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert_same(model, expected)
    assert_nothing_is_used(optimizer)
    optimizer.engine.close()
