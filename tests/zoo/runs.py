"""Training of a case, by hetero and by the oracle, and what is compared."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.planning.placement import Placement, PlacementError
from tests.support.training.plain_adam import OPTIONS, PlainAdam
from tests.support.training.smallest import smallest_host_memory
from tests.zoo.case import Case, Where

STEPS = 3
SLOT_NUMEL = 4096
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Run:
    """What a training run gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    placement: Placement | None = None  # of a run by hetero


def plain_adam(model: nn.Module, dtype: str) -> PlainAdam:
    """The oracle's optimizer of all that is trained, in fp32; the model becomes `dtype`."""
    optimizer = PlainAdam()
    for param in model.parameters():
        if param.is_floating_point():
            if param.requires_grad:
                optimizer.add(param)
            param.data = param.data.to(TORCH_DTYPES[dtype])
    return optimizer


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a batch in the compute dtype, as hetero gives them to the model."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(each, dtype) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(cast(each, dtype) for each in value)
    return value


def run_plain(case: Case, dtype: str, accumulate: int) -> Run:
    """Plain PyTorch in memory; only the update is hetero's, as documented."""
    torch.manual_seed(0)
    model = case.make()
    optimizer = plain_adam(model, dtype)
    run = Run()
    for step in range(STEPS):
        for micro in range(accumulate):
            where = Where(step, micro)
            torch.manual_seed(where.seed)
            loss = case.loss(model, cast(case.batch(where), TORCH_DTYPES[dtype]))
            (loss / accumulate).backward()
            run.losses.append(loss.item())
        run.norms.append(optimizer.norm())
        optimizer.step()
        optimizer.zero_grad()
    run.masters = optimizer.whole(model)
    run.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return run


def initialized(
    case: Case, dtype: str, settings: dict[str, Any]
) -> tuple[nn.Module, hetero.HybridAdam]:
    """The case's model and optimizer under hetero."""
    torch.manual_seed(0)
    with hetero.ZeroInitContext(dtype=dtype, chunk_numel=SLOT_NUMEL, **settings):
        model = case.make()
    return hetero.initialize(model, hetero.HybridAdam(model.parameters(), **OPTIONS))


def least_host_memory(case: Case, dtype: str, nvme_path: str, **options: Any) -> int:
    """Bytes with which all state is on disk, as the refusal of fewer names them."""
    largest = max(p.numel() * p.element_size() for p in case.make().parameters())
    settings = {
        **options,
        "placement_policy": "nvme",
        "nvme_path": nvme_path,
        "host_memory": largest + 32768,
    }
    smallest = smallest_host_memory(lambda: initialized(case, dtype, settings))
    # A model that was built and refused gives up its file with the garbage, in two rounds: its own
    # cycles, and then those of what its graphs referred to.
    gc.collect()
    return smallest


def least_device_memory(case: Case, dtype: str, settings: dict[str, Any]) -> int:
    """Bytes of an emulated device with which the case works, as the refusal of fewer has them."""
    with pytest.raises(PlacementError) as caught:
        initialized(case, dtype, {**settings, "device_memory": 1})
    found = caught.value.smallest_device_bytes
    caught.value.__traceback__ = None
    gc.collect()  # as in least_host_memory()
    return found


def run_hetero(case: Case, dtype: str, accumulate: int, settings: dict[str, Any]) -> Run:
    """The same with hetero."""
    model, optimizer = initialized(case, dtype, settings)
    engine = optimizer.engine
    run = Run()
    for step in range(STEPS):
        for micro in range(accumulate):
            where = Where(step, micro)
            torch.manual_seed(where.seed)
            loss = case.loss(model, case.batch(where))
            optimizer.backward(loss / accumulate)
            run.losses.append(loss.item())
            del loss
            pinned = sum(g.params.copies.pinned() for g in engine.chunk_groups)
            assert pinned == 0, "nothing is held after a backward"
        run.norms.append(hetero.clip_grad_norm_(model.parameters(), 1e30).item())
        optimizer.step()
        optimizer.zero_grad()
    names = dict(model.named_parameters())
    run.masters = dict(zip(names, hetero.masters(names.values()), strict=True))
    run.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    run.placement = engine.placement
    engine.close()
    return run
