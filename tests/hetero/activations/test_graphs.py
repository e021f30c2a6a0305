"""hetero/activations: graphs of autograd whose saved tensors are in a store, against plain ones."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from offload.errors import StaleGraphError
from tests.support.activations import KIB, StoreRig, open_store

pytestmark = pytest.mark.usefixtures("nothing_left")

WIDTH, ROWS, BLOCKS = 32, 64, 6  # an activation is of 8 KiB


class Block(nn.Module):
    """Saves views of one storage, a tensor that two nodes save, and what a node returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other, gate = self.up(x).split(WIDTH, dim=-1)
        return x + self.down(torch.tanh(one) * other * gate.sigmoid())


class Net(nn.Module):
    """Some blocks, each in a checkpoint if `reentrant` says of which kind."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def batch(seed: int = 0) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()  # a reentrant checkpoint wants that


def grads(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def expected(backwards: Callable[[nn.Module], object], reentrant: bool | None) -> list:
    net = Net(reentrant)
    backwards(net)
    return grads(net)


def assert_same(rig: StoreRig, net: nn.Module, plain: list[torch.Tensor]) -> None:
    found = grads(net)
    assert len(found) == len(plain) > 0
    assert all(map(torch.equal, found, plain))
    assert rig.written > 0
    assert len(rig.store) == rig.store.kept_bytes == 0


# What the blocks save does not fit; of checkpoints' inputs, 8 KiB each, two stay.
host_of = {None: 96 * KIB, False: 32 * KIB, True: 32 * KIB}
CHECKPOINTS = [pytest.param(kind, id=f"reentrant-{kind}") for kind in (None, False, True)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("reentrant", CHECKPOINTS)
def test_graphs_that_cross(reentrant: bool | None, prefetch: bool, tmp_path: Path) -> None:
    """Micro-batches whose backwards come in another order, one of them twice."""

    def backwards(net: nn.Module) -> None:
        losses = [net(batch(seed)) for seed in range(3)]
        losses[0].backward()
        losses[2].backward(retain_graph=reentrant is None)
        losses[1].backward()
        if reentrant is None:
            losses[2].backward()

    with open_store(tmp_path, 96 * KIB, debug={"prefetch": prefetch}) as rig:
        net = Net(reentrant)
        with rig.saving():  # also what a reentrant checkpoint computes again
            backwards(net)
        assert_same(rig, net, expected(backwards, reentrant))


def test_double_backward(tmp_path: Path) -> None:
    def backwards(net: nn.Module) -> None:
        x = batch()
        loss = net(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()

    with open_store(tmp_path, 256 * KIB) as rig:
        net = Net()
        with rig.saving():
            backwards(net)
        assert_same(rig, net, expected(backwards, None))


@pytest.mark.parametrize("around", [True, False])
def test_beside_save_on_cpu(around: bool, tmp_path: Path) -> None:
    """Its hooks, inside the store's or around them, have what is saved where they are in force."""

    def backward(net: nn.Module) -> None:
        net(batch()).backward()

    with open_store(tmp_path, 96 * KIB) as rig:
        net = Net()
        if around:
            with save_on_cpu(), rig.saving():
                loss = net(batch())
        else:
            with rig.saving():
                x = net.blocks[0](batch())
                for number, block in enumerate(net.blocks[1:]):
                    if number == 2:
                        with save_on_cpu():
                            x = block(x)
                    else:
                        x = block(x)
                loss = x.square().mean()
        loss.backward()
        assert_same(rig, net, expected(backward, None))


@pytest.mark.parametrize("reentrant", CHECKPOINTS)
def test_a_graph_that_is_dropped(reentrant: bool | None, tmp_path: Path) -> None:
    with open_store(tmp_path, host_of[reentrant]) as rig:
        net = Net(reentrant)
        with rig.saving():
            loss = net(batch())
        assert len(rig.store) > 0
        del loss
        gc.collect()  # a checkpoint's frame is in a circle
        assert len(rig.store) == rig.store.kept_bytes == 0


class Stop(Exception):
    """A user's exception."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("reentrant", CHECKPOINTS)
def test_an_exception(reentrant: bool | None, in_backward: bool, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise Stop

    def backward(net: nn.Module) -> None:
        net(batch()).backward()

    with open_store(tmp_path, host_of[reentrant]) as rig:
        net = Net(reentrant)
        if in_backward:
            hook = net.blocks[2].down.weight.register_hook(stop)
        else:
            hook = net.blocks[4].down.register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            with rig.saving():
                loss = net(batch())
            try:
                loss.backward()
            finally:
                del loss
        hook.remove()
        # torch keeps the nodes that were ready to run until the thread's next backward.
        torch.zeros(1, requires_grad=True).backward()
        gc.collect()
        assert len(rig.store) == rig.store.kept_bytes == 0
        net.zero_grad()
        with rig.saving():
            loss = net(batch())
        loss.backward()
        assert_same(rig, net, expected(backward, reentrant))


def test_a_change_in_place_is_refused_as_torch_does(tmp_path: Path) -> None:
    with open_store(tmp_path, 96 * KIB) as rig:
        x = batch()
        with rig.saving():
            hidden = x * 2
            loss = hidden.tanh().square().sum() + (hidden * hidden).sum()
        with torch.no_grad():
            hidden.add_(1)
        with pytest.raises(StaleGraphError, match="modified by an inplace operation"):
            loss.backward()
        del loss, hidden


def test_several_threads(tmp_path: Path) -> None:
    """As nn.DataParallel's: each saves in a graph of its own."""
    nets = [Net() for _ in range(9)]

    def run(seed: int) -> list[torch.Tensor]:
        net = nets[seed]
        with rig.saving():
            loss = net(batch(seed))
        loss.backward()
        return grads(net)

    def alone(seed: int) -> list[torch.Tensor]:
        net = Net()
        net(batch(seed)).backward()
        return grads(net)

    with open_store(tmp_path, 384 * KIB) as rig, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, range(9)))
        for seed, each in enumerate(found):
            assert all(map(torch.equal, each, alone(seed)))
        assert len(rig.store) == 0
