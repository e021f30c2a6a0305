"""Calls of blocks that are made again: arguments, outputs, and what a forward changes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from offload.errors import StaleGraphError
from tests.support.recompute import Inner, Stack, latest
from tests.support.training.loops import build

pytestmark = pytest.mark.usefixtures("nothing_left")

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))


class Around(nn.Module):
    """`count` blocks of a class, called by a function (blocks, x) -> tensor."""

    def __init__(self, block: Callable[[], nn.Module], call: Callable[..., Any], count: int = 3):
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(count)])
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.blocks, x)


class Wrapped(nn.Module):
    """A linear layer and what a forward does beside it."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.function is not None
        return self.function(self.linear, *args, **kwargs)


def one_after_the_other(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def made(make: Callable[[], nn.Module], mode: Any = "all") -> tuple[Any, Any]:
    options = {"placement_policy": "cpu", "activation_memory": "64MiB", "dtype": "fp32"}
    return build(make, recompute=mode, **options)


def compare(
    make: Callable[[], nn.Module],
    recomputed: list[bool] | None,
    prepare: Callable[[Any], object] = lambda model: None,
    steps: int = 2,
) -> hetero.Engine:
    """Gradients, buffers and outputs of some forwards are torch's own; the last calls were
    `recomputed`. The engine is closed."""
    model, optimizer = made(make)
    torch.manual_seed(0)
    plain = make()
    for each in (model, plain):
        prepare(each)
    for _ in range(steps):
        found = []
        for each in (model, plain):
            torch.manual_seed(2)
            each.zero_grad()
            loss = each(X).square().mean()
            loss.backward()
            found.append(loss.detach())
        assert torch.equal(*found)
        for own, param in zip(model.parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) == (param.grad is None)
            assert own.grad is None or torch.equal(own.grad, param.grad)
    for own, buffer in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(own, buffer)
    engine = optimizer.engine
    if recomputed is not None:
        assert latest(engine).recomputed == recomputed
    engine.close()
    return engine


def test_keywords_and_nests() -> None:
    def function(linear: Any, x: Any, *, more: Any, scale: float, none: None) -> Any:
        (first, second), by_name = more
        out = linear(x * scale) + first * second + by_name["bias"][0]
        return out, {"again": [out * 2, "text"], "none": none}

    def call(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            more = ((x, x.detach()), {"bias": [x * 2]})
            x, others = block(x, more=more, scale=0.5, none=None)
            x = x + others["again"][0]
        return x

    compare(lambda: Around(lambda: Wrapped(function), call), [True] * 3)


def test_a_list_that_the_call_fills() -> None:
    """In forward it is the caller's own; when the call is made again it is a copy, as it was."""

    def function(linear: Any, x: Any, seen: list[Any]) -> Any:
        seen.append(linear(x))
        return seen[-1].tanh()

    lengths = []

    def call(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for block in blocks:
            x = block(x, seen)
        lengths.append(len(seen))
        return x + torch.stack(seen).sum(0)

    compare(lambda: Around(lambda: Wrapped(function), call), [True] * 3)
    assert set(lengths) == {3}


def test_an_object_is_not_given_again() -> None:
    def call(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        cache = iter(range(100))
        for block in blocks:
            x = block(x, cache)
        return x

    def function(linear: Any, x: Any, cache: Any) -> Any:
        return linear(x) * (next(cache) + 1)

    compare(lambda: Around(lambda: Wrapped(function), call), [False] * 3)


def test_buffers_that_a_call_changes() -> None:
    """Statistics would be taken twice; a frozen norm's are not changed."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))

    engine = compare(lambda: Around(block, one_after_the_other), [False] * 3)
    assert sum("changes its buffers" in note for note in engine.notes) == 1
    make = lambda: Around(block, one_after_the_other)  # noqa: E731
    compare(make, [True] * 3, prepare=lambda model: model.eval())

    def mixed(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        blocks.train(not blocks.training)  # evaluating and training forwards take turns
        return one_after_the_other(blocks, x)

    compare(lambda: Around(block, mixed), [False] * 3, steps=4)


def test_a_buffer_that_is_replaced() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return self.linear(x)

    compare(lambda: Around(Counting, one_after_the_other), [False] * 3)


def test_an_input_that_the_call_changes() -> None:
    block = lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64))  # noqa: E731

    def call(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        return one_after_the_other(blocks, x * 1)

    engine = compare(lambda: Around(block, call), [False] * 3)
    assert sum("its input in place" in note for note in engine.notes) == 1


def test_an_input_that_is_changed_after_the_call() -> None:
    """Is an error, as with any checkpoint, and no wrong gradient."""

    def function(linear: Any, x: Any) -> Any:
        return (x + 1).tanh() * linear.weight.sum()

    def call(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = x * 1
            y = block(x)
            x += 3
            x = y
        return x

    model, optimizer = made(lambda: Around(lambda: Wrapped(function), call))
    with pytest.raises(StaleGraphError, match="modified by an inplace operation"):
        model(X).sum().backward()
    optimizer.engine.close()


def test_frozen_parts() -> None:
    def freeze(part: Callable[[str], bool]) -> Callable[[Any], None]:
        def prepare(model: Any) -> None:
            for name, param in model.named_parameters():
                param.requires_grad_(not part(name))

        return prepare

    # Embeddings before the blocks: what these are given has no gradient.
    engine = compare(lambda: Stack(3), [True] * 3, freeze(lambda name: name == "scale"))
    assert all(cost.saved_bytes > 2 * X.nbytes for cost in latest(engine).costs)
    assert [cost.size_bytes for cost in latest(engine).costs] == [X.nbytes] * 3
    # Whole blocks: the first one saves nothing, and is not counted.
    first = lambda name: name == "scale" or name.startswith("blocks.0")  # noqa: E731
    compare(lambda: Stack(3), [True] * 2, freeze(first))
    # All but some vectors, as with adapters.
    compare(lambda: Stack(3), [True] * 3, freeze(lambda name: "bias" not in name))


def test_one_block_several_times() -> None:
    def call(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = one_after_the_other(blocks, x)
        return x

    compare(lambda: Around(lambda: Inner(64, 0.2), call, count=2), [True] * 8)


def test_depth_that_changes() -> None:
    depths = iter([1, 1, 3, 3, 2, 2])

    def call(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        return one_after_the_other(list(blocks)[: next(depths)], x)

    compare(lambda: Around(lambda: Inner(64, 0.1), call), [True] * 2, steps=3)


def test_a_block_that_changes_its_parameters() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.scale = nn.Parameter(torch.ones(64), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.scale.mul_(0.5)
            return self.linear(x) * self.scale

    engine = compare(lambda: Around(Normed, one_after_the_other), [False] * 3, steps=3)
    assert any("its parameters in place" in note for note in engine.notes)


@pytest.mark.parametrize(("kind", "recomputed"), [(nn.LSTM, False), (nn.GRU, True)])
def test_recurrent_layers(kind: Callable[..., nn.Module], recomputed: bool) -> None:
    """What oneDNN's LSTM saves has bytes that nothing has written, so it is kept."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind(64, 64, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = x + self.inner(x.view(2, 4, 64))[0].reshape(8, 64)
            return found

    compare(lambda: Around(Recurrent, one_after_the_other), [recomputed] * 3)


def test_a_list_of_parameters_whose_update_is_taken_back(tmp_path: Path) -> None:
    """A GRU has its parameters in a list, too, and their first use takes a wrong guess back."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(16, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = x + self.inner(x)[0]
            return found

    model, optimizer = build(
        lambda: Around(Recurrent, one_after_the_other),
        recompute="all",
        placement_policy="nvme",
        nvme_path=str(tmp_path),
        activation_memory="150KiB",
        host_memory="250KiB",
        chunk_numel=4096,
        dtype="fp32",
    )
    for step in range(4):
        for _ in range(1 if step < 2 else 2):
            model(X.view(8, 4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert latest(optimizer.engine).recomputed == [True] * 3
    optimizer.engine.close()


def test_parts_of_other_classes() -> None:
    """Blocks with statistics beside blocks without them, of one class and with the same shapes."""

    def make() -> nn.Module:
        parts = (nn.Dropout(0.1), nn.BatchNorm1d(64, affine=False)) * 2
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), part) for part in parts))

    compare(make, [True, False] * 2)


def test_a_gradient_of_the_input_alone() -> None:
    model, optimizer = made(lambda: Stack(3))
    plain = Stack(3)
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        found = []
        for each in (model, plain):
            x = X.clone().requires_grad_()
            loss = each(x).square().sum()
            found.append(torch.autograd.grad(loss, x, retain_graph=True)[0])
            found.append(torch.autograd.grad(loss, x)[0])
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])
    optimizer.engine.close()


def test_other_threads() -> None:
    """Forwards of several threads at once, each with its backward."""
    model, optimizer = made(lambda: Stack(3))
    model(X).sum().backward()
    optimizer.zero_grad()

    def grads(scale: float) -> list[torch.Tensor]:
        loss = model(scale * X).square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    scales = [1.0, 2.0, 3.0, 4.0] * 3
    expected = [grads(scale) for scale in scales]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(grads, scales))
    for some, others in zip(found, expected, strict=True):
        assert all(map(torch.equal, some, others))
    optimizer.engine.close()


def test_several_engines() -> None:
    pairs = [made(lambda: Stack(2)) for _ in range(2)]
    for _ in range(2):
        x = X
        for model, _ in pairs:
            x = model(x)
        x.sum().backward()
    for _, optimizer in pairs:
        assert latest(optimizer.engine).recomputed == [True] * 2
        optimizer.engine.close()


def test_a_block_that_was_replaced() -> None:
    model, optimizer = made(lambda: Stack(3))
    model(X).sum().backward()
    model.blocks[1] = nn.Identity()
    model(X).sum().backward()
    assert latest(optimizer.engine).recomputed == [True] * 2
    optimizer.step()
    optimizer.engine.close()
