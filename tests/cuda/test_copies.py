"""Copies by CUDA's driver: gradients that native code brings and adds, events, where RAM lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch

from offload.device.cuda_backend import CudaBackend
from offload.device.cuda_runtime import CudaRuntime
from offload.device.grad_offload import BUFFERS, GradOffload
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account
from tests.support.native.update_arrays import TORCH_DTYPES

NUMEL = 3_000_001  # several parts, of which the last one is odd
BUFFER_BYTES = 1 << 20


class Rig:
    def __init__(self, stack: ExitStack) -> None:
        self.backend = stack.enter_context(closing(CudaBackend()))
        ledger = Ledger({})
        ram = stack.enter_context(
            closing(self.backend.host_arena(2, 16 << 20, ledger, Account.GRAD))
        )
        buffers = stack.enter_context(
            closing(self.backend.host_arena(BUFFERS, BUFFER_BYTES, ledger, Account.LINK))
        )
        ram.commit(0, 2)
        buffers.commit(0, BUFFERS)
        self.ram = ram
        self.offload = stack.enter_context(
            closing(GradOffload(self.backend, ledger, 1 << 40, buffers))
        )

    def kept(self, slot: int, dtype: torch.dtype) -> torch.Tensor:
        return self.ram.view(slot, 1, dtype)[:NUMEL]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(stack)


def grads(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(NUMEL, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("kept_dtype", TORCH_DTYPES.values())
@pytest.mark.parametrize("dtype", TORCH_DTYPES.values())
def test_gradients_are_added_with_the_cpus_bits(
    rig: Rig, dtype: torch.dtype, kept_dtype: torch.dtype
) -> None:
    expected = torch.zeros(NUMEL, dtype=kept_dtype)
    for number, grad in enumerate(grads(dtype)):
        (expected.add_ if number else expected.copy_)(grad)
        rig.offload.take(0, "p", grad.cuda(), rig.kept(0, kept_dtype), number > 0)
    rig.offload.wait(0, "p")
    found = rig.kept(0, kept_dtype)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_a_gradient_that_is_computed_late_is_waited_for(rig: Rig) -> None:
    for add in (False, True):
        torch.cuda._sleep(200_000_000)
        grad = torch.ones(NUMEL, device="cuda").mul_(3)
        rig.offload.take(0, "p", grad, rig.kept(0, torch.float32), add)
        del grad  # its memory is kept until it has arrived
        torch.full((NUMEL,), 7.0, device="cuda")
    rig.offload.wait(0, "p")
    assert bool((rig.kept(0, torch.float32) == 6).all())


def test_many_small_gradients(rig: Rig) -> None:
    kept = rig.kept(0, torch.float32)[:10_000].view(10, 1000).zero_()
    for number in range(500):
        grad = torch.full((1000,), 1.0, device="cuda")
        rig.offload.take(number % 10, "p", grad, kept[number % 10], True)
    for owner in range(10):
        rig.offload.wait(owner, "p")
    assert bool((kept == 50).all())


def test_events_are_used_again(runtime: CudaRuntime) -> None:
    stream = runtime.new_stream()
    raws = set()
    for _ in range(100):
        event = runtime.record(stream)
        raws.add(runtime.handle(event))
        runtime.wait(runtime.current_stream(), event)
    runtime.synchronize(event)
    assert len(raws) <= 2


def test_streams_are_ones_own(runtime: CudaRuntime) -> None:
    """torch has 32, which it deals out in turns."""
    streams = [runtime.new_stream() for _ in range(70)]
    assert len({stream.cuda_stream for stream in streams}) == 70
    found = torch.zeros(len(streams), device="cuda")
    torch.cuda.synchronize()
    for number, stream in enumerate(streams):
        with runtime.on(stream):
            found[number] = number
    torch.cuda.synchronize()
    assert found.tolist() == list(range(70))
    handles = {stream.cuda_stream for stream in streams}
    del streams, stream
    assert runtime.new_stream().cuda_stream in handles


def test_what_is_uploaded_is_there(runtime: CudaRuntime) -> None:
    torch.cuda._sleep(100_000_000)
    found = [runtime.upload(bytes([number]) * 1000) for number in range(50)]
    assert all(bool((each == number).all()) for number, each in enumerate(found))
