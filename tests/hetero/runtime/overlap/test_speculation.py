"""Between an update during backward and step() a loop sees what it sees without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from tests.support.training.loops import same
from tests.support.training.overlap_net import (
    WIDTH,
    Begun,
    Net,
    assert_same_bits,
    backwards,
    build,
    loss_of,
)

Training = tuple[Any, Any]
Seen = list[torch.Tensor]
ACTIONS: list[Callable[[Training], Seen]] = []


def action(function: Callable[[Training], Seen]) -> Callable[[Training], Seen]:
    """Adds what a loop does."""
    ACTIONS.append(function)
    return function


@action
def reads(training: Training) -> Seen:
    """In a module, in gathered(), of values and in a forward, each of other parameters."""
    model = training[0]
    found = [model.blocks[1].up(torch.ones(1, WIDTH, dtype=torch.bfloat16)).detach()]
    with hetero.gathered(model.inner.weight):
        found.append(model.inner.weight.detach().clone())
    found += [p.detach().float().sum() for p in model.blocks[3].parameters()]
    return [*found, loss_of(model, 50).detach()]


@action
def state_dicts(training: Training) -> Seen:
    model, optimizer = training
    states = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    return [*model.state_dict().values(), *hetero.masters(model.parameters()), *states]


@action
def load(training: Training) -> Seen:
    training[1].load_state_dict(training[1].state_dict())
    return []


@action
def clear(training: Training) -> Seen:
    training[1].zero_grad()
    loss_of(training[0], 51).backward()
    return []


@action
def clear_one(training: Training) -> Seen:
    training[0].blocks[2].down.weight.grad = None
    return []


@action
def assign_one(training: Training) -> Seen:
    weight = training[0].blocks[2].down.weight
    weight.grad = torch.ones_like(weight)
    return []


@action
def another_backward(training: Training) -> Seen:
    loss_of(training[0], 52).backward()
    return []


@action
def lr(training: Training) -> Seen:
    training[1].param_groups[0]["lr"] *= 0.5
    return []


@action
def norms(training: Training) -> Seen:
    model, optimizer = training
    norm = torch.tensor(optimizer.engine.grad_norm(model.parameters()))
    return [norm, *(g for g in hetero.grads(model.parameters()) if g is not None)]


@action
def clip(training: Training) -> Seen:
    return [nn.utils.clip_grad_norm_(training[0].parameters(), 1e-2)]


@action
def clip_values(training: Training) -> Seen:
    nn.utils.clip_grad_value_(training[0].parameters(), 1e-3)
    return []


@action
def scale_some(training: Training) -> Seen:
    training[0].blocks[3].up.weight.grad.mul_(0.5)
    return []


@action
def write(training: Training) -> Seen:
    with torch.no_grad():
        training[0].blocks[3].up.weight.mul_(0.5)
    return []


@action
def clear_by_hand(training: Training) -> Seen:
    for p in training[0].parameters():
        p.grad = None
    return []


@action
def other_memory(training: Training) -> Seen:
    engine = training[1].engine
    budget = engine.ledger.budget_bytes["host"]
    for each in (2 * budget, budget):
        engine.set_budget(host_memory=each)
    return []


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", ["optim_states", "disk", "emulated"])
@pytest.mark.parametrize("done", ACTIONS, ids=lambda each: each.__name__)
def test_what_a_loop_does_between(
    tmp_path: Path, place: str, done: Callable[[Training], Seen]
) -> None:
    """It sees the same values, and training goes on with the same bits."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        begun, seen = Begun(optimizer), []
        for step in backwards(model, optimizer):
            if step == 1:
                assert (begun.now > 0) == (overlap == "both")
                seen += done((model, optimizer))
        return seen

    assert_same_bits(tmp_path, place, ["both"], loop)


def test_param_groups_are_added_and_joined_between(tmp_path: Path) -> None:
    def loop(model: Any, optimizer: Any, overlap: str) -> Seen:
        begun, groups = Begun(optimizer), optimizer.param_groups
        groups.append({**groups[0], "params": groups[0]["params"][4:]})
        del groups[0]["params"][4:]
        for step in backwards(model, optimizer, 4):
            if step == 1:
                assert (begun.now > 0) == (overlap == "both")
                model.blocks.append(nn.Linear(WIDTH, WIDTH))
                optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})
            elif step == 2:
                groups[0]["params"] += groups.pop(1)["params"] + groups.pop(1)["params"]
        return []

    assert_same_bits(tmp_path, "optim_states", ["both"], loop, reserve_memory="256KiB")


def test_a_view_of_a_home_keeps_its_chunk_from_being_updated_early(tmp_path: Path) -> None:
    """What was taken before backward shows the old values until step(), as without overlap."""
    takes: list[Any] = [None, None, lambda p: p.detach(), lambda p: p.data, lambda p: p.view(-1)]
    model, optimizer = build(Net, tmp_path, "optim_states", "both", host_memory="1200KiB")
    begun, params = Begun(optimizer), list(model.parameters())
    for step, take in enumerate([*takes, None]):
        loss = loss_of(model, step)
        with torch.no_grad():
            views = [take(p) for p in params] if take else []
        copies = [view.clone() for view in views]
        loss.backward()
        assert (begun.now > 0) == (step > 0 and not views)
        assert same(copies, [view.clone() for view in views])
        optimizer.step()
        optimizer.zero_grad()
        now = [p.detach().clone().view(copy.shape) for p, copy in zip(params, copies, strict=False)]
        assert not views or not same(copies, now)
    optimizer.engine.close()


def test_what_was_taken_back_is_left_to_step(tmp_path: Path) -> None:
    """An update that was made in vain is not made once more before the step."""
    model, optimizer = build(Net, tmp_path, "optim_states", "both")
    begun = Begun(optimizer)
    for step in backwards(model, optimizer):
        assert (begun.now > 0) == (step > 0)
        clear((model, optimizer))
        assert begun.now == 0
    optimizer.engine.close()


def test_without_room_on_nvme_updates_wait_for_step(tmp_path: Path) -> None:
    """Some chunks have a second place for their optimizer state, and a note says so of others. Room
    is looked for again when homes have moved."""
    _, optimizer = build(Net, tmp_path, "disk", "both")
    used = optimizer.engine.ledger.in_use_bytes["disk"]
    optimizer.engine.close()

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        begun = Begun(optimizer)
        early = []
        for step in backwards(model, optimizer):
            early.append(begun.now)
            if step == 1:
                other_memory((model, optimizer))
        if overlap == "both":
            assert all(0 < count < begun.chunks for count in early[1:])
            assert [n for n in optimizer.engine.notes if "no room" in n]
            assert optimizer.engine.ledger.in_use_bytes["disk"] <= used + used // 3
        return []

    assert_same_bits(tmp_path, "disk", ["both"], loop, nvme_capacity=used + used // 3)
