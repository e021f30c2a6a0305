"""How fast hetero copies between page-locked RAM and a GPU, beside the link alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import torch

from offload.device.cuda_backend import CudaBackend
from offload.device.cuda_runtime import CudaRuntime
from offload.device.grad_offload import GradOffload, buffer_sizes
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account

ROUNDS = 5
CHUNK_BYTES = 32 << 20
CHUNKS = 32
WAYS = ("h2d", "d2h", "d2h_added")


def measure_copies(
    runtime: CudaRuntime | None = None, chunk_bytes: int = CHUNK_BYTES, chunks: int = CHUNKS
) -> dict[str, float]:
    """Bytes per second of each of WAYS, and of "h2d_alone" and "d2h_alone".

    "h2d" fetches chunks to their slots, "d2h" brings first gradients to their homes, "d2h_added"
    later ones, which are added in RAM; all as training does, one after another, until the host
    knows that they are there. "alone" is one copy by CUDA of as many bytes, in the same memory.
    They take turns; medians of ROUNDS after one of warm-up. Takes twice `chunk_bytes` times
    `chunks` of RAM and of the device's memory.
    """
    backend, ledger = CudaBackend(runtime), Ledger({})
    there = backend.arena(chunks, chunk_bytes, ledger, Account.GATHERED)
    ram = backend.host_arena(chunks, chunk_bytes, ledger, Account.PARAM)
    buffers = backend.host_arena(*buffer_sizes(chunk_bytes), ledger, Account.LINK)
    with closing(backend), closing(there), closing(ram), closing(buffers):
        ram.commit(0, chunks)
        buffers.commit(0, buffers.slots)
        ram.view(0, chunks, torch.uint8).zero_()
        offload = GradOffload(backend, ledger, 1 << 62, buffers)
        with closing(offload):
            times_s: dict[str, list[float]] = {}
            runs = _runs(backend, offload, there, ram)
            for _ in range(ROUNDS + 1):
                for name, run in runs.items():
                    backend.runtime.synchronize_all()
                    begin_s = time.perf_counter()
                    run()
                    times_s.setdefault(name, []).append(time.perf_counter() - begin_s)
    nbytes = chunks * chunk_bytes
    return {name: nbytes / statistics.median(some[1:]) for name, some in times_s.items()}


def _runs(
    backend: CudaBackend, offload: GradOffload, there: HostArena, ram: HostArena
) -> dict[str, Callable[[], None]]:
    """What is measured, between all slots on the device and as many in RAM."""
    whole, ram_whole = (arena.view(0, arena.slots, torch.uint8) for arena in (there, ram))
    chunks = [
        (there.view(slot, 1, torch.uint8), ram.view(slot, 1, torch.uint8))
        for slot in range(ram.slots)
    ]
    stream = backend.runtime.new_stream()

    def alone(to: torch.Tensor, source: torch.Tensor) -> None:
        backend.runtime.copy(to, source, stream)
        backend.runtime.synchronize_all()

    def fetch() -> None:
        copies = [backend.fetch(to, source) for to, source in chunks]
        for copy in copies:
            copy.wait()

    def bring(add: bool) -> None:
        for owner, (source, to) in enumerate(chunks):
            kept = to.view(torch.bfloat16)
            offload.take(owner, "", source.view(torch.bfloat16), kept, add)
        for owner in range(len(chunks)):
            offload.wait(owner, "")

    return {
        "h2d_alone": partial(alone, whole, ram_whole),
        "h2d": fetch,
        "d2h_alone": partial(alone, ram_whole, whole),
        "d2h": partial(bring, False),
        "d2h_added": partial(bring, True),
    }
