"""Steps that are undone in any place and any loop: the rest has the bits of a loop without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hetero
from tests.support.training.overlap_net import (
    OVERLAPS,
    PLACES,
    Net,
    backward,
    everything,
    loss_of,
    same,
)

RULES: dict[str, Callable[..., hetero.HybridOptimizer]] = {
    "adam": hetero.HybridAdam,
    "lion": hetero.HybridLion,
    "adagrad": hetero.HybridAdagrad,
    "sgd": lambda params, **options: hetero.HybridSGD(params, momentum=0.9, **options),
}
# Where state is, by place and budget of RAM.
WHERE = [
    *(("ram", None), ("optim_states", "1MiB"), ("optim_states", "1500KiB")),
    *(("optim_states", "6MiB"), ("disk", "600KiB"), ("emulated", "900KiB")),
]


@dataclass(frozen=True)
class Step:
    """A step, and how often one like it is made and undone before."""

    undone: int
    again: bool  # the last undone one is made again with the gradients that it has left
    clip: float
    left_out: int | None  # the block whose parameters get no gradient
    between: str  # what is done between a step and its being undone
    budget: str | None  # to which RAM is set afterwards


STEPS = st.builds(
    Step,
    undone=st.sampled_from([0, 0, 1, 2]),
    again=st.booleans(),
    clip=st.sampled_from([1e6, 1e6, 1e-3]),
    left_out=st.sampled_from([None, None, 0, 3]),
    between=st.sampled_from(["", "clear", "evaluate", "read", "save", "wait"]),
    budget=st.sampled_from([None, None, None, "1MiB", "3MiB"]),
)


def _do(model: nn.Module, optimizer: Any, what: str) -> None:
    if what == "clear":
        optimizer.zero_grad()
    elif what == "evaluate":
        with torch.no_grad():
            loss_of(model, 77)
    elif what == "read":
        assert all(p.isfinite().all() for p in model.parameters())
    elif what == "save":
        everything(model, optimizer)
    elif what == "wait":
        optimizer.engine.synchronize()


def _train(
    loop: list[Step], undoes: bool, place: str, rule: str, **options: Any
) -> list[torch.Tensor]:
    """What training makes, with or without the steps that are undone."""
    torch.manual_seed(0)
    model: Any = Net()
    optimizer: Any = RULES[rule](
        model.parameters(), lr=1e-2, weight_decay=0.1, state_dtype=options.pop("state_dtype")
    )
    with TemporaryDirectory() as folder:
        given = {"chunk_numel": 8192, "nvme_path": folder, "undoable_steps": True}
        model, optimizer = hetero.initialize(model, optimizer, **PLACES[place] | given | options)

        def step(seed: int, made: Step) -> None:
            backward(model, optimizer, seed, made.clip)
            if made.left_out is not None:
                for p in model.blocks[made.left_out].parameters():
                    p.grad = None
            optimizer.step()

        for number, made in enumerate(loop):
            for again in range(made.undone if undoes else 0):
                step(100 * (again + 1) + number, made)
                _do(model, optimizer, made.between)
                optimizer.undo_last_step()
                if made.again and made.between != "clear" and again + 1 == made.undone:
                    optimizer.step()
                    optimizer.undo_last_step()
                optimizer.zero_grad()
            step(number, made)
            optimizer.zero_grad()
            if made.budget is not None and place == "optim_states":
                optimizer.engine.set_budget(host_memory=made.budget)
        found = everything(model, optimizer)
        optimizer.engine.close()
    return found


@settings(max_examples=8)
@given(
    loop=st.lists(STEPS, min_size=2, max_size=5),
    where=st.sampled_from(WHERE),
    overlap=st.sampled_from(OVERLAPS),
    rule=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from(["bf16", "bf16", "fp32"]),
    state_dtype=st.sampled_from(["fp32", "bf16", "8bit"]),
    keep_fp32=st.sampled_from([(), ("*norm*",)]),
    strategy=st.sampled_from(["chunk", "bucket"]),
    prefetch=st.booleans(),
)
def test_any_loop(
    loop: list[Step],
    where: tuple[str, str | None],
    overlap: str,
    rule: str,
    dtype: str,
    state_dtype: str,
    keep_fp32: tuple[str, ...],
    strategy: str,
    prefetch: bool,
) -> None:
    place, host = where
    options: dict[str, Any] = {"dtype": dtype, "state_dtype": state_dtype, "prefetch": prefetch}
    options |= {"keep_fp32": keep_fp32, "shard_strategy": strategy, "overlap_updates": overlap}
    if host is not None:
        options["host_memory"] = host
    if dtype == "fp32" or keep_fp32:
        options["host_memory"] = "6MiB" if place != "ram" else None
        loop = [Step(**{**vars(made), "budget": None}) for made in loop]
    wanted, found = (_train(loop, undoes, place, rule, **options) for undoes in (False, True))
    assert same(wanted, found)
