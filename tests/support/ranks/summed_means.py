"""Ranks that clip. Each function runs on every rank."""

from __future__ import annotations

import contextlib
from typing import Any

import hetero
from tests.support.grad_sums import counted_passes, fresh_sum, known_sum, with_grads
from tests.support.ranks.rank_training import make
from tests.support.training.loops import batches


def clipped_steps(
    rank: int, world: int, options: dict[str, Any], accumulate: int, sync_each: bool
) -> dict[str, Any]:
    """Passes over gradients of their own in clipped steps of tiny_gpt2, and wrong sums."""
    model, optimizer = make("gpt2", options)
    engine = optimizer.engine
    data = batches(2 * accumulate * world)[rank::world]
    wrong, summed = [], 0
    with counted_passes() as passes:
        for step in range(2):
            for micro in range(accumulate):
                tokens = data[step * accumulate + micro]
                held = not sync_each and micro < accumulate - 1
                with hetero.no_sync(model) if held else contextlib.nullcontext():
                    optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
            hetero.clip_grad_norm_(model.parameters(), 0.1)
            for m in with_grads(engine):
                summed += 1
                if known_sum(engine, m) != fresh_sum(engine, m):
                    wrong.append(m.name)
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    return {"passes": passes, "wrong": wrong, "summed": summed}
