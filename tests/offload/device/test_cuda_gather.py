"""CudaBackend.gather: what comes before a gather on the device, and what comes after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload.device.cuda_backend import CudaBackend, MeanTask
from offload.device.cuda_runtime import Event
from offload.device.device_arena import DeviceArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account
from tests.support.cuda.fake_nccl import FakeNccl
from tests.support.native.fake_cuda import FakeRuntime

SLOT = 4096
NO_ORDER = "none waits for the other's event"


class Rig:
    """A device of one rank; compute is what the test gives it."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime(page_lockable=False, eager=False, nccl=True)
        self.backend = CudaBackend(self.runtime)
        made = self.backend.arena(2, SLOT, Ledger({}), Account.GATHERED)
        assert isinstance(made, DeviceArena)
        self.arena = made
        self.group: FakeNccl = self.runtime.process_group(dist.HashStore(), 0, 1)
        self.streams = self.backend.connect(self.group)

    def gather(self, value: int) -> Event:
        source = torch.full((SLOT,), value, dtype=torch.uint8)
        return self.gather_from(source, None)

    def gather_from(self, source: torch.Tensor, computed: Event | None) -> Event:
        whole = self.arena.view(0, 1, torch.uint8)
        unused = self.backend.unused_after(whole)
        return self.backend.gather(self.streams, whole, whole, source, computed, unused)

    def use(self) -> list[int]:
        """Work that reads the slot, in the current stream; what it finds, once it is done."""
        alias, found = torch.from_dlpack(self.arena.memory.export(0, SLOT)), list[int]()
        self.runtime.give(
            self.runtime.current_stream(),
            lambda: found.append(int(alias[SLOT // 2])),
            reads=[(alias.data_ptr(), SLOT)],
        )
        return found

    def close(self) -> None:
        self.backend.synchronize()
        self.group.abort()
        self.backend.close()
        self.arena.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_work_with_a_pinned_view_follows_the_gather(rig: Rig) -> None:
    for value in (7, 8):
        done = rig.gather(value)
        pin = rig.arena.view(0, 1, torch.uint8, pinned=True)
        found = rig.use()
        del pin
        assert not rig.runtime.done(done)  # the host has waited for nothing
    rig.runtime.synchronize_all()
    assert found == [8]


def test_other_work_does_not(rig: Rig) -> None:
    rig.gather(7)
    with pytest.raises(AssertionError, match=NO_ORDER):
        rig.use()


def test_work_that_is_told_to_follow_does(rig: Rig) -> None:
    """As with a home, over which there are tensors already."""
    rig.runtime.wait(rig.runtime.current_stream(), rig.gather(7))
    found = rig.use()
    rig.runtime.synchronize_all()
    assert found == [7]


def test_means_in_the_same_memory_come_to_ram_one_after_the_other(rig: Rig) -> None:
    received = rig.arena.view(0, 1, torch.float32)
    flats = [torch.full_like(received, value) for value in (1.0, 2.0, 3.0)]
    found = [torch.zeros_like(flat) for flat in flats]
    for flat, into in zip(flats, found, strict=True):
        done = rig.backend.average(rig.streams, MeanTask(flat, received, received, in_ram=into), [])
    assert not rig.runtime.done(done)
    assert rig.runtime.comes_within(done, 60.0)
    assert all(map(torch.equal, found, flats))  # of one device
    assert rig.backend.d2h_bytes == 3 * SLOT


def test_a_copy_to_the_same_slot_follows_the_gather(rig: Rig) -> None:
    rig.gather(7)
    rig.backend.fetch(rig.arena.view(0, 1, torch.uint8), torch.full((SLOT,), 9, dtype=torch.uint8))
    pin = rig.arena.view(0, 1, torch.uint8, pinned=True)
    found = rig.use()
    del pin
    rig.runtime.synchronize_all()
    assert found == [9]


def test_a_part_that_the_device_computes_is_gathered_after_that(rig: Rig) -> None:
    source = torch.zeros(SLOT, dtype=torch.uint8)
    memory = [(source.data_ptr(), SLOT)]
    rig.runtime.give(rig.runtime.compute, lambda: source.fill_(5), writes=memory)
    rig.gather_from(source, rig.backend.record_event())
    assert rig.backend.h2d_bytes == 0
    pin = rig.arena.view(0, 1, torch.uint8, pinned=True)
    found = rig.use()
    del pin
    rig.runtime.synchronize_all()
    assert found == [5]


def test_a_gather_of_one_group_does_not_wait_for_that_of_another(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    comes = threading.Event()
    exchange = rig.group._exchange

    def late(*args: Any) -> bool:
        comes.wait()
        return exchange(*args)

    monkeypatch.setattr(rig.group, "_exchange", late)
    first = rig.gather(7)
    other = rig.runtime.process_group(dist.HashStore(), 0, 1)
    try:
        whole = rig.arena.view(1, 1, torch.uint8)
        source = torch.full((SLOT,), 8, dtype=torch.uint8)
        unused = rig.backend.unused_after(whole)
        streams = rig.backend.connect(other)
        second = rig.backend.gather(streams, whole, whole, source, None, unused)
        assert rig.runtime.comes_within(second, 60.0)
        assert not rig.runtime.done(first)
    finally:
        comes.set()
        other.abort()
    assert rig.runtime.comes_within(first, 60.0)


def test_the_host_waits_for_an_event_so_long_at_most(rig: Rig) -> None:
    event = rig.runtime.record(rig.runtime.compute)
    assert rig.runtime.comes_within(event, 60.0)
    rig.runtime.compute.queue.append(lambda: False)  # which is never done
    assert not rig.runtime.comes_within(rig.runtime.record(rig.runtime.compute), 0.01)
    rig.runtime.compute.queue.clear()
