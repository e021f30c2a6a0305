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
from offload.device import device_arena
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


def pins_are_forgotten(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    patch.setattr(DeviceArena, "_note_unpinned", lambda self: self._used.clear())


def use_does_not_wait_for_the_copy(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    patch.setattr(DeviceArena, "_writes", lambda self, slot, run: [])


def copies_are_not_noted(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    patch.setattr(DeviceArena, "written", lambda self, slot, run, event: None)


def only_the_last_run_is_noted(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    written = DeviceArena.written

    def forgetful(self: DeviceArena, slot: int, run: int, event: Any) -> None:
        self._written.clear()
        written(self, slot, run, event)

    patch.setattr(DeviceArena, "written", forgetful)


def use_is_noted_in_no_stream(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    view = DeviceArena.view

    def viewed(self: DeviceArena, slot: int, run: int, dtype: Any, pinned: bool = False) -> Any:
        made = view(self, slot, run, dtype, pinned)
        if pinned:
            self._used[slot] = run, {}
        return made

    patch.setattr(DeviceArena, "view", viewed)


def gradients_leave_before_they_are_computed(
    patch: pytest.MonkeyPatch, runtime: FakeRuntime
) -> None:
    event = runtime.record(runtime.new_stream())
    patch.setattr(CudaBackend, "record_event", lambda self: event)


def an_event_is_recorded_in_another_stream(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    record, other = FakeRuntime.record, runtime.new_stream()
    patch.setattr(
        runtime, "record", lambda s: record(runtime, other if s is runtime.compute else s)
    )


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


def a_fetch_is_noted_in_the_next_slot(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    written = DeviceArena.written
    patch.setattr(
        DeviceArena,
        "written",
        lambda self, slot, run, event: written(self, (slot + 1) % self.slots, run, event),
    )


def pins_end_with_the_view(patch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    """A slot is free for the next chunk while a parameter in use still views it."""
    view = device_arena.HostArena.view
    patch.setattr(
        device_arena.HostArena,
        "view",
        lambda self, slot, run, dtype, pinned=False: view(self, slot, run, dtype, False),
    )


MUTANTS: list[tuple[Patch, str]] = [
    (writes_do_not_wait, "slots"),
    (pins_are_forgotten, "slots"),
    (use_does_not_wait_for_the_copy, "slots"),
    (use_does_not_wait_for_the_copy, "nvme"),
    (copies_are_not_noted, "slots"),
    (only_the_last_run_is_noted, "slots"),
    (use_is_noted_in_no_stream, "slots"),
    (gradients_leave_before_they_are_computed, "slots"),
    (gradients_leave_before_they_are_computed, "nvme"),
    (an_event_is_recorded_in_another_stream, "homes"),
    (compute_waits_for_nothing, "homes"),
    (copies_wait_for_nothing, "nvme"),
    (a_fetch_is_noted_in_the_next_slot, "slots"),
    (pins_end_with_the_view, "slots"),
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
