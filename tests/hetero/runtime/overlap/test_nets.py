"""Nets whose updates begin in backward, and go on after step(): the same bits as without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.training.overlap_net import (
    EVERYWHERE,
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
    untied,
)

Seen = list[torch.Tensor]
OVERLAPS = ["forward", "both"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("kind", ["plain", "reentrant", "non-reentrant"])
def test_same_bits(tmp_path: Path, place: str, kind: str) -> None:
    """From the second step on chunks are updated during backward, or step() returns with all of
    them under way, and nothing differs."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        begun = Begun(optimizer)
        losses, counts = [], []
        for step in range(STEPS):
            loss = loss_of(model, step)
            assert under_way(optimizer) == 0, "all modules were used"
            loss.backward()
            losses.append(loss.item())
            counts.append(begun.now)
            optimizer.step()
            assert begun.now == 0
            assert under_way(optimizer) == (begun.chunks if overlap in ("forward", "both") else 0)
            optimizer.zero_grad()
        assert counts[0] == 0
        if overlap in ("none", "forward") or place == "ram":  # what is in memory is left to step()
            assert counts == [0] * STEPS
        elif place == "disk":
            assert counts[1:] == [begun.chunks] * (STEPS - 1)
        elif place != "device":
            # What buffers keep is left to step(), and gradients may be on their way still.
            assert all(count >= begun.chunks // 3 for count in counts[1:])
        return [torch.tensor(losses)]

    assert_same_bits(tmp_path, place, OVERLAPS, loop, lambda: Net(kind=kind))


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
    """Its update waits until that node is done, although all gradients are there before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.block = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Careful.apply(self.first(x), self.block.weight, self.block)
        return out


class Bare(nn.Module):
    """Uses a weight outside of the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = untied()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = self.net.blocks[4].down.weight.float().square().mean()
        y: torch.Tensor = self.net(x) + penalty
        return y


def some_without_gradients() -> Net:
    """They are left to step()."""
    model = Net(unused=True, tied=False)
    model.blocks[1].up.requires_grad_(False)
    return model


NETS: dict[str, Callable[[], nn.Module]] = {
    "some without gradients": some_without_gradients,
    "reused": Reused,
    "detached": lambda: Detached("detach"),
    "data": lambda: Detached("data"),
    "recomputed": lambda: Detached("recomputed"),
    "bare": Bare,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", ["optim_states", "disk", "emulated"])
@pytest.mark.parametrize("net", NETS)
def test_uses_of_parameters(tmp_path: Path, place: str, net: str) -> None:
    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        begun = Begun(optimizer)
        for step in range(STEPS):
            loss_of(model, step).backward()
            if overlap == "both" and place == "disk":
                assert (begun.now > 0) == (step > 0)
                assert net != "some without gradients" or begun.now < begun.chunks
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same_bits(tmp_path, place, ["both"], loop, NETS[net])


def test_a_backward_inside_a_node_that_holds_values(tmp_path: Path) -> None:
    assert_same_bits(tmp_path, "optim_states", ["backward"], make=Nested, dtype="fp32")


class WithoutValues(torch.autograd.Function):
    """A backward of its own within backward; the node has no value of a parameter."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, block: nn.Module, count: Callable[[], int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.block, ctx.count = block, count
        with torch.no_grad():
            found: torch.Tensor = block(x)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        before = ctx.count()
        torch.autograd.backward(y, grad)
        assert ctx.count() == before
        return x.grad, None, None


def test_no_update_begins_in_a_backward_inside_a_node(tmp_path: Path) -> None:
    """It might have taken values of any parameter out of what it saved, which nothing shows."""
    model, optimizer = build(untied, tmp_path, "disk", "backward")
    begun, block = Begun(optimizer), model.blocks[2]
    forward = block.forward
    block.forward = lambda x: WithoutValues.apply(x, forward, lambda: begun.now)
    for step in range(STEPS):
        loss_of(model, step).backward()
        assert (begun.now > 0) == (step > 0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.engine.close()


def test_two_chunk_groups(tmp_path: Path) -> None:
    """Parameters that are kept in fp32 beside those in bf16."""

    def loop(model: nn.Module, optimizer: Any, overlap: str) -> Seen:
        assert len(optimizer.engine.chunk_groups) == 2
        return list(plain_steps(model, optimizer, overlap))

    assert_same_bits(tmp_path, "optim_states", ["backward"], loop, keep_fp32=["*norm*"])


def test_more_gradients_than_ever(tmp_path: Path) -> None:
    """A gradient that comes after its chunk was updated takes the update back."""

    def loop(model: Any, optimizer: Any, overlap: str) -> Seen:
        for step, times in enumerate((1, 3, 2, 3)):
            model.times = times
            one_step(model, optimizer, step)
        return []

    assert_same_bits(tmp_path, "disk", ["backward"], loop, Reused)
