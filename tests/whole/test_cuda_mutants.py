"""Each wait between a device's streams is needed: without it a training is found out.

Compute on the fake device is watched (tests/support/cuda/watch.py), so a missing wait is an error
although no bit may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from offload.device.cuda_backend import CudaBackend
from offload.device.device_arena import DeviceArena
from offload.errors import HeteroError
from tests.support.cuda.stream_order import StreamOrder
from tests.support.cuda.watch import Watch
from tests.support.native.fake_cuda import FakeRuntime

WIDTH, STEPS = 64, 3
Patch = Callable[[pytest.MonkeyPatch, FakeRuntime], None]
PLACES: dict[str, dict[str, Any]] = {
    "slots": {"placement_policy": "cpu", "device_memory": "50KiB"},
    "nvme": {"placement_policy": "nvme", "device_memory": "50KiB", "host_memory": "300KiB"},
    "homes": {"placement_policy": "auto", "device_memory": "250KiB"},
}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    monkeypatch.setattr("hetero.config.cuda_available", lambda: True)
    monkeypatch.setattr("hetero.config.CudaBackend", lambda: CudaBackend(made))
    yield made
    made.failure = None


def train(runtime: FakeRuntime, path: Path, place: str, accumulate: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    options = {"backend": "cuda", "dtype": "bf16", "nvme_path": str(path), **PLACES[place]}
    optimizer = hetero.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = hetero.initialize(model, optimizer, chunk_numel=4096, **options)
    try:
        with Watch(runtime) as watch:
            for step in range(STEPS):
                for _ in range(accumulate):
                    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
                    model(x.bfloat16()).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert watch.seen > 100
        return hetero.masters(model.parameters())
    finally:
        runtime.order = StreamOrder()  # what goes on now is not watched
        runtime.synchronize_all()
        runtime.copying.clear()  # also what was refused
        optimizer.engine.close()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_wrong(
    runtime: FakeRuntime, place: str, accumulate: int, tmp_path: Path
) -> None:
    train(runtime, tmp_path, place, accumulate)


def writes_do_not_wait(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    patch.setattr(DeviceArena, "before_write", lambda self, slot, run: [])


def gradients_leave_before_they_are_computed(
    patch: pytest.MonkeyPatch, runtime: FakeRuntime
) -> None:
    event = runtime.record(runtime.new_stream())
    patch.setattr(CudaBackend, "record_event", lambda self: event)


def compute_waits_for_nothing(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    wait = FakeRuntime.wait
    patch.setattr(
        runtime, "wait", lambda s, e: None if s is runtime.compute else wait(runtime, s, e)
    )


def copies_wait_for_nothing(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    wait = FakeRuntime.wait
    patch.setattr(
        runtime, "wait", lambda s, e: wait(runtime, s, e) if s is runtime.compute else None
    )


MUTANTS: list[tuple[Patch, str]] = [
    (writes_do_not_wait, "slots"),
    (gradients_leave_before_they_are_computed, "slots"),
    (compute_waits_for_nothing, "homes"),
    (copies_wait_for_nothing, "nvme"),
]


@pytest.mark.parametrize(("mutate", "place"), MUTANTS, ids=lambda it: getattr(it, "__name__", it))
def test_a_missing_wait_is_found(
    runtime: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Patch,
    place: str,
    tmp_path: Path,
) -> None:
    mutate(monkeypatch, runtime)
    with pytest.raises((AssertionError, HeteroError)):
        train(runtime, tmp_path, place)
