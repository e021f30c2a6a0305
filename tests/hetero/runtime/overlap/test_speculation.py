"""Between an update during backward and step() a loop sees what it sees without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from offload.errors import NonFiniteError
from tests.support.training.loops import same
from tests.support.training.overlap_net import (
    STEPS,
    WIDTH,
    Begun,
    Net,
    assert_same_bits,
    build,
    loss_of,
)

Training = tuple[nn.Module, Any]
Seen = list[torch.Tensor]
PLACES = ["optim_states", "disk", "emulated"]


def _forward(training: Training) -> Seen:
    return [loss_of(training[0], 50).detach()]


def _module(training: Training) -> Seen:
    return [training[0].blocks[1].up(torch.ones(1, WIDTH, dtype=torch.bfloat16)).detach()]


def _gathered(training: Training) -> Seen:
    with hetero.gathered(training[0].inner.weight):
        return [training[0].inner.weight.detach().clone()]


def _sums(training: Training) -> Seen:
    return [p.detach().float().sum() for p in training[0].parameters()]


def _state_dicts(training: Training) -> Seen:
    model, optimizer = training
    states = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    return [*model.state_dict().values(), *hetero.masters(model.parameters()), *states]


def _load(training: Training) -> Seen:
    training[1].load_state_dict(training[1].state_dict())
    return []


def _clear(training: Training) -> Seen:
    training[1].zero_grad()
    loss_of(training[0], 51).backward()
    return []


def _clear_one(training: Training) -> Seen:
    training[0].blocks[2].down.weight.grad = None
    return []


def _assign_one(training: Training) -> Seen:
    weight = training[0].blocks[2].down.weight
    weight.grad = torch.ones_like(weight)
    return []


def _another_backward(training: Training) -> Seen:
    loss_of(training[0], 52).backward()
    return []


def _lr(training: Training) -> Seen:
    training[1].param_groups[0]["lr"] *= 0.5
    return []


def _norms(training: Training) -> Seen:
    model, optimizer = training
    norm = torch.tensor(optimizer.engine.grad_norm(model.parameters()))
    return [norm, *(g for g in hetero.grads(model.parameters()) if g is not None)]


def _clip(training: Training) -> Seen:
    return [nn.utils.clip_grad_norm_(training[0].parameters(), 1e-2)]


def _clip_values(training: Training) -> Seen:
    nn.utils.clip_grad_value_(training[0].parameters(), 1e-3)
    return []


def _scale_some(training: Training) -> Seen:
    training[0].blocks[3].up.weight.grad.mul_(0.5)
    return []


def _write(training: Training) -> Seen:
    with torch.no_grad():
        training[0].blocks[3].up.weight.mul_(0.5)
    return []


def _add_group(training: Training) -> Seen:
    model, optimizer = training
    model.blocks.append(nn.Linear(WIDTH, WIDTH))
    optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})
    return []


def _clear_by_hand(training: Training) -> Seen:
    for p in training[0].parameters():
        p.grad = None
    return []


ACTIONS = {
    action.__name__[1:]: action
    for action in (
        _forward,
        _module,
        _gathered,
        _sums,
        _state_dicts,
        _load,
        _clear,
        _clear_one,
        _assign_one,
        _another_backward,
        _lr,
        _norms,
        _clip,
        _clip_values,
        _scale_some,
        _write,
        _add_group,
        _clear_by_hand,
    )
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("action", ACTIONS)
def test_what_a_loop_does_between(tmp_path: Path, place: str, action: str) -> None:
    """It sees the same values, and training goes on with the same bits."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        begun, seen = Begun(optimizer), []
        for step in range(STEPS):
            loss = loss_of(model, step)
            loss.backward()
            if step == 2:
                assert (begun.now > 0) == (overlap == "both")
                seen += ACTIONS[action]((model, optimizer))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    options = {}
    if action == "add_group":  # only one place has room for more parameters
        place, options = "optim_states", {"reserve_memory": "256KiB"}
    assert_same_bits(tmp_path, place, ["both"], loop, **options)


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", PLACES)
def test_a_budget_that_changes_between(tmp_path: Path, place: str) -> None:
    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        budget = optimizer.engine.ledger.budget_bytes["host"]
        assert budget is not None
        for step in range(STEPS + 2):
            loss_of(model, step).backward()
            if step in (2, 4):
                optimizer.engine.set_budget(host_memory=2 * budget if step == 2 else budget)
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, place, ["both"], loop)


@pytest.mark.parametrize(
    ("place", "overlap"),
    [
        ("disk", "auto"),
        ("optim_states", "backward"),
        pytest.param("emulated", "both", marks=pytest.mark.extra),
    ],
)
def test_shares_of_clipped_steps(tmp_path: Path, place: str, overlap: str) -> None:
    """None, some and all are clipped; "auto" stops to guess when it has been wrong too often."""
    clips = [1e6] * 4 + [1e6, 1e-2] * 4 + [1e-2] * 8 + [1e6] * 8
    counts = []

    def loop(model: nn.Module, optimizer: Any, setting: str) -> Seen:
        begun = Begun(optimizer)
        for step, clip in enumerate(clips):
            loss_of(model, step).backward()
            if setting != "none":
                counts.append(begun.now)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, place, [overlap], loop)
    assert counts[0] == 0
    assert all(counts[1:8])
    if overlap == "auto":
        assert counts[17:21] == [0] * 4
        assert all(counts[25:])
    else:
        assert all(counts[1:])


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", PLACES)
def test_a_grad_scaler(tmp_path: Path, place: str) -> None:
    """Its scale is guessed; steps that overflow are left out, and the scale changes then."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        begun, early = Begun(optimizer), []
        for step in range(12):
            loss = loss_of(model, step) * (float("inf") if step == 7 else 1.0)
            scaler.scale(loss).backward()
            early.append(begun.now)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert early[0] == 0
        assert any(early) == (overlap == "auto")
        return [torch.tensor(scaler.get_scale())]

    assert_same_bits(tmp_path, place, ["auto"], loop, dtype="fp16", initial_loss_scale=None)


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlap", ["auto", "both", "backward", "forward"])
@pytest.mark.parametrize("place", ["ram", *PLACES])
def test_the_loss_scale_of_fp16(tmp_path: Path, place: str, overlap: str) -> None:
    def loop(model: nn.Module, optimizer: Any, setting: str) -> Seen:
        for step in range(10):
            optimizer.backward(loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()
        scale = optimizer.engine.shared.loss_scale
        assert scale.skipped_steps > 0
        return [torch.tensor(scale.value)]

    fp16 = {"dtype": "fp16", "initial_loss_scale": 2.0**20}
    assert_same_bits(tmp_path, place, [overlap], loop, **fp16)


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", PLACES)
def test_a_step_with_a_norm_that_is_nan(tmp_path: Path, place: str) -> None:
    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        for step in range(STEPS):
            loss = loss_of(model, step) * (float("nan") if step == 2 else 1.0)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step == 2:
                with pytest.raises(NonFiniteError, match="zero_grad"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, place, ["both"], loop)


def test_a_closure(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        losses = []
        for step in range(STEPS):

            def closure(step: int = step) -> float:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss.item()

            losses.append(optimizer.step(closure))
        return [torch.tensor(losses)]

    assert_same_bits(tmp_path, "disk", ["auto"], loop)


@pytest.mark.parametrize("take", [lambda p: p.detach(), lambda p: p.data, lambda p: p.view(-1)])
def test_a_view_of_a_home_keeps_its_chunk_from_being_updated_early(
    tmp_path: Path, take: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """What was taken before backward shows the old values until step(), as without overlap."""
    model, optimizer = build(Net, tmp_path, "optim_states", "both", host_memory="1200KiB")
    before, after = Begun(optimizer), None
    for step in range(STEPS):
        loss = loss_of(model, step)
        with torch.no_grad():
            views = [take(p) for p in model.parameters()] if step == 2 else []
        copies = [view.clone() for view in views]
        loss.backward()
        if step == 2:
            assert before.now == 0
            assert same(copies, [view.clone() for view in views])
        elif step:
            assert before.now > 0
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            after = [p.detach().clone() for p in model.parameters()]
            assert not same(copies, after)
    assert after is not None
    optimizer.engine.close()


def test_without_room_on_nvme_updates_wait_for_step(tmp_path: Path) -> None:
    """Some chunks have a second place for their optimizer state, and a note says so of others."""
    _, optimizer = build(Net, tmp_path, "disk", "both")
    used = optimizer.engine.ledger.in_use_bytes["disk"]
    optimizer.engine.close()

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        begun, early = Begun(optimizer), []
        for step in range(STEPS):
            loss_of(model, step).backward()
            early.append(begun.now)
            optimizer.step()
            optimizer.zero_grad()
        if overlap == "both":
            assert all(0 < count < begun.chunks for count in early[1:])
            assert [n for n in optimizer.engine.notes if "no room" in n]
            assert optimizer.engine.ledger.in_use_bytes["disk"] <= used + used // 3
        return []

    assert_same_bits(tmp_path, "disk", ["both"], loop, nvme_capacity=used + used // 3)
