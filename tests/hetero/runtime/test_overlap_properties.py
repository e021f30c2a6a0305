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
LOOPS = st.lists(
    st.builds(
        Step,
        st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
        st.booleans(),
    ),
    min_size=2,
    max_size=4,
)


def train(
    model_of: Model, loop: list[Step], place: str, overlap: str, clip: bool = False, **options: Any
) -> Any:
    """What training makes, or the error that updates during backward are allowed to end with."""
    with TemporaryDirectory() as folder:
        model, optimizer = build(lambda: AnyNet(model_of), Path(folder), place, overlap, **options)
        losses = []
        told = ""
        try:
            for number, step in enumerate(loop):
                if step.left_out:
                    with hetero.no_sync(model):
                        loss_of(model, 500 + number).backward()
                    optimizer.zero_grad()
                for index, end in enumerate(step.micro_batches):
                    more = index + 1 < len(step.micro_batches)
                    model.end = end
                    with hetero.no_sync(model) if more else nullcontext():
                        loss = loss_of(model, 10 * number + index)
                        loss.backward()
                    losses.append(loss.item())
                model.end = 0
                if clip:
                    hetero.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        except hetero.HeteroError as error:
            told = str(error)
        if told:
            # A step may bring more gradients than all before: that is told, and nothing is wrong.
            optimizer.engine.close()
            assert overlap in ("backward", "both")
            assert "another gradient" in told or "needs the value" in told
            assert len({use for use, _ in model_of.uses}) < len(model_of.uses)
            return None
        return [torch.tensor(losses), *result(model, optimizer)]


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
    clip = overlap in ("none", "forward")
    wanted = train(model_of, loop, place, "none", clip, prefetch=prefetch, **options)
    found = train(model_of, loop, place, overlap, clip, prefetch=not prefetch, **options)
    assert found is None or same(wanted, found)
