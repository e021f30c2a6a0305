"""Sums of squares of kept gradients beside fresh ones, and how many passes were made for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import hetero.state.grads
from hetero.runtime.engine import Engine
from hetero.state.managed_param import ManagedParam
from offload import _native


def with_grads(engine: Engine) -> list[ManagedParam]:
    """The parameters that have gradients, in the model's order."""
    return [m for m in engine.params.in_order() if m.has_grad]


def fresh_sum(engine: Engine, managed: ManagedParam) -> float:
    """Of this rank's part of the gradient as it is kept now."""
    kept = engine.params.group(managed.chunk).grads.read(managed)
    name = str(kept.dtype).removeprefix("torch.")
    dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[name]
    return _native.sum_of_squares(dtype, kept.data_ptr(), kept.numel())  # type: ignore[arg-type]


def known_sum(engine: Engine, managed: ManagedParam) -> float:
    """What hetero takes it to be."""
    return engine.params.group(managed.chunk).grads.sum_of_squares(managed)


@contextmanager
def counted_passes() -> Iterator[list[int]]:
    """Inside the block the elements of each separate pass over a gradient are listed."""
    passes: list[int] = []
    original = hetero.state.grads.sum_of_squares

    def counting(dtype: object, address: int, numel: int) -> float:
        passes.append(numel)
        return original(dtype, address, numel)  # type: ignore[arg-type]

    with patch.object(hetero.state.grads, "sum_of_squares", counting):
        yield passes
