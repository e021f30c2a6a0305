"""Gradients that native code copies from a GPU, by a fake driver's functions."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offload.device.cuda_backend import CudaBackend
from offload.device.grad_offload import BUFFERS, GradOffload
from offload.errors import HeteroError
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account
from tests.support.native.fake_cuda import FakeRuntime

BUFFER = 4096


class Rig:
    def __init__(self, eager: bool = False) -> None:
        self.runtime = FakeRuntime(eager=eager)
        self.backend = CudaBackend(self.runtime)  # type: ignore[arg-type]
        self.ledger = Ledger({})
        self.ram = self.backend.host_arena(8, 8 * BUFFER, self.ledger, Account.GRAD)
        self.ram.commit(0, 8)
        self.buffers = self.backend.host_arena(BUFFERS, BUFFER, self.ledger, Account.LINK)
        self.buffers.commit(0, BUFFERS)
        self.offload = GradOffload(self.backend, self.ledger, 1 << 30, self.buffers)

    def kept(self, slot: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.ram.view(slot, 1, dtype)

    def grad(self, value: float, numel: int = 8 * BUFFER // 4) -> torch.Tensor:
        """What compute will have written by the time it has done all its work."""
        grad = torch.full((numel,), -1.0)
        self.runtime.give(self.runtime.compute, lambda: grad.fill_(value))
        return grad

    def close(self) -> None:
        self.offload.close()
        self.backend.close()
        self.buffers.close()
        self.ram.close()
        assert self.runtime.driver.events == 0
        assert self.runtime.page_locked == {}


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_copies_wait_until_gradients_are_computed(rig: Rig) -> None:
    for value, add in ((1.0, False), (2.0, True), (4.0, True)):
        rig.offload.take(0, "p", rig.grad(value), rig.kept(0), add)
    rig.offload.wait(0, "p")
    assert bool((rig.kept(0) == 7).all())
    assert rig.backend.d2h_bytes == 3 * 8 * BUFFER


def test_a_device_that_fails_says_why(rig: Rig) -> None:
    rig.offload.take(0, "p", rig.grad(1.0), rig.kept(0), True)
    rig.offload.wait(0, "p")
    rig.runtime.failure = "unspecified launch failure"
    rig.offload.take(0, "p", rig.grad(1.0), rig.kept(0), True)
    with pytest.raises(HeteroError, match=r"bytes from the device to RAM failed: unspecified"):
        rig.offload.wait(0, "p")
    rig.runtime.failure = None
    rig.offload.take(0, "p", rig.grad(5.0), rig.kept(0), False)
    rig.offload.wait(0, "p")
    assert bool((rig.kept(0) == 5).all())


@pytest.mark.covering(1)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    "function",
    ["cuCtxSetCurrent", "cuEventCreate", "cuStreamWaitEvent", "cuMemcpyDtoHAsync_v2"],
)
def test_what_the_driver_refuses_is_lost_alone(rig: Rig, function: str, add: bool) -> None:
    rig.runtime.driver.refused = function
    rig.offload.take(0, "p", rig.grad(1.0), rig.kept(0), add)
    with pytest.raises(HeteroError, match=r"did not arrive in RAM: .*CUDA's error 719"):
        rig.offload.wait(0, "p")
    rig.runtime.driver.refused = None
    for slot in range(8):
        rig.offload.take(slot, "p", rig.grad(2.0), rig.kept(slot), False)
        rig.offload.take(slot, "p", rig.grad(3.0), rig.kept(slot), True)
    for slot in range(8):
        rig.offload.wait(slot, "p")
        assert bool((rig.kept(slot) == 5).all())


def test_events_are_used_again(rig: Rig) -> None:
    for number in range(40):
        rig.offload.take(number % 8, "p", rig.grad(1.0), rig.kept(number % 8), number >= 8)
    for slot in range(8):
        rig.offload.wait(slot, "p")
        assert bool((rig.kept(slot) == 5).all())
    assert 0 < rig.runtime.driver.events <= 8


def test_a_negated_gradient_and_one_of_zeros_have_their_values(rig: Rig) -> None:
    kept = rig.kept(0)
    rig.offload.take(0, "p", torch._neg_view(torch.ones(len(kept))), kept, False)
    rig.offload.take(0, "p", torch._efficientzerotensor(len(kept)), kept, True)
    rig.offload.wait(0, "p")
    assert bool((kept == -1).all())


def test_each_buffer_has_a_part_under_way(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, under_way = rig.runtime.driver, [0]
    copy, wait = driver.cuMemcpyDtoHAsync_v2, driver.cuEventSynchronize

    def copied(*arguments: int) -> int:
        under_way.append(under_way[-1] + 1)
        return copy(*arguments)

    def waited(event: int) -> int:
        under_way.append(under_way[-1] - 1)
        return wait(event)

    monkeypatch.setattr(driver, "cuMemcpyDtoHAsync_v2", copied)
    monkeypatch.setattr(driver, "cuEventSynchronize", waited)
    for _ in range(2):
        rig.offload.take(0, "p", rig.grad(1.0), rig.kept(0), True)
    rig.offload.wait(0, "p")
    assert max(under_way) == BUFFERS == 8
    assert under_way[-1] == 0


def calls_of(rig: Any, numel: int) -> int:
    """How many Python functions run, in any thread, for one gradient that is added."""
    kept = rig.ram.view(0, 8, torch.float32)[:numel]
    counts = []

    def count(frame: Any, event: str, argument: object) -> None:
        # (The fake driver is Python, too: a true one is not.)
        if event == "call" and "/offload/" in frame.f_code.co_filename:
            counts.append(frame.f_code.co_name)

    grad = torch.ones(numel)
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        rig.offload.take(0, "p", grad, kept, True)
        rig.offload.wait(0, "p")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len([name for name in counts if name != "wait"])


def test_python_has_the_same_work_for_a_gradient_of_any_size() -> None:
    counts = {}
    for parts in (1, 64):
        rig = Rig(eager=True)
        counts[parts] = calls_of(rig, parts * BUFFER // 4)
        rig.close()
    assert counts[1] == counts[64] > 0


def test_what_replaces_comes_after_what_was_added_before(rig: Rig) -> None:
    """It is copied straight to its place; what is added waits in buffers for the host."""
    for stream in (rig.runtime.compute, *rig.runtime.streams):
        stream.eager = True  # a copy is done as soon as it may be
    large, small = rig.ram.view(0, 7, torch.float32), rig.kept(7)[: BUFFER // 4]
    for _ in range(10):
        rig.offload.take(0, "large", rig.grad(1.0, large.numel()), large, True)  # all buffers
        for value, add in ((1.0, True), (2.0, True), (4.0, False)):
            rig.offload.take(1, "small", rig.grad(value, small.numel()), small, add)
        rig.offload.wait(1, "small")
        assert bool((small == 4).all())
