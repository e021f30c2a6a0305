"""Overlapped updates and reading ahead in any model and any loop: not a bit differs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetero
from tests.support.training.overlap_net import (
    OVERLAPS,
    PLACES,
    WIDTH,
    Block,
    build,
    loss_of,
    result,
    same,
)


@dataclass(frozen=True)
class Model:
    """`uses` are (block, how it is run): the same one may come several times."""

    blocks: int
    uses: tuple[tuple[int, str], ...]
    tied: bool
    frozen: frozenset[int]


@dataclass(frozen=True)
class Step:
    """A step's micro-batches, each of which may leave out the uses from one on."""

    micro_batches: tuple[int, ...]
    left_out: bool  # a backward before, whose gradients are cleared
    told: bool  # no_sync() around all micro-batches but the last
    clip: float  # to this norm; 0: not
    between: str  # what is done before step()


class AnyNet(nn.Module):
    """What a Model says."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(model.blocks))
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        if model.tied:
            self.outer.weight = self.inner.weight
        for index in model.frozen:
            self.blocks[index % model.blocks].requires_grad_(False)
        self.uses = model.uses
        self.end = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for index, how in self.uses[: self.end or None]:
            block = self.blocks[index % len(self.blocks)]
            if how == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=how == "reentrant")
        return self.outer(x)


HOW = st.sampled_from(["plain", "plain", "reentrant", "non-reentrant"])
MODELS = st.builds(
    Model,
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), HOW), min_size=1, max_size=6).map(tuple),
    st.booleans(),
    st.frozensets(st.integers(0, 4), max_size=2),
)
BETWEEN = ["", "", "", "read", "write", "evaluate", "lr", "grad", "scale", "clear", "save"]
LOOPS = st.lists(
    st.builds(
        Step,
        st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
        st.booleans(),
        st.booleans(),
        st.sampled_from([0.0, 0.1, 1e6, 1e6]),
        st.sampled_from(BETWEEN),
    ),
    min_size=2,
    max_size=5,
)


def train(
    model_of: Model, loop: list[Step], place: str, overlap: str, **options: Any
) -> list[torch.Tensor]:
    """What training makes."""
    with TemporaryDirectory() as folder:
        model, optimizer = build(lambda: AnyNet(model_of), Path(folder), place, overlap, **options)
        losses = []
        for number, step in enumerate(loop):
            if step.left_out:
                with hetero.no_sync(model):
                    loss_of(model, 500 + number).backward()
                optimizer.zero_grad()
            for index, end in enumerate(step.micro_batches):
                more = step.told and index + 1 < len(step.micro_batches)
                model.end = end
                with hetero.no_sync(model) if more else nullcontext():
                    loss = loss_of(model, 10 * number + index)
                    loss.backward()
                losses.append(loss.item())
            model.end = 0
            between(model, optimizer, step.between)
            if step.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), step.clip)
            optimizer.step()
            optimizer.zero_grad()
        return [torch.tensor(losses), *result(model, optimizer)]


def between(model: nn.Module, optimizer: hetero.HybridAdam, what: str) -> None:
    """What a loop may do between backward and step()."""
    params = [p for p in model.parameters() if p.requires_grad]
    if what == "read":
        assert all(p.isfinite().all() for p in params)
    elif what == "write":
        with torch.no_grad():
            params[0].mul_(0.5)
    elif what == "evaluate":
        with torch.no_grad():
            loss_of(model, 1)
    elif what == "lr":
        optimizer.param_groups[0]["lr"] *= 0.5
    elif what == "grad":
        params[-1].grad = torch.ones_like(params[-1])
    elif what == "scale":
        for p in params[::2]:
            if p.grad is not None:
                p.grad.mul_(0.25)
    elif what == "clear":
        params[-1].grad = None
    elif what == "save":
        optimizer.load_state_dict(optimizer.state_dict())


@settings(max_examples=12, deadline=None)
@given(
    model_of=MODELS,
    loop=LOOPS,
    place=st.sampled_from(sorted(PLACES)),
    dtype=st.sampled_from(["bf16", "fp32"]),
    mixed=st.booleans(),
    prefetch=st.booleans(),
    overlap=st.sampled_from(OVERLAPS),
    host=st.sampled_from([None, "1MiB", "1500KiB"]),
)
def test_any_model_in_any_loop(
    model_of: Model,
    loop: list[Step],
    place: str,
    dtype: str,
    mixed: bool,
    prefetch: bool,
    overlap: str,
    host: str | None,
) -> None:
    options: dict[str, Any] = {"dtype": dtype}
    if mixed:
        options["keep_fp32"] = ["*norm*"]
    if place != "ram" and (mixed or dtype == "fp32"):
        options["host_memory"] = "6MiB"
    elif place == "optim_states" and host is not None:
        options["host_memory"] = host
    wanted = train(model_of, loop, place, "none", prefetch=prefetch, **options)
    found = train(model_of, loop, place, overlap, prefetch=not prefetch, **options)
    assert same(wanted, found)
