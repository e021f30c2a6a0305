"""Updates that begin while backward still runs: the same bits as without."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.chunk_groups.update_tasks import Update
from hetero.chunks.layout import Chunk
from offload.device.backend import EmulatedBackend
from offload.device.grad_offload import GradOffload
from offload.errors import HeteroError
from tests.support.training.overlap_net import (
    PLACES,
    STEPS,
    WIDTH,
    Begun,
    Block,
    Net,
    assert_same_bits,
    build,
    loss_of,
    one_step,
    plain_steps,
    under_way,
)
from tests.support.waiting import until

Seen = Iterable[torch.Tensor]


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["plain", "reentrant", "non-reentrant"])
def test_same_bits(tmp_path: Path, place: str, kind: str) -> None:
    """From the second step on chunks are updated during backward, and nothing differs."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        begun = Begun(optimizer)
        losses, counts = [], []
        for step in range(STEPS):
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.item())
            counts.append(begun.now)
            optimizer.step()
            assert begun.now == 0
            assert overlap == "both" or not under_way(optimizer), "step() waits"
            optimizer.zero_grad()
        assert counts[0] == 0
        if overlap == "none" or place == "ram":  # what is in memory is updated at step()
            assert counts == [0] * STEPS
        elif place == "disk":
            assert counts[1:] == [begun.chunks] * (STEPS - 1)
        else:  # what buffers keep is left to step(), and gradients may be on their way still
            assert all(count >= begun.chunks // 3 for count in counts[1:])
        return [torch.tensor(losses)]

    assert_same_bits(tmp_path, place, ["backward", "both"], loop, lambda: Net(kind=kind))


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", PLACES)
def test_what_gets_no_gradient_is_left_to_step(tmp_path: Path, place: str) -> None:
    def make() -> Net:
        model = Net(unused=True, tied=False)
        model.blocks[1].up.requires_grad_(False)
        return model

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        for step in range(STEPS):
            loss_of(model, step).backward()
            if overlap == "backward" and step and place == "disk":
                begun = Begun(optimizer)
                assert 0 < begun.now < begun.chunks
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, place, ["backward"], loop, make)


@pytest.mark.parametrize("place", ["ram", "optim_states"])
def test_two_chunk_groups(tmp_path: Path, place: str) -> None:
    """Parameters that are kept in fp32 beside those in bf16."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        assert len(optimizer.engine.chunk_groups) == 2
        return plain_steps(model, optimizer, overlap)

    assert_same_bits(tmp_path, place, ["backward"], loop, keep_fp32=["*norm*"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", ["ram", "optim_states", "disk"])
@pytest.mark.parametrize("marked", [True, False])
def test_accumulation(tmp_path: Path, place: str, marked: bool) -> None:
    """In no_sync(), or unmarked with as many micro-batches in each step."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        begun = Begun(optimizer)
        for step in range(STEPS):
            for micro_batch in range(3):
                more = marked and micro_batch < 2
                with hetero.no_sync(model) if more else nullcontext():
                    loss_of(model, 10 * step + micro_batch).backward()
                if micro_batch < 2:
                    assert begun.now == 0
            early = overlap == "backward" and step and place != "ram"
            assert (begun.now > 0) == early
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, place, ["backward"], loop)


def test_steps_of_different_lengths(tmp_path: Path) -> None:
    """Marked ones may be of any; of unmarked ones shorter steps are left to step()."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        for step, (count, marked) in enumerate([(2, False), (4, True), (1, False), (2, False)]):
            for micro_batch in range(count):
                with hetero.no_sync(model) if marked and micro_batch < count - 1 else nullcontext():
                    loss_of(model, 10 * step + micro_batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, "optim_states", ["backward"], loop)


class OwnParameter(nn.Parameter):
    """A class of the user's."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["plain", "hooked", "own class", "parts"])
def test_two_graphs_at_once(tmp_path: Path, place: str, how: str) -> None:
    """The second backward needs parameters whose gradients seemed to be final after the first.

    `how`: "hooked": the loop has hooks of its own that keep what autograd saves as it is;
    "parts": it calls the model's modules, and not the model.
    """

    def make() -> Net:
        model = Net()
        if how == "own class":
            for block in model.blocks:
                block.norm.weight = OwnParameter(block.norm.weight.detach())
        return model

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        hooks = saved_tensors_hooks(lambda t: t, lambda t: t) if how == "hooked" else nullcontext()
        called: Any = (lambda x: model.forward(x.bfloat16())) if how == "parts" else model
        for step in range(STEPS):
            with hooks:
                graphs = [loss_of(called, 10 * step + n) for n in range(2 if step >= 2 else 1)]
            for loss in graphs:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, place, ["backward", "both"], loop, make)


def test_torch_func_where_nothing_is_gathered(tmp_path: Path) -> None:
    """It allows no hooks of saved tensors, and none is needed."""
    model, optimizer = build(Net, tmp_path, "optim_states", "both")
    x = torch.randn(8, WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).float().square().sum(), x)
    found = torch.func.grad(lambda y: model(y).float().square().sum())(x.detach())
    assert torch.equal(found, expected)
    optimizer.engine.close()


def test_a_step_that_is_left_out(tmp_path: Path) -> None:
    """Gradients that are cleared before any update is begun do not count for the next step."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        for step in range(STEPS):
            with hetero.no_sync(model):
                loss_of(model, 100 + step).backward()
            optimizer.zero_grad()
            loss_of(model, step).backward()
            assert (Begun(optimizer).now > 0) == (overlap == "backward" and step > 0)
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, "optim_states", ["backward"], loop)


class Reused(nn.Module):
    """One block inside and outside of reentrant checkpoints: several gradients per backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.shared = Block()
        self.last = Block()
        self.times = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.shared, x, use_reentrant=True)
        x = self.shared(x)
        return self.last(x)


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", ["ram", "optim_states", "disk"])
def test_several_gradients_in_one_backward(tmp_path: Path, place: str) -> None:
    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        for step in range(STEPS):
            loss_of(model, step).backward()
            if place == "disk":  # (with "optim_states" buffers keep all of so small a net)
                assert (Begun(optimizer).now > 0) == (overlap == "backward" and step > 0)
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, place, ["backward"], loop, Reused)


@pytest.mark.covering(0)
@pytest.mark.parametrize("place", ["optim_states", "disk"])
def test_more_gradients_than_ever(tmp_path: Path, place: str) -> None:
    """A gradient that comes after its chunk was updated takes the update back."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        for step, times in enumerate((1, 3, 2, 3)):
            model.times = times
            one_step(model, optimizer, step)
        return []

    assert_same_bits(tmp_path, place, ["backward"], loop, Reused)


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


@pytest.mark.covering(1)
@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("place", ["optim_states", "disk"])
def test_an_exception_in_backward(tmp_path: Path, place: str, clear: bool) -> None:
    """Forward uses the old values; step() goes on with what there is, as torch's."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
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

    assert_same_bits(tmp_path, place, ["backward"], loop, lambda: Net(tied=False))


class Detached(nn.Module):
    """Uses a weight late in backward without giving it a gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.bottom = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.top = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bottom(x)
        if self.how == "detach":
            x = F.linear(x, self.top.weight.detach())
        elif self.how == "data":
            x = F.linear(x, self.top.weight.data)
        elif self.how == "recomputed":
            x = checkpoint(self._quietly, x, use_reentrant=False)
        return self.top(self.blocks(x))

    def _quietly(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            bias = self.top(x)
        return torch.tanh(x) * bias


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", ["ram", "optim_states", "disk"])
@pytest.mark.parametrize("how", ["detach", "data", "recomputed"])
def test_values_that_backward_still_needs(tmp_path: Path, place: str, how: str) -> None:
    assert_same_bits(tmp_path, place, ["backward"], make=lambda: Detached(how))


class Careful(torch.autograd.Function):
    """A backward of its own within backward, around which it holds the value of a parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, block: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.block = block
        with torch.no_grad():
            return block(x) @ weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad @ weight.t())
        assert not weight.isnan().any()
        return x.grad + 0 * (grad @ weight.t()), None, None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.block = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Careful.apply(self.first(x), self.block.weight, self.block)
        return out


@pytest.mark.parametrize("place", ["ram", "optim_states"])
def test_a_backward_inside_a_node_that_holds_values(tmp_path: Path, place: str) -> None:
    """The update waits until that node is done, although all gradients are there before."""
    assert_same_bits(tmp_path, place, ["backward"], make=Nested, dtype="fp32")


def test_a_failed_update_is_told(tmp_path: Path) -> None:
    model, optimizer = build(Net, tmp_path, "optim_states", "backward")
    one_step(model, optimizer, 0)
    optimizer.engine.chunk_groups[0].pipeline.inject(2)
    with pytest.raises(RuntimeError, match="made to fail"):
        one_step(model, optimizer, 1)
    optimizer.engine.close()


def test_close_in_the_middle(tmp_path: Path) -> None:
    model, optimizer = build(Net, tmp_path, "disk", "backward")
    one_step(model, optimizer, 0)
    loss_of(model, 1).backward()
    optimizer.engine.close()
    with pytest.raises(hetero.ClosedError):
        loss_of(model, 2)


def test_updates_are_made_while_backward_runs(tmp_path: Path) -> None:
    """The last node of backward waits for updates of what came before it."""
    model, optimizer = build(lambda: Net(tied=False), tmp_path, "disk", "backward")
    one_step(model, optimizer, 0)
    pipeline, made = optimizer.engine.chunk_groups[0].pipeline, []
    before = pipeline.stats["tasks"]
    tiles = sum(chunk.slots for chunk in optimizer.engine.layout.chunks)

    def wait(grad: torch.Tensor) -> None:
        until(lambda: pipeline.stats["tasks"] - before >= tiles // 2)
        made.append(pipeline.stats["tasks"] - before)

    def watch(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].register_hook(wait)

    handle = model.blocks[0].register_forward_pre_hook(watch)
    loss_of(model, 1).backward()
    handle.remove()
    assert len(made) == 1
    assert tiles // 2 <= made[0] < tiles, "not the first layer's, whose gradient is not there"
    optimizer.step()
    assert pipeline.stats["tasks"] - before == tiles
    optimizer.engine.close()


def test_a_device_has_no_copy_of_what_begins_to_be_updated(tmp_path: Path) -> None:
    """It could be in the middle of making it."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
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

    assert_same_bits(tmp_path, "emulated", ["backward"], loop)


def test_nothing_is_fetched_ahead_that_may_be_taken_back(tmp_path: Path) -> None:
    """The copy would have the new values after that."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        (chunk_group,) = optimizer.engine.chunk_groups
        params, updates = chunk_group.params, chunk_group.updates
        for step in range(STEPS):
            loss_of(model, step).backward()
            updates.wait_all_computed()
            early = [state.chunk.id for state in updates.speculative]
            assert bool(early) == (overlap == "backward" and step > 0)
            params.copies.cache.prefetch(len(updates.chunks), params._is_being_updated)
            params.copies.cache.finish_transfers()
            assert not any(map(params.copies.cache.holds, early))
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, "emulated", ["backward"], loop)


def test_gradients_in_slots_stay_until_their_update_is_made(tmp_path: Path) -> None:
    """The first one is held until backward waits for it."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        (chunk_group,) = optimizer.engine.chunk_groups
        pipeline, wait = chunk_group.pipeline, chunk_group.updates.wait_computed
        waited: list[int] = []

        def release_and_wait(chunk: Chunk) -> None:
            waited.append(chunk.id)
            pipeline.release()
            wait(chunk)

        losses = [one_step(model, optimizer, step) for step in range(2)]
        loss = loss_of(model, 2)
        if overlap == "backward":
            pipeline.hold(0)
            chunk_group.updates.wait_computed = release_and_wait
        loss.backward()
        pipeline.release()
        assert bool(waited) == (overlap == "backward")
        optimizer.step()
        return [torch.tensor([*losses, loss.item()])]

    assert_same_bits(tmp_path, "disk", ["backward"], loop)


def test_a_gradient_that_is_on_its_way_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        begun = Begun(optimizer)
        losses = [one_step(model, optimizer, step) for step in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(GradOffload, "busy", lambda self, owner: True)
            loss_of(model, 2).backward()
            assert begun.now == 0
        optimizer.step()
        return [torch.tensor(losses)]

    assert_same_bits(tmp_path, "emulated", ["backward"], loop)


def test_a_chunk_whose_gradient_was_lost_is_not_taken_for_updated(tmp_path: Path) -> None:
    model, optimizer = build(Net, tmp_path, "emulated", "backward")
    backend = optimizer.engine.backend
    assert isinstance(backend, EmulatedBackend)
    data = torch.randn(STEPS, 8, WIDTH)
    for x in data[:2]:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    backend.d2h.inject(1, error=errno.EIO)
    model(data[2]).float().square().mean().backward()
    for _ in range(2):
        with pytest.raises(HeteroError, match="the gradient of .* did not arrive in RAM"):
            optimizer.step()
    optimizer.engine.close()
