"""What training loops do besides the plain loop: right, or refused; never silently wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import hetero
from tests.support.training.small_net import (
    SETTINGS,
    Net,
    Settings,
    assert_same,
    loss_of,
    managed,
    plain,
)

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.parametrize("settings", SETTINGS),
]


@pytest.fixture
def net(settings: Settings, tmp_path: Path) -> Callable[..., tuple[Net, hetero.HybridAdam]]:
    def build(**more: object) -> tuple[Net, hetero.HybridAdam]:
        return managed(settings, tmp_path, **more)

    return build


def parts(net: Net, clip: Callable[..., object], step: Callable[[], object]) -> Iterator[str]:
    """Makes the parts of a training one after the other; says what each is about."""
    used = [p for name, p in net.named_parameters() if not name.startswith("unused")]
    for seed in range(3):
        loss_of(net, seed).backward()
        step()
    yield "gradients stay after a step until they are cleared"
    for max_norm, has_step in product((0.01, 1e9), (False, True)):
        net.zero_grad()
        loss_of(net).backward()
        clip(net.parameters(), max_norm)
        if has_step:
            step()
        loss_of(net, 2).backward()
        step()
        yield f"what follows clipping to {max_norm} is added to it, after a step: {has_step}"
    for seed in range(2):
        grads = torch.autograd.grad(loss_of(net, seed), used)
        for param, grad in zip(used, grads, strict=True):
            param.grad = grad
        net.unused.weight.grad = torch.ones(8, 8)
        if seed:
            loss_of(net, 5).backward()  # adds to them
        step()
    yield "gradients that are assigned are taken"
    net.zero_grad()
    loss_of(net).backward()
    torch.autograd.grad(loss_of(net, 2), used)
    step()
    yield "autograd.grad() leaves gradients that are kept alone"
    first, second = loss_of(net, 1), loss_of(net, 2)
    with torch.no_grad():
        loss_of(net, 3)
    second.backward()
    first.backward(retain_graph=True)
    first.backward()
    step()
    yield "several forwards come before their backwards"


def test_as_in_plain_torch(net: Callable) -> None:
    model, optimizer = net()
    expected, adam = plain()
    ours = parts(model, hetero.clip_grad_norm_, optimizer.step)
    for what, _ in zip(ours, parts(expected, nn.utils.clip_grad_norm_, adam.step), strict=True):
        assert_same(model, expected, what)
    optimizer.engine.close()


def test_a_skipped_step_does_not_leave_its_clipping_behind(net: Callable) -> None:
    model, optimizer = net()
    clean, clean_optimizer = net()
    (loss_of(model) * 1e6).backward()
    hetero.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    norms = []
    for each, its in ((model, optimizer), (clean, clean_optimizer)):
        loss_of(each).backward()
        norms.append(hetero.clip_grad_norm_(each.parameters(), 0.1))
        its.step()
    assert norms[0] == norms[1]
    assert all(map(torch.equal, *(hetero.masters(m.parameters()) for m in (model, clean))))
    optimizer.engine.close()
    clean_optimizer.engine.close()


def test_a_hook_from_before_initialize_sees_the_sum_of_micro_batches(
    settings: Settings, tmp_path: Path
) -> None:
    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    (model, _), (expected, adam) = plain(), plain()
    for each in (model, expected):
        each.first.weight.register_post_accumulate_grad_hook(halve)
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
    options = {"dtype": "fp32", "nvme_path": str(tmp_path), "chunk_numel": 4096, **settings}
    hetero.initialize(model, optimizer, options)
    for each, step in ((model, optimizer.step), (expected, adam.step)):
        for seed in range(3):
            loss_of(each, seed).backward()
        step()
    grads = [hetero.grads(model.first.weight)[0], expected.first.weight.grad]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-8)
    assert_same(model, expected)
    optimizer.engine.close()


def test_sparse_gradients_that_are_assigned_are_refused(net: Callable) -> None:
    model, optimizer = net()
    model.first.weight.grad = torch.ones(64, 64).to_sparse()
    with pytest.raises(ValueError, match=r"first.weight got a .*sparse"):
        optimizer.step()
    optimizer.engine.close()


def test_a_step_without_gradients_changes_nothing(net: Callable) -> None:
    model, optimizer = net(dtype="fp16", loss_scale_window=1)
    before = hetero.masters(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step(lambda: 0.0)
    assert all(map(torch.equal, hetero.masters(model.parameters()), before))
    assert optimizer.engine.shared.loss_scale.good_steps == 0
    assert optimizer.engine.shared.loss_scale.value == 65536.0
    optimizer.engine.close()


def test_a_users_hook_that_raises_loses_no_earlier_micro_batch(net: Callable) -> None:
    model, optimizer = net()
    loss_of(model).backward()
    before = optimizer.engine.grad_norm([model.first.weight])

    def stop(grad: torch.Tensor) -> None:
        raise KeyError

    handle = model.first.weight.register_hook(stop)
    with pytest.raises(KeyError):
        loss_of(model).backward()
    handle.remove()
    assert optimizer.engine.grad_norm([model.first.weight]) == before
    optimizer.engine.close()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_create_graph_does_not_keep_graphs(net: Callable) -> None:
    model, optimizer = net()

    def graphs() -> int:
        gc.collect()
        return sum(isinstance(o, torch.Tensor) and o.grad_fn is not None for o in gc.get_objects())

    counts = []
    for _ in range(3):
        loss = loss_of(model)
        loss.backward(create_graph=True)
        del loss
        optimizer.step()
        optimizer.zero_grad()
        counts.append(graphs())
    # torch itself keeps one tensor a backward if saved-tensor hooks were in force, whoever's.
    assert counts[-1] - counts[0] <= 2
    optimizer.engine.close()


def test_a_step_leaves_nothing_to_the_garbage_collector(net: Callable) -> None:
    """Cycles keep activations alive until the collector comes: memory that no budget knows of."""
    model, optimizer = net()

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step()
        gc.collect()
        left = [type(o).__name__ for o in gc.garbage if isinstance(o, (torch.Tensor, FrameType))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not left
    optimizer.engine.close()
