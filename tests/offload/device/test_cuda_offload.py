"""Gradients on their way from a GPU, which a fake device is."""

from __future__ import annotations

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


def test_gradients_of_other_dtypes_are_converted_in_ram(rig: Rig) -> None:
    kept = rig.kept(0)
    for value, add in ((1.5, False), (2.0, True)):
        grad = rig.grad(value, len(kept)).to(torch.bfloat16)
        rig.runtime.give(rig.runtime.compute, lambda g=grad, v=value: g.fill_(v))
        rig.offload.take(0, "p", grad, kept, add)
    rig.offload.wait(0, "p")
    assert bool((kept == 3.5).all())
    assert rig.backend.d2h_bytes == 2 * kept.nbytes // 2


def test_a_device_that_fails_says_why(rig: Rig) -> None:
    rig.offload.take(0, "p", rig.grad(1.0), rig.kept(0), True)
    rig.offload.wait(0, "p")
    rig.runtime.failure = "unspecified launch failure"
    rig.offload.take(0, "p", rig.grad(1.0), rig.kept(0), True)
    with pytest.raises(HeteroError, match=r"KiB from the device to RAM failed: unspecified"):
        rig.offload.wait(0, "p")
    rig.runtime.failure = None
    rig.offload.take(0, "p", rig.grad(5.0), rig.kept(0), False)
    rig.offload.wait(0, "p")
    assert bool((rig.kept(0) == 5).all())


def test_a_negated_gradient_and_one_of_zeros_have_their_values(rig: Rig) -> None:
    kept = rig.kept(0)
    rig.offload.take(0, "p", torch._neg_view(torch.ones(len(kept))), kept, False)
    rig.offload.take(0, "p", torch._efficientzerotensor(len(kept)), kept, True)
    rig.offload.wait(0, "p")
    assert bool((kept == -1).all())


def test_each_buffer_has_a_part_under_way(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a gradient has fewer parts: those of the next one are on their way, too."""
    under_way, start, wait = [0], rig.runtime.copy, rig.runtime.synchronize
    numel = 3 * BUFFER // 4  # three parts

    def started(*arguments: Any) -> None:
        under_way.append(under_way[-1] + 1)
        start(*arguments)

    def waited(event: Any) -> None:
        under_way.append(under_way[-1] - 1)
        wait(event)

    monkeypatch.setattr(rig.runtime, "copy", started)
    monkeypatch.setattr(rig.runtime, "synchronize", waited)
    with rig.offload._changed:  # so that the thread finds all of them
        for slot in range(8):
            grad = rig.grad(1.0, numel)
            rig.offload.take(slot, "p", grad, rig.kept(slot)[:numel], True)
    for slot in range(8):
        rig.offload.wait(slot, "p")
    assert max(under_way) == BUFFERS
    assert under_way[-1] == 0


@pytest.mark.parametrize("nth", [0, 1, BUFFERS, 7])
def test_a_part_that_cannot_be_started_fails_its_gradient_alone(
    rig: Rig, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, copy = [], rig.runtime.copy

    def refuse(*arguments: Any) -> None:
        copies.append(arguments)
        if len(copies) == nth + 1:
            raise RuntimeError("no room for an event")
        copy(*arguments)

    for slot in range(3):
        rig.kept(slot).zero_()
    monkeypatch.setattr(rig.runtime, "copy", refuse)
    with rig.offload._changed:
        for slot in range(3):
            rig.offload.take(slot, "p", rig.grad(2.0), rig.kept(slot), True)
    with pytest.raises(HeteroError, match="did not arrive in RAM: no room for an event"):
        rig.offload.wait(0, "p")
    for slot in (1, 2):
        rig.offload.wait(slot, "p")
        assert bool((rig.kept(slot) == 2).all())
    assert len(copies) <= 16 + nth + BUFFERS
