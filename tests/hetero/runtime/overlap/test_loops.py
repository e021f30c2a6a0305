"""Loops whose updates begin in backward, or go on after step(): the same bits as without.

Each is run in the first of its places, and in the others by `make test-all`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import hetero
from hetero.chunk_groups.update_tasks import Update
from hetero.chunks.layout import Chunk
from hetero.state.managed_param import ParamState
from offload.device.grad_offload import GradOffload
from offload.errors import NonFiniteError
from tests.support.training.overlap_net import (
    PLACES,
    STEPS,
    Begun,
    Loop,
    Net,
    assert_same_bits,
    backwards,
    loss_of,
    one_step,
    untied,
)

Seen = list[torch.Tensor]
ON_NVME = ("disk", "optim_states", "emulated")


class Case(NamedTuple):
    """A loop, and how it is run."""

    loop: Loop
    overlaps: tuple[str, ...]
    make: Callable[[], nn.Module]
    options: dict[str, Any]


CASES: dict[str, Case] = {}
PARAMS: list[Any] = []  # (name, place)


def case(
    *places: str,
    overlaps: tuple[str, ...] = ("backward",),
    make: Callable[[], nn.Module] = Net,
    name: str = "",
    **options: Any,
) -> Callable[[Loop], Loop]:
    """Adds a loop, by its own name or another one."""

    def added(loop: Loop) -> Loop:
        given = name or loop.__name__
        CASES[given] = Case(loop, overlaps, make, options)
        for place in dict.fromkeys(places):
            marks = () if place == places[0] else pytest.mark.extra
            PARAMS.append(pytest.param(given, place, marks=marks))
        return loop

    return added


# Micro-batches, and graphs


def micro_batches(*steps: tuple[int, bool]) -> Loop:
    """Steps of so many micro-batches, marked by no_sync() or not."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        begun, is_even = Begun(optimizer), len(set(steps)) == 1
        for step, (count, marked) in enumerate(steps):
            for number in range(count):
                more = number + 1 < count
                with hetero.no_sync(model) if marked and more else nullcontext():
                    loss_of(model, 10 * step + number).backward()
                assert begun.now == 0 or not (more and is_even)
            assert (begun.now > 0) == (overlap == "backward" and step > 0) or not is_even
            optimizer.step()
            optimizer.zero_grad()
        return []

    return loop


case("optim_states", "disk", name="marked")(micro_batches(*[(3, True)] * STEPS))
case("disk", "optim_states", name="unmarked")(micro_batches(*[(3, False)] * STEPS))
# Of unmarked ones shorter steps are left to step().
lengths = micro_batches((2, False), (4, True), (1, False), (2, False))
case("optim_states", name="other lengths")(lengths)


class OwnParameter(nn.Parameter):
    """A class of the user's."""


def with_own_class() -> Net:
    model = Net()
    for block in model.blocks:
        block.norm.weight = OwnParameter(block.norm.weight.detach())
    return model


def two_graphs(hooked: bool = False, parts: bool = False) -> Loop:
    """The second backward needs parameters whose gradients seemed to be final after the first.

    `hooked`: the loop has hooks of its own that keep what autograd saves as it is; `parts`: it
    calls the model's modules, and not the model.
    """

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        called: Any = (lambda x: model.forward(x.bfloat16())) if parts else model
        for step in range(4):
            hooks = saved_tensors_hooks(lambda t: t, lambda t: t) if hooked else nullcontext()
            with hooks:
                graphs = [loss_of(called, 10 * step + n) for n in range(2 if step >= 2 else 1)]
            for loss in graphs:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    return loop


BOTH = ("both",)
case("disk", *PLACES, overlaps=BOTH, name="two graphs")(two_graphs())
case("emulated", *PLACES, overlaps=BOTH, name="two graphs, hooked")(two_graphs(hooked=True))
case("optim_states", *PLACES, overlaps=BOTH, name="two graphs, parts")(two_graphs(parts=True))
case("disk", *PLACES, overlaps=BOTH, make=with_own_class, name="two graphs, own class")(
    two_graphs()
)


@case("optim_states")
def a_step_that_is_left_out(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
    """Gradients that are cleared before any update is begun do not count for the next step."""
    for step in range(STEPS):
        with hetero.no_sync(model):
            loss_of(model, 100 + step).backward()
        optimizer.zero_grad()
        loss_of(model, step).backward()
        assert (Begun(optimizer).now > 0) == (overlap == "backward" and step > 0)
        optimizer.step()
        optimizer.zero_grad()
    return []


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


def an_exception_in_backward(clear: bool) -> Loop:
    """Forward uses the old values; step() goes on with what there is, as torch's."""

    def loop(model: Any, optimizer: Any, overlap: str) -> Seen:
        one_step(model, optimizer, 0)
        fail = model.blocks[1].register_forward_pre_hook(lambda m, args: (Fails.apply(args[0]),))
        with pytest.raises(ArithmeticError):
            loss_of(model, 1).backward()
        fail.remove()
        begun = Begun(optimizer)
        assert (0 < begun.now < begun.chunks) == (overlap == "backward")
        losses = [loss_of(model, 1).item()]
        assert begun.now == 0, "all was used"
        if clear:
            optimizer.zero_grad()
        else:
            optimizer.step()
        losses += [one_step(model, optimizer, 2), one_step(model, optimizer, 3)]
        return [torch.tensor(losses)]

    return loop


case("disk", "optim_states", make=untied, name="failed, cleared")(an_exception_in_backward(True))
case("optim_states", "disk", make=untied, name="failed, stepped")(an_exception_in_backward(False))


# Clipping and scaling


@case("disk", "optim_states", "emulated", overlaps=("auto", "both"))
def shares_of_clipped_steps(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
    """None, some and all are clipped; "auto" stops to guess when it has been wrong too often."""
    clips = [1e6] * 2 + [1e-2, 1e6] + [1e-2] * 4 + [1e6] * 5
    begun, counts = Begun(optimizer), []
    for step in backwards(model, optimizer, len(clips)):
        counts.append(begun.now)
        nn.utils.clip_grad_norm_(model.parameters(), clips[step])
    assert counts[0] == 0
    if overlap == "auto":
        assert all(counts[1:7])
        assert counts[7:11] == [0] * 4
        assert all(counts[11:])
    elif overlap != "none":
        assert all(counts[1:])
    return []


@case("disk", *PLACES, overlaps=("auto", "both"), dtype="fp16", initial_loss_scale=2.0**20)
def the_loss_scale_of_fp16(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
    for step in range(6):
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
    scale = optimizer.engine.shared.loss_scale
    assert scale.skipped_steps > 0
    return [torch.tensor(scale.value)]


@case(*ON_NVME, overlaps=("both",))
def a_norm_that_is_nan(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
    for step in range(4):
        (loss_of(model, step) * (float("nan") if step == 2 else 1.0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        told = pytest.raises(NonFiniteError, match="zero_grad") if step == 2 else nullcontext()
        with told:
            optimizer.step()
        optimizer.zero_grad()
    return []


# Changes while updates go on


def fill(p: nn.Parameter) -> None:
    p.fill_(0.0)


def fill_data(p: nn.Parameter) -> None:
    p.data.zero_()


def point_elsewhere(p: nn.Parameter) -> None:
    p.data = torch.zeros(p.shape, dtype=p.dtype)


@case("optim_states", overlaps=("forward",), make=untied)
def changes_come_after_the_update(model: Any, optimizer: Any, overlap: str) -> Seen:
    one_step(model, optimizer, 0)
    for step, change in enumerate((fill, fill_data, point_elsewhere), start=1):
        weight = model.blocks[step].up.weight
        is_updating = optimizer.engine.find(weight).state is ParamState.UPDATING
        assert is_updating == (overlap == "forward")
        with torch.no_grad():
            change(weight)
        assert not weight.any()
        one_step(model, optimizer, step)
    return []


@case("optim_states", overlaps=("forward",), make=untied)
def a_gradient_that_an_update_reads_is_changed_after_it(
    model: nn.Module, optimizer: Any, overlap: str
) -> Seen:
    """The first update is held until something waits for it."""
    one_step(model, optimizer, 0)
    loss_of(model, 1).backward()
    if overlap == "forward":
        hold_until_waited_for(optimizer)
    optimizer.step()
    hetero.clip_grad_value_(model.parameters(), 1e-6)
    optimizer.engine.chunk_groups[0].pipeline.release()
    optimizer.zero_grad()
    one_step(model, optimizer, 2)
    return []


def hold_until_waited_for(optimizer: Any) -> list[int]:
    """The next update does not begin before something waits for one. Returns the chunks that will
    have been waited for."""
    (chunk_group,) = optimizer.engine.chunk_groups
    pipeline, wait = chunk_group.pipeline, chunk_group.updates.wait_computed
    waited: list[int] = []

    def release_and_wait(chunk: Chunk) -> None:
        waited.append(chunk.id)
        pipeline.release()
        wait(chunk)

    pipeline.hold(0)
    chunk_group.updates.wait_computed = release_and_wait
    return waited


def partly_frozen() -> Net:
    model = untied()
    model.blocks[1].requires_grad_(False)
    return model


ROOM: dict[str, Any] = {
    "make": partly_frozen,
    "overlaps": ("forward",),
    "host_memory": "4MiB",
    "reserve_memory": "1MiB",
}


@case("optim_states", "ram", "disk", **ROOM)
@case("emulated", name="unfreezing, emulated", device_memory="600KiB", **ROOM)
@case("device", name="unfreezing, device", device_memory="2MiB", **ROOM)
def unfreezing(model: Any, optimizer: Any, overlap: str) -> Seen:
    one_step(model, optimizer, 0)
    model.blocks[1].requires_grad_(True)
    for step in range(1, STEPS):
        one_step(model, optimizer, step)
    return []


# Slots, copies and gradients on their way


@case("emulated")
def a_device_has_no_copy_of_what_begins_to_be_updated(
    model: nn.Module, optimizer: Any, overlap: str
) -> Seen:
    """It could be in the middle of making it."""
    (chunk_group,) = optimizer.engine.chunk_groups
    cache, submit = chunk_group.params.copies.cache, chunk_group.update_tasks.submit
    early: list[int] = []

    def watched(update: Update, last: bool) -> None:
        if not last:
            early.extend(each.chunk.id for each in update.chunks)
        assert not any(cache.holds(each.chunk.id) for each in update.chunks)
        submit(update, last)

    chunk_group.update_tasks.submit = watched
    losses = [one_step(model, optimizer, step) for step in range(STEPS)]
    assert bool(early) == (overlap == "backward")
    return [torch.tensor(losses)]


@case("emulated")
def nothing_is_fetched_ahead_that_may_be_taken_back(
    model: nn.Module, optimizer: Any, overlap: str
) -> Seen:
    """The copy would have the new values after that."""
    (chunk_group,) = optimizer.engine.chunk_groups
    params, updates = chunk_group.params, chunk_group.updates
    for step in backwards(model, optimizer):
        updates.wait_all_computed()
        early = [state.chunk.id for state in updates.speculative]
        assert bool(early) == (overlap == "backward" and step > 0)
        params.copies.cache.prefetch(len(updates.chunks), params._is_being_updated)
        params.copies.cache.finish_transfers()
        assert not any(map(params.copies.cache.holds, early))
    return []


@case("disk")
def gradients_in_slots_stay_until_their_update_is_made(
    model: nn.Module, optimizer: Any, overlap: str
) -> Seen:
    """The first one is held until backward waits for it."""
    losses = [one_step(model, optimizer, step) for step in range(2)]
    loss = loss_of(model, 2)
    waited = hold_until_waited_for(optimizer) if overlap == "backward" else []
    loss.backward()
    optimizer.engine.chunk_groups[0].pipeline.release()
    assert bool(waited) == (overlap == "backward")
    optimizer.step()
    return [torch.tensor([*losses, loss.item()])]


@case("emulated")
def a_gradient_that_is_on_its_way_is_not_used(
    model: nn.Module, optimizer: Any, overlap: str
) -> Seen:
    begun = Begun(optimizer)
    losses = [one_step(model, optimizer, step) for step in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradOffload, "busy", lambda self, owner: True)
        loss_of(model, 2).backward()
        assert begun.now == 0
    optimizer.step()
    return [torch.tensor(losses)]


@pytest.mark.parametrize(("name", "place"), PARAMS)
def test_same_bits(tmp_path: Path, name: str, place: str) -> None:
    made = CASES[name]
    assert_same_bits(tmp_path, place, made.overlaps, made.loop, made.make, **made.options)
