"""Blocks that depend on more than their arguments: the bits of plain torch, or a hetero error."""

from __future__ import annotations

import itertools
import random
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import hetero
from offload.errors import HeteroError
from tests.support.recompute import latest
from tests.support.training.loops import build

pytestmark = pytest.mark.usefixtures("nothing_left")

WIDTH = 16
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(5))


class TwiceRead(torch.autograd.Function):
    """x * w, whose backward reads ctx.saved_tensors for each gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grad_x = grad * ctx.saved_tensors[1]
        return grad_x, grad * ctx.saved_tensors[0]


class Odd(nn.Module):
    """A block whose forward does what `kind` says between two linear layers."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.kind = kind
        self.calls = 0
        self.option = 1.0
        self.options = {"scale": 1.0, "calls": 0}
        self.seen: list[Any] = []
        self.numbers = itertools.count() if kind == "iterator" else None
        self.ema = [torch.ones(WIDTH)]
        self.of_torch = torch.Generator().manual_seed(seed)
        self.of_numpy = np.random.default_rng(seed)
        self.numpy_random = np.random.RandomState(seed)
        self.of_python = random.Random(seed)
        self.nested: list[list[int]] = [[]]
        self.memory: Any = None
        self.loss: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        y = getattr(self, self.kind)(y)
        return x + self.second(torch.tanh(y))

    # Random numbers

    def dropped(self, y: torch.Tensor) -> torch.Tensor:
        return self.dropout(y)

    def mask(self, y: torch.Tensor) -> torch.Tensor:
        return y * torch.from_numpy((np.random.rand(WIDTH) > 0.5).astype(np.float32))

    def normal(self, y: torch.Tensor) -> torch.Tensor:
        return y * float(np.random.randn())  # numpy has the second of each pair ready

    def permuted(self, y: torch.Tensor) -> torch.Tensor:
        return y[:, torch.from_numpy(np.random.permutation(WIDTH))] * y

    def factor(self, y: torch.Tensor) -> torch.Tensor:
        return y * random.random()

    def layerdrop(self, y: torch.Tensor) -> torch.Tensor:
        return y if random.random() < 0.5 else torch.sigmoid(y) * y

    def generator(self, y: torch.Tensor) -> torch.Tensor:
        return y * torch.rand(WIDTH, generator=self.of_torch)

    def numpy_generator(self, y: torch.Tensor) -> torch.Tensor:
        return y * float(self.of_numpy.normal())

    def numpy_state(self, y: torch.Tensor) -> torch.Tensor:
        return y * float(self.numpy_random.rand())

    def python_generator(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.of_python.gauss(0, 1)

    # Options, and what a call changes

    def reads_options(self, y: torch.Tensor) -> torch.Tensor:
        return y.square() * self.options["scale"]

    def attribute(self, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return y.square() * self.calls

    def attribute_made_later(self, y: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "made"):
            self.made = 1
            return y
        return y.square() * self.made

    def remembers(self, y: torch.Tensor) -> torch.Tensor:
        old, self.memory = self.memory, y.detach()
        return y.square() if old is None else y.square() * old

    def keeps_loss(self, y: torch.Tensor) -> torch.Tensor:
        self.loss = y.square().mean()
        return y

    def counts_in_dict(self, y: torch.Tensor) -> torch.Tensor:
        self.options["calls"] += 1
        return y.square() * self.options["calls"]

    def counts_in_list(self, y: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(y.detach().sum()))
        return y.square() * len(self.seen)

    def counts_in_nested_list(self, y: torch.Tensor) -> torch.Tensor:
        self.nested[0].append(1)
        return y.square() * len(self.nested[0])

    def counts_in_tensor(self, y: torch.Tensor) -> torch.Tensor:
        self.ema[0].mul_(0.5)
        return y.square() * self.ema[0]

    def iterator(self, y: torch.Tensor) -> torch.Tensor:
        return y.square() * next(self.numbers)

    # Shapes of graphs

    def reads_twice(self, y: torch.Tensor) -> torch.Tensor:
        return TwiceRead.apply(y, torch.sigmoid(y))

    def differentiates(self, y: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        return y + slope

    def autocast(self, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(y).float()


PUT_BACK = [
    "dropped",
    "mask",
    "normal",
    "permuted",
    "factor",
    "layerdrop",
    "reads_twice",
    "differentiates",
    "autocast",
]
CHANGED = [
    "attribute",
    "attribute_made_later",
    "remembers",
    "keeps_loss",
    "generator",
    "numpy_generator",
    "numpy_state",
    "python_generator",
    "counts_in_dict",
    "counts_in_list",
    "counts_in_tensor",
]
REFUSED = ["iterator", "counts_in_nested_list"]


class Model(nn.Module):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Odd(kind, i) for i, kind in enumerate(kinds)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        losses = [block.loss for block in self.blocks if block.loss is not None]
        return x.square().mean() + sum(losses)


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def run(model: Any, steps: int) -> list[torch.Tensor]:
    """Losses, gradients, and what the program's generators and counts have come to."""
    found = []
    seed()
    for _ in range(steps):
        model.zero_grad()
        loss = model(X)
        loss.backward()
        found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found += [torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.randn())]
    for block in model.blocks:
        found += [torch.tensor([block.calls, len(block.seen), block.options["calls"]])]
    return found


def made(kinds: list[str], **options: Any) -> tuple[Any, Any]:
    given = {"placement_policy": "cpu", "activation_memory": "64MiB", "dtype": "fp32"}
    return build(
        lambda: Model(kinds), **given | {"recompute": "all", "chunk_numel": 4096} | options
    )


def compare(kinds: list[str], steps: int = 3, **given: Any) -> tuple[list[str], list[bool]]:
    """Everything is as with torch alone. Gives the engine's notes, and which of the last calls
    were computed again."""
    torch.manual_seed(0)
    expected = run(Model(kinds), steps)
    model, optimizer = made(kinds, **given)
    with closing(optimizer.engine) as engine:
        found = run(model, steps)
        again = latest(engine).recomputed
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    return engine.notes, again


@pytest.mark.parametrize("kind", PUT_BACK)
def test_is_put_back(kind: str) -> None:
    """Blocks are computed again, and draw and read what they did in forward."""
    _, again = compare([kind] * 3)
    assert again == [True] * 3


@pytest.mark.parametrize("kind", CHANGED)
def test_what_a_call_changes(kind: str) -> None:
    """The first call shows it, so none is made again, and a note says what it was."""
    notes, again = compare([kind] * 3)
    assert again == [False] * 3
    assert any("which would be changed twice" in note for note in notes)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_put_back(kind: str) -> None:
    """It is an error, because the second call has saved other values."""
    with pytest.raises(HeteroError, match=r"^blocks\.2 was computed .* recompute='none'"):
        compare([kind] * 3)


def change_options(model: Any, step: int) -> None:
    if step == 1:
        for block in model.blocks:
            block.options["scale"] = 2.0


@pytest.mark.parametrize("overlap", ["none", "both"])
def test_an_option_that_cannot_be_put_back(overlap: str) -> None:
    """It is an error before a weight has changed; from then on blocks are kept, and right."""
    model, optimizer = made(["reads_options"] * 3, debug={"overlap_updates": overlap})
    plain, steps = made(["reads_options"] * 3, recompute="none")
    engine = optimizer.engine
    for step in range(4):
        expected = plain(X)
        loss = model(X)
        assert torch.equal(loss, expected)
        if step == 1:
            before = hetero.masters(model.parameters())
            for each in (model, plain):
                change_options(each, step)
            with pytest.raises(HeteroError, match=r"^blocks\.2 was computed .* recompute='none'"):
                loss.backward()
            assert all(map(torch.equal, hetero.masters(model.parameters()), before))
            optimizer.zero_grad()
            assert sum("have saved other values" in note for note in engine.notes) == 1
            continue
        expected.backward()
        loss.backward()
        for each in (optimizer, steps):
            each.step()
            each.zero_grad()
        assert latest(engine).recomputed == ([step > 0, True, True] if step < 2 else [False] * 3)
    both = (hetero.masters(each.parameters()) for each in (model, plain))
    assert all(map(torch.equal, *both))
    for each in (engine, steps.engine):
        each.close()


def tanh_of(node: Any) -> Any:
    """The node of a tanh in the graph before `node`, or None."""
    if hasattr(node, "_saved_result"):
        return node
    found = (tanh_of(each) for each, _ in node.next_functions if each is not None)
    return next((each for each in found if each is not None), None)


def test_graphs_that_are_kept() -> None:
    """Each backward computes the block again, and none leaves values behind."""
    model, optimizer = made(["reads_twice"] * 3)
    model(X).backward()
    loss = model(X)
    for _ in range(2):
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        found = [param.grad.clone() for param in model.parameters()]
    torch.manual_seed(0)
    plain = Model(["reads_twice"] * 3)
    plain(X).backward()
    assert all(map(torch.equal, found, [param.grad for param in plain.parameters()]))
    node: Any = tanh_of(loss.grad_fn)  # somebody looks at what it has saved
    assert torch.equal(node._saved_result, node._saved_result)
    del loss, node
    optimizer.engine.close()


def test_one_block_that_is_not_like_the_rest() -> None:
    """The first of the kind was watched, and this one does what that does not."""
    model, optimizer = made(["dropped", "dropped", "attribute"])
    with pytest.raises(HeteroError, match=r"blocks\.2 was to be .* changes self\.calls"):
        model(X)
    torch.manual_seed(0)
    plain = Model(["dropped", "dropped", "attribute"])
    plain(X)
    found, expected = run(model, 2), run(plain, 2)
    assert all(map(torch.equal, found, expected))
    optimizer.engine.close()


@pytest.mark.parametrize("recompute", ["all", "auto"])
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@example(kinds=["layerdrop", "mask", "attribute"], steps=4)
@given(
    kinds=st.lists(st.sampled_from([*PUT_BACK, *CHANGED, *REFUSED]), min_size=2, max_size=4),
    steps=st.integers(2, 4),
)
def test_any_blocks(recompute: str, kinds: list[str], steps: int) -> None:
    """Blocks of one class and different ways: torch's bits, or an error that says what to do."""
    room = {"all": "64MiB", "auto": "5KiB"}[recompute]
    try:
        compare(kinds, steps, recompute=recompute, activation_memory=room)
    except HeteroError as error:
        if "recompute='none'" not in str(error):
            raise
