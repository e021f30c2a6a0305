"""Updates that go on after step(): whoever needs values waits, and for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.chunk_groups.update_tasks import Update
from hetero.runtime.update_schedule import FactorPrediction
from hetero.state.managed_param import ParamState
from offload.errors import HeteroError, StaleGraphError
from offload.memory.tiers import Tier
from tests.support.training.loops import same
from tests.support.training.overlap_net import (
    EVERYWHERE,
    WIDTH,
    Net,
    build,
    loss_of,
    one_step,
    result,
    under_way,
    untied,
)
from tests.support.waiting import until


def values_in_gathered(model: nn.Module, optimizer: hetero.HybridAdam) -> list[torch.Tensor]:
    found = []
    for param in model.parameters():
        with hetero.gathered(param):
            found.append(param.detach().clone())
    return found


LOOKS: list[Callable[[nn.Module, hetero.HybridAdam], list[torch.Tensor]]] = [
    lambda model, _: [t.clone() for t in model.state_dict().values()],
    lambda model, _: hetero.masters(model.parameters()),
    lambda model, _: [g for g in hetero.grads(model.parameters()) if g is not None],
    values_in_gathered,
    lambda _, optimizer: [t for s in optimizer.state_dict()["state"].values() for t in s.values()],
]


def changes(model: Any, optimizer: hetero.HybridAdam) -> Iterator[None]:
    """Values that are written and loaded, each before a step."""
    with torch.no_grad(), hetero.gathered(model.blocks[1].up.weight, modifier_rank=0):
        model.blocks[1].up.weight.mul_(0.5)
    yield
    model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()})
    yield
    optimizer.load_state_dict(optimizer.state_dict())
    yield


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", EVERYWHERE)
def test_what_hetero_gives_and_takes_waits(tmp_path: Path, place: str) -> None:
    """Each look and change comes when updates are under way, and is as where none is."""
    pair = [build(untied, tmp_path, place, overlap) for overlap in ("forward", "none")]
    for number, look in enumerate(LOOKS):
        for model, optimizer in pair:
            loss_of(model, number).backward()
            optimizer.step()
        assert under_way(pair[0][1]) > 0
        one, other = (look(*each) for each in pair)
        assert len(one) > 0
        assert same(one, other)
    for model, optimizer in pair:
        for _ in changes(model, optimizer):
            loss_of(model, 5).backward()
            optimizer.step()
        loss = loss_of(model, 6)
        loss_of(model, 7).backward()
        optimizer.step()
        with pytest.raises((StaleGraphError, RuntimeError), match="modified by|as it was before"):
            loss.backward()
    assert same(*(result(*each) for each in pair))


def test_what_is_read_is_waited_for(tmp_path: Path) -> None:
    """Nobody takes an old value for the new one, and nothing else is waited for."""
    model, optimizer = build(untied, tmp_path, "optim_states", "forward")
    one_step(model, optimizer, 0)
    weight = model.blocks[4].down.weight
    updating = optimizer.engine.find(weight)
    assert updating.state is ParamState.UPDATING
    assert weight.shape == (WIDTH, 2 * WIDTH)
    model.inner(torch.zeros(1, WIDTH, dtype=torch.bfloat16))
    assert not model.inner.weight.isnan().any()
    assert updating.state is ParamState.UPDATING
    assert not weight.isnan().any()
    assert updating.state is not ParamState.UPDATING
    optimizer.engine.synchronize()
    assert under_way(optimizer) == 0
    assert not any(p.isnan().any() for p in model.parameters())
    optimizer.engine.close()


def test_step_waits_for_what_is_in_memory_unless_it_is_told_not_to(tmp_path: Path) -> None:
    for overlap in ("auto", "both"):
        model, optimizer = build(Net, tmp_path, "ram", overlap)
        one_step(model, optimizer, 0)
        assert (under_way(optimizer) == 0) == (overlap == "auto")
        optimizer.engine.close()


def test_step_inside_gathered(tmp_path: Path) -> None:
    """What is in use in place has its new value after it; a copy would lose it."""
    model, optimizer = build(Net, tmp_path, "ram", "forward")
    one_step(model, optimizer, 0)
    with hetero.gathered(model.inner.weight):
        before = model.inner.weight.detach().clone()
        loss_of(model, 1).backward()
        optimizer.step()
        assert not torch.equal(before, model.inner.weight)
    optimizer.engine.close()
    model, optimizer = build(Net, tmp_path, "disk", "forward")
    one_step(model, optimizer, 0)
    with hetero.gathered(model.blocks[2].up.weight):
        loss_of(model, 1).backward()
        with pytest.raises(HeteroError, match=r"step\(\) runs inside hetero.gathered"):
            optimizer.step()
    optimizer.step()
    assert not loss_of(model, 2).isnan()
    optimizer.engine.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlap", ["forward", "auto"])
@pytest.mark.parametrize("host_memory", [None, "800KiB"])
def test_forward_waits_for_what_it_uses_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: str, host_memory: str | None
) -> None:
    """Updates are made in the order of forward; a module runs while later ones' are to come.

    Also where gradients are on NVMe, and where updates could be made in backward, but for clipping.
    """
    monkeypatch.setattr(FactorPrediction, "guess", lambda self: None)
    more = {} if host_memory is None else {"host_memory": host_memory}
    model, optimizer = build(
        lambda: Net(blocks=7, tied=False), tmp_path, "optim_states", overlap, **more
    )
    on_disk = optimizer.engine.placement.grad.count(Tier.DISK)
    assert (on_disk > 5) == (host_memory is not None)
    for step in range(2):
        one_step(model, optimizer, step)
    engine = optimizer.engine
    chunk_group = engine.chunk_groups[0]
    order: list[int] = []
    wait, seen = chunk_group.updates.wait_computed, threading.get_ident()

    def watched(chunk: Any) -> None:
        assert threading.get_ident() == seen
        order.append(chunk.id)
        wait(chunk)

    chunk_group.updates.wait_computed = watched  # type: ignore[method-assign]
    submitted: list[int] = []
    submit = chunk_group.update_tasks.submit

    def watched_submit(update: Update, last: bool) -> None:
        submitted.extend(each.chunk.id for each in update.chunks)
        submit(update, last)

    chunk_group.update_tasks.submit = watched_submit  # type: ignore[method-assign]
    loss_of(model, 2).backward()
    order.clear()
    optimizer.step()
    assert order == []
    loss_of(model, 3).backward()
    chunks = [c.id for c in engine.layout.chunks if c.trainable]
    assert sorted(order) == chunks
    assert list(dict.fromkeys(submitted)) == order
    engine.close()


@pytest.mark.parametrize("overlap", ["both", "forward"])
def test_what_is_due_first(tmp_path: Path, overlap: str) -> None:
    """What forward used first; in backward after what holds slots then."""
    model, optimizer = build(
        lambda: Net(blocks=7, tied=False),
        tmp_path,
        "optim_states",
        overlap,
        host_memory="800KiB",
    )
    one_step(model, optimizer, 0)
    loss = loss_of(model, 1)
    engine = optimizer.engine
    chunks, grad, due_of = (
        engine.layout.chunks,
        engine.placement.grad,
        engine.chunk_groups[0].update_tasks._order.priority,
    )
    assert grad.count(Tier.DISK) > 5
    assert grad.count(Tier.HOST) > 5
    in_slots = {c.id for c in chunks if grad[c.id] is Tier.DISK}
    due = {chunk.id: due_of(chunk, in_backward=True) for chunk in chunks}
    assert {chunk for chunk in due if due[chunk] == 0} == in_slots
    others = [due[c.id] for c in chunks if c.id not in in_slots]
    assert others == sorted(set(others)), "chunks are in the order of forward"
    at_step = [due_of(chunk, in_backward=False) for chunk in chunks]
    assert at_step == sorted(set(at_step)), "and so they are when backward is over"
    loss.backward()
    optimizer.step()
    engine.close()


def test_a_failed_update_is_told_by_the_next_forward(tmp_path: Path) -> None:
    model, optimizer = build(Net, tmp_path, "optim_states", "forward")
    one_step(model, optimizer, 0)
    optimizer.engine.synchronize()
    optimizer.engine.chunk_groups[0].pipeline.inject(1)
    loss_of(model, 1).backward()
    optimizer.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was made to fail"):
            loss_of(model, 2)
    with pytest.raises(RuntimeError, match="was made to fail"):
        optimizer.step()
    optimizer.engine.close()


@pytest.mark.parametrize("wrong", [True, "early", None])
def test_the_option_is_checked(wrong: object) -> None:
    with pytest.raises(ValueError, match="overlap_updates must be one of auto, none, forward"):
        hetero.Config.make(placement_policy="cpu", debug={"overlap_updates": wrong})


def test_seconds_of_updates_and_of_waiting_for_them(tmp_path: Path) -> None:
    """Of an update that nothing waits for the time is counted, and no waiting."""
    model, optimizer = build(Net, tmp_path, "disk", "forward")
    engine = optimizer.engine
    one_step(model, optimizer, 0)
    engine.synchronize()
    before_s, waited_s = engine.seconds.update_s, engine.seconds.update_wait_s
    assert before_s > 0
    loss_of(model, 1).backward()
    optimizer.step()
    pipeline = engine.chunk_groups[0].pipeline
    until(lambda: pipeline.is_updated())
    assert engine.seconds.update_s > before_s
    assert engine.seconds.update_wait_s == waited_s
    engine.close()
