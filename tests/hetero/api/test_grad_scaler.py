"""torch.amp.GradScaler with a managed model, unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.amp import GradScaler

import hetero
from tests.support.training import small_net
from tests.support.training.small_net import SETTINGS, Net, Settings, loss_of, managed, plain

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.parametrize("settings", SETTINGS),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Reference:
    """Plain PyTorch: gradients in the compute dtype, unscaled and used in fp32 on fp32 masters."""

    dtype: torch.dtype
    net: Net = field(init=False)
    masters: Net = field(init=False)

    def __post_init__(self) -> None:
        self.net, _ = plain(self.dtype)
        self.masters, self.adam = plain()
        self.steps = 0

    def step(self, scale: float, max_norm: float | None) -> None:
        for param, master in zip(self.net.parameters(), self.masters.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.float() / scale
        grads = [p.grad for p in self.masters.parameters() if p.grad is not None]
        if all(grad.isfinite().all() for grad in grads):
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.masters.parameters(), max_norm)
            self.adam.step()
            self.steps += 1
        self.net.zero_grad()

    def assert_same(self, model: Net) -> None:
        small_net.assert_same(model, self.masters)
        # From here on with the same parameters: of a master near a tie the last bits of an update
        # decide how it is rounded, and that would add up.
        for param, other in zip(self.net.parameters(), model.parameters(), strict=True):
            with torch.no_grad(), hetero.gathered(other):
                param.copy_(other)


@pytest.mark.covering(1)
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale and clip, step"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_training_equals_plain_torch(
    dtype: str, unscale: bool, settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = managed(settings, tmp_path, dtype, initial_loss_scale=None)
    reference = Reference(DTYPES[dtype])
    scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    max_norm = 0.1 if unscale else None
    for seed in range(5):
        for micro in range(2):
            scale = scaler.get_scale()
            scaler.scale(loss_of(model, seed + 10 * micro)).backward()
            (loss_of(reference.net, seed + 10 * micro) * scale).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            if seed == 0:
                assert_unscaled(model, reference.net, scale)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        reference.step(scale, max_norm)
        reference.assert_same(model)
    assert scaler.get_scale() == 2.0**14
    optimizer.engine.close()


def assert_unscaled(model: Net, expected: Net, scale: float) -> None:
    for grad, param in zip(hetero.grads(model.parameters()), expected.parameters(), strict=True):
        if param.grad is None:
            assert grad is None
        else:
            assert torch.equal(grad, param.grad.float() / scale)


@pytest.mark.covering(1)
@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_with_an_overflow_is_skipped_and_changes_nothing(
    dtype: str, unscale: bool, clear: bool, settings: Settings, tmp_path: Path
) -> None:
    """Also if it comes in the middle of what is accumulated."""
    model, optimizer = managed(settings, tmp_path, dtype, initial_loss_scale=None)
    reference = Reference(DTYPES[dtype])
    scaler = GradScaler("cpu", init_scale=64.0)

    def good(seed: int) -> None:
        scale = scaler.get_scale()
        scaler.scale(loss_of(model, seed)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        (loss_of(reference.net, seed) * scale).backward()
        reference.step(scale, None)

    good(0)
    reference.assert_same(model)
    before = hetero.masters(model.parameters()), optimizer.state_dict()["state"]
    scaler.scale(loss_of(model, 1)).backward()
    scaler.scale(loss_of(model, 2) * float("inf")).backward()
    scaler.scale(loss_of(model, 3)).backward()
    if unscale:
        scaler.unscale_(optimizer)
        hetero.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    if clear:
        optimizer.zero_grad()
    else:
        for param in model.parameters():
            param.grad = None
    after = hetero.masters(model.parameters()), optimizer.state_dict()["state"]
    assert all(map(torch.equal, before[0], after[0]))
    for index, state in before[1].items():
        for key, value in state.items():
            assert torch.equal(value, after[1][index][key])
    good(4)
    reference.assert_same(model)
    optimizer.engine.close()


def test_an_overflow_in_one_parameter_is_found(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    scaler = GradScaler("cpu", init_scale=4.0)
    before = hetero.masters(model.parameters())
    handle = model.scale.register_hook(lambda grad: grad * float("nan"))
    scaler.scale(loss_of(model)).backward()
    handle.remove()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, hetero.masters(model.parameters())))
    optimizer.engine.close()


def test_gradients_that_are_assigned_are_unscaled_too(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    for each, its in ((model, optimizer), (expected, adam)):
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss_of(each)).backward()
        each.scale.grad = torch.full((1,), 4.0)
        scaler.step(its)
    assert hetero.grads(model.scale)[0].item() == expected.scale.grad.item() == 0.5
    small_net.assert_same(model, expected)
    optimizer.engine.close()


def test_two_loss_scales_are_refused(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path, "fp16")
    scaler = GradScaler("cpu")
    with pytest.raises(RuntimeError, match="GradScaler.*initial_loss_scale=None"):
        scaler.scale(loss_of(model)).backward()
    optimizer.backward(scaler.scale(loss_of(model)))
    with pytest.raises(hetero.HeteroError, match="both scale the loss.*initial_loss_scale=None"):
        scaler.step(optimizer)
    optimizer.engine.close()


def test_a_scaler_that_is_disabled_leaves_fp16_to_hetero(
    settings: Settings, tmp_path: Path
) -> None:
    model, optimizer = managed(settings, tmp_path, "fp16", initial_loss_scale=1024.0)
    reference = Reference(torch.float16)
    scaler = GradScaler("cpu", enabled=False)
    for seed in range(2):
        optimizer.backward(scaler.scale(loss_of(model, seed)))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        (loss_of(reference.net, seed) * 1024).backward()
        reference.step(1024.0, 0.1)
        reference.assert_same(model)
    optimizer.engine.close()
