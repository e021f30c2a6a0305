"""Training of a case, by hetero and by the oracle, and what is compared."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.planning.placement import Placement, PlacementError
from tests.support.training.plain_adam import OPTIONS, PlainAdam
from tests.support.training.smallest import smallest_host_memory
from tests.zoo.case import Case, Where

# The first one records in which order chunks are used, the second one has updates that begin in
# backward, and the third one sees what they made.
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


def train(
    case: Case,
    model: nn.Module,
    accumulate: int,
    backward: Callable[[torch.Tensor], None],
    norm: Callable[[], float],
    step: Callable[[], None],
    rank: int = 0,
    no_sync: Callable[[], Any] = contextlib.nullcontext,
    check: Callable[[], None] = lambda: None,
) -> Run:
    """The loop, each rank on its own data; `no_sync()` is around all micro-batches but the last,
    and `check()` is called after each."""
    run = Run()
    for number in range(STEPS):
        for micro in range(accumulate):
            where = Where(number, micro, rank)
            torch.manual_seed(where.seed)
            with contextlib.nullcontext() if micro == accumulate - 1 else no_sync():
                loss = case.loss(model, case.batch(where))
                backward(loss / accumulate)
            run.losses.append(loss.item())
            del loss
            check()
        run.norms.append(norm())
        step()
    run.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return run


def in_dtype(case: Case, dtype: str) -> Case:
    """The case with its batches in the compute dtype, as hetero gives them to the model."""
    batch = case.batch
    return replace(case, batch=lambda where: cast(batch(where), TORCH_DTYPES[dtype]))


def run_plain(case: Case, dtype: str, accumulate: int) -> Run:
    """Plain PyTorch in memory; only the update is hetero's, as documented."""
    torch.manual_seed(0)
    model = case.make()
    optimizer = plain_adam(model, dtype)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    case = in_dtype(case, dtype)
    run = train(case, model, accumulate, torch.Tensor.backward, optimizer.norm, step)
    run.masters = optimizer.whole(model)
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


def masters_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    names = dict(model.named_parameters())
    return dict(zip(names, hetero.masters(names.values()), strict=True))


def run_hetero(
    case: Case, dtype: str, accumulate: int, settings: dict[str, Any], rank: int | None = None
) -> Run:
    """The same with hetero, on one of several ranks if that is given; stage 2 is in no_sync()."""
    model, optimizer = initialized(case, dtype, settings)
    engine = optimizer.engine

    def check() -> None:
        pinned = sum(g.params.copies.pinned() for g in engine.chunk_groups)
        assert rank is not None or pinned == 0, "nothing is held after a backward"

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def norm() -> float:
        return hetero.clip_grad_norm_(model.parameters(), 1e30).item()

    holds = settings.get("zero_stage") == 2
    no_sync = (lambda: hetero.no_sync(model)) if holds else contextlib.nullcontext
    run = train(case, model, accumulate, optimizer.backward, norm, step, rank or 0, no_sync, check)
    run.masters = masters_by_name(model)
    run.placement = engine.placement
    engine.close()
    return run


def assert_same_bits(run: Run, expected: Run, of: object = None) -> None:
    """Every bit; the norm, the same sum in another order, as fp32."""
    assert run.losses == expected.losses, of
    assert run.norms == pytest.approx(expected.norms, rel=2e-7), of
    assert list(run.masters) == list(expected.masters)
    for name, master in run.masters.items():
        assert torch.equal(master, expected.masters[name]), (name, of)
    for name, buffer in run.buffers.items():
        assert torch.equal(buffer, expected.buffers[name]), (name, of)
    assert len(set(run.losses)) > 1, "training moved"
