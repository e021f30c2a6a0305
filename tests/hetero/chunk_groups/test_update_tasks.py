"""hetero/chunk_groups/update_tasks: what the pipeline is told about elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero.chunk_groups import update_tasks as steps
from offload._native import Location
from tests.support.training.loops import build

SIZES = (100, 64, 4097, 10_000, 3)  # some fill their 64-element alignment, one is several slots


def make() -> torch.nn.Module:
    """Parameters whose elements have their own numbers as values; all gradients are 1."""
    module = torch.nn.Module()
    numbers = torch.arange(float(sum(SIZES))).split(SIZES)
    module.parts = torch.nn.ParameterList(torch.nn.Parameter(part.clone()) for part in numbers)
    module.forward = lambda: sum(part.sum() for part in module.parts)  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("chunk_numel", [4096, 32_768])
def test_elements_are_numbered_in_the_models_order(
    chunk_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the chunks: the generator's number of an element is its place in the model."""
    model, optimizer = build(make, placement_policy="cpu", dtype="fp32", chunk_numel=chunk_numel)
    seen: list[int] = []
    true_task = steps.StepTask

    def task(
        key: int,
        param: Location,
        grad: Location,
        optim_state: Location,
        segments: list[tuple[int, int, int, int]],
        *others: int,
    ) -> object:
        made.append((key, segments))
        return true_task(key, param, grad, optim_state, segments, *others)

    made: list[tuple[int, list[tuple[int, int, int, int]]]] = []
    monkeypatch.setattr(steps, "StepTask", task)
    engine = optimizer.engine
    slots = [
        engine.params.flat(chunk)[tile * chunk_numel :][:chunk_numel].clone()
        for chunk in engine.layout.chunks
        for tile in range(chunk.slots)
    ]
    optimizer.backward(model())
    optimizer.step()
    for key, segments in made:
        for first, numel, _, number in segments:
            values = slots[key][first : first + numel]
            assert values.tolist() == list(range(number, number + numel))
            seen += range(number, number + numel)
    assert np.array_equal(np.sort(seen), np.arange(sum(SIZES)))
    engine.close()
