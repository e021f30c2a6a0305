"""Updates that go on after step(): the same bits as without, and whoever needs values waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
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
    PLACES,
    STEPS,
    WIDTH,
    Net,
    assert_same_bits,
    build,
    loss_of,
    one_step,
    result,
    under_way,
)
from tests.support.waiting import until

Seen = Iterable[torch.Tensor]


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("kind", ["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("overlap", ["forward", "both"])
def test_same_bits(tmp_path: Path, place: str, kind: str, overlap: str) -> None:
    """step() returns with all chunks under way, and nothing differs."""

    def loop(model: nn.Module, optimizer: Any, option: str) -> Seen:
        chunks = sum(c.trainable for c in optimizer.engine.layout.chunks)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, step)
            assert under_way(optimizer) == 0, "all modules were used"
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            assert under_way(optimizer) == (0 if option == "none" else chunks)
            optimizer.zero_grad()
        return [torch.tensor(losses)]

    assert_same_bits(tmp_path, place, [overlap], loop, lambda: Net(kind=kind))


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("clip", ["norm", "value", "scaler"])
def test_clipping_and_scaling(tmp_path: Path, place: str, clip: str) -> None:
    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=clip == "scaler")
        for step in range(STEPS):
            scaler.scale(loss_of(model, step)).backward()
            if clip == "norm":
                hetero.clip_grad_norm_(model.parameters(), 0.1)
            elif clip == "value":
                hetero.clip_grad_value_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            if step % 2:  # else gradients are added to those that updates still use
                optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, place, ["forward"], loop)


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", EVERYWHERE)
def test_modules_that_a_step_leaves_out(tmp_path: Path, place: str) -> None:
    """Their updates are waited for by the next step()."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        blocks = list(model.blocks)
        for step in range(STEPS):
            model.blocks = nn.ModuleList(blocks[:2] if step % 2 else blocks)
            one_step(model, optimizer, step)
        model.blocks = nn.ModuleList(blocks)
        return []

    assert_same_bits(tmp_path, place, ["forward"], loop, lambda: Net(tied=False))


@pytest.fixture(params=list(EVERYWHERE))
def pair(request: Any, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Two trainings of some steps, with updates under way, and without."""
    made = []
    for overlap in ("forward", "none"):
        model, optimizer = build(lambda: Net(tied=False), tmp_path, request.param, overlap)
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
        made.append((model, optimizer))
    assert under_way(made[0][1]) > 0
    yield made
    for _, optimizer in made:
        optimizer.engine.close()


@pytest.mark.covering(0)
def test_what_hetero_gives_waits(pair: Any) -> None:
    def looks(model: nn.Module, optimizer: hetero.HybridAdam) -> Iterator[list[torch.Tensor]]:
        params = list(model.parameters())
        yield [t.clone() for t in model.state_dict().values()]
        yield hetero.masters(params)
        yield [g for g in hetero.grads(params) if g is not None]
        values = []
        for param in params:
            with hetero.gathered(param):
                values.append(param.detach().clone())
        yield values
        yield [t for s in optimizer.state_dict()["state"].values() for t in s.values()]

    for one, other in zip(looks(*pair[0]), looks(*pair[1]), strict=True):
        assert len(one) > 0
        assert same(one, other)
    for model, optimizer in pair:
        loss_of(model, 5).backward()
        optimizer.step()
    with torch.no_grad():
        assert torch.equal(*(loss_of(model, 6) for model, _ in pair))


@pytest.mark.covering(0)
def test_values_are_changed_and_loaded(pair: Any) -> None:
    for model, optimizer in pair:
        weight = model.blocks[1].up.weight
        with torch.no_grad(), hetero.gathered(weight, modifier_rank=0):
            weight.mul_(0.5)
        loss_of(model, 5).backward()
        optimizer.step()
        model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()})
        loss_of(model, 6).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        loss_of(model, 7).backward()
        optimizer.step()
    assert same(*(result(*each) for each in pair))


@pytest.mark.covering(0)
def test_a_graph_of_before_step_is_refused(pair: Any) -> None:
    for model, optimizer in pair:
        loss = loss_of(model, 5)
        loss_of(model, 6).backward()
        optimizer.step()
        with pytest.raises((StaleGraphError, RuntimeError), match="modified by|as it was before"):
            loss.backward()


def test_what_is_read_is_waited_for(tmp_path: Path) -> None:
    """Nobody takes an old value for the new one, and nothing else is waited for."""
    model, optimizer = build(lambda: Net(tied=False), tmp_path, "optim_states", "forward")
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


def fill(p: nn.Parameter) -> None:
    p.fill_(0.0)


def fill_data(p: nn.Parameter) -> None:
    p.data.zero_()


def point_elsewhere(p: nn.Parameter) -> None:
    p.data = torch.zeros(p.shape, dtype=p.dtype)


@pytest.mark.parametrize("change", [fill, fill_data, point_elsewhere])
def test_a_change_while_the_update_goes_on_comes_after_it(
    tmp_path: Path, change: Callable[[nn.Parameter], None]
) -> None:

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        one_step(model, optimizer, 0)
        weight = model.blocks[1].up.weight
        is_updating = optimizer.engine.find(weight).state is ParamState.UPDATING
        assert is_updating == (overlap == "forward")
        with torch.no_grad():
            change(weight)
        assert not weight.any()
        one_step(model, optimizer, 1)
        return []

    assert_same_bits(tmp_path, "optim_states", ["forward"], loop, lambda: Net(tied=False))


def test_a_gradient_that_an_update_reads_is_changed_after_it(tmp_path: Path) -> None:
    """The first update is held until something waits for it."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        (chunk_group,) = optimizer.engine.chunk_groups
        pipeline, wait = chunk_group.pipeline, chunk_group.updates.wait_computed

        def release_and_wait(chunk: Any) -> None:
            pipeline.release()
            wait(chunk)

        one_step(model, optimizer, 0)
        loss_of(model, 1).backward()
        if overlap == "forward":
            pipeline.hold(0)
            chunk_group.updates.wait_computed = release_and_wait
        optimizer.step()
        hetero.clip_grad_value_(model.parameters(), 1e-6)
        pipeline.release()
        optimizer.zero_grad()
        one_step(model, optimizer, 2)
        return []

    assert_same_bits(tmp_path, "optim_states", ["forward"], loop, lambda: Net(tied=False))


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


class Bare(nn.Module):
    """Uses a weight outside of the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(tied=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = self.net.blocks[4].down.weight.float().square().mean()
        y: torch.Tensor = self.net(x) + penalty
        return y


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_use_outside_of_the_owner(tmp_path: Path, place: str) -> None:
    assert_same_bits(tmp_path, place, ["forward"], make=Bare)


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


def test_homes_move_while_updates_go_on(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        for step, budget in enumerate(["1200KiB", "3MiB", "800KiB"]):
            one_step(model, optimizer, step)
            optimizer.engine.set_budget(budget)
        one_step(model, optimizer, 3)
        return []

    assert_same_bits(tmp_path, "optim_states", ["forward"], loop)


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", EVERYWHERE)
def test_unfreezing_while_updates_go_on(tmp_path: Path, place: str) -> None:
    def make() -> Net:
        model = Net(tied=False)
        model.blocks[1].requires_grad_(False)
        return model

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        one_step(model, optimizer, 0)
        model.blocks[1].requires_grad_(True)
        for step in range(1, STEPS):
            one_step(model, optimizer, step)
        return []

    more = {"host_memory": "4MiB", "reserve_memory": "1MiB"}
    if place == "emulated":
        more["device_memory"] = "600KiB"
    elif place == "device":
        more["device_memory"] = "2MiB"
    assert_same_bits(tmp_path, place, ["forward"], loop, make, **more)


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


def test_close_with_updates_under_way(tmp_path: Path) -> None:
    for place in PLACES:
        model, optimizer = build(Net, tmp_path, place, "forward")
        one_step(model, optimizer, 0)
        optimizer.engine.close()
        with pytest.raises(hetero.ClosedError):
            loss_of(model, 1)


@pytest.mark.parametrize("wrong", [True, "early", None])
def test_the_option_is_checked(wrong: object) -> None:
    with pytest.raises(ValueError, match="overlap_updates must be one of auto, none, forward"):
        hetero.Config.make(placement_policy="cpu", overlap_updates=wrong)


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
