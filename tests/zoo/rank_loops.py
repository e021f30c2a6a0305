"""What happens between the steps of several ranks, or instead of one, and must change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hetero
from tests.zoo.case import Where
from tests.zoo.pretrained import GPT2
from tests.zoo.rank_runs import in_least_memory
from tests.zoo.runs import STEPS, Run, initialized, masters_by_name


class Interruption(Exception):
    """Thrown by a hook of a test."""


def nothing(model: Any, optimizer: Any, where: Where, world: int) -> None:
    """The loop as it is."""


def evaluation(model: Any, optimizer: Any, where: Where, world: int) -> None:
    """On one rank only, another one in every step."""
    if where.rank == where.step % world:
        model.eval()
        with torch.inference_mode():
            assert GPT2.loss(model, GPT2.batch(where)).isfinite()
        model.train()


def generation(model: Any, optimizer: Any, where: Where, world: int) -> None:
    """On each rank another number of tokens."""
    model.eval()
    prompt = torch.arange(1, 9).view(2, 4)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    count = 1 + 3 * where.rank
    found = model.generate(prompt, max_new_tokens=count, **options)
    assert found.shape == (2, 4 + count)
    if where.step == 0:
        torch.manual_seed(0)
        plain: Any = GPT2.make().eval()
        assert torch.equal(found, plain.generate(prompt, max_new_tokens=count, **options))
    model.train()


def throw(*_: object) -> None:
    raise Interruption


def error_in_forward(model: Any, optimizer: Any, where: Where, world: int) -> None:
    """In the middle of the model, on one rank, which may do it again alone."""
    if where.rank != where.step % world:
        return
    hook = model.transformer.h[1].mlp.c_fc.register_forward_pre_hook(throw)
    with contextlib.suppress(Interruption):
        GPT2.loss(model, GPT2.batch(where))
        raise AssertionError("not thrown")
    hook.remove()


def error_in_backward(model: Any, optimizer: Any, where: Where, world: int) -> None:
    """On all ranks, when some gradients are on their way and others are not there yet."""

    def catch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(throw)

    hook = model.transformer.h[0].mlp.register_forward_hook(catch)
    loss = GPT2.loss(model, GPT2.batch(where))
    with contextlib.suppress(Interruption):
        optimizer.backward(loss)
        raise AssertionError("not thrown")
    hook.remove()
    optimizer.zero_grad()


DISTURBANCES: dict[str, Callable[[Any, Any, Where, int], None]] = {
    each.__name__: each
    for each in (
        nothing,
        evaluation,
        generation,
        error_in_forward,
        error_in_backward,
    )
}


def disturbed(rank: int, world: int, how: str, settings: dict[str, Any]) -> Run:
    """GPT-2's training with that disturbance before every step."""
    model, optimizer = initialized(GPT2, "fp32", in_least_memory(GPT2, "fp32", settings))
    run = Run()
    for step in range(STEPS):
        where = Where(step, rank=rank)
        DISTURBANCES[how](model, optimizer, where, world)
        torch.manual_seed(where.seed)
        loss = GPT2.loss(model, GPT2.batch(where))
        optimizer.backward(loss)
        run.losses.append(loss.item())
        run.norms.append(hetero.clip_grad_norm_(model.parameters(), 1e30).item())
        optimizer.step()
        optimizer.zero_grad()
    run.masters = masters_by_name(model)
    optimizer.engine.close()
    return run
