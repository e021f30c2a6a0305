"""How fast hetero copies between page-locked RAM and a GPU, beside the link alone; and how fast the
CPU updates, alone and while the link is busy both ways: the two share memory's bandwidth."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import torch

from offload._native import UpdateKind
from offload.device.cuda_backend import CudaBackend
from offload.device.cuda_runtime import CudaRuntime
from offload.device.grad_offload import GradOffload, buffer_sizes
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account
from offload.profile.measure import UpdateArrays

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


UPDATE_KIND = UpdateKind("bf16", "bf16")
UPDATE_NUMEL = 256 << 20  # far more than caches hold


def measure_updates(
    runtime: CudaRuntime | None = None, numel: int = UPDATE_NUMEL, copied_bytes: int = 1 << 30
) -> dict[str, float]:
    """Bytes per second of the CPU's Adam: "update" alone, "update_beside" with copies both ways.

    Of a parameter's 26 bytes, with bf16 parameters and gradients and fp32 states, in RAM. "memory"
    is a loop that reads four fp32 arrays and writes three. "both" is what the copies move one way
    meanwhile.
    """
    arrays = UpdateArrays(numel)
    update = partial(arrays.update, UPDATE_KIND)
    found = {"memory": _best(arrays.stream), "update": _best(update)}
    with _copying(runtime or CudaRuntime(), copied_bytes) as copied:
        begin_s, before = time.perf_counter(), copied()
        found["update_beside"] = _best(update)
        found["both"] = (copied() - before) / (time.perf_counter() - begin_s)
    return found


def _best(rate: Callable[[], float]) -> float:
    return max(rate() for _ in range(3))


@contextmanager
def _copying(runtime: CudaRuntime, nbytes: int) -> Iterator[Callable[[], float]]:
    """Inside the block copies run both ways at once; gives what counts the bytes of one way."""
    counts, ends = [0, 0], threading.Event()
    backend, ledger = CudaBackend(runtime), Ledger({})
    there = backend.arena(2, nbytes, ledger, Account.GATHERED)
    ram = backend.host_arena(2, nbytes, ledger, Account.PARAM)
    with closing(backend), closing(there), closing(ram):
        ram.commit(0, 2)
        slots = [[arena.view(i, 1, torch.uint8) for arena in (there, ram)] for i in (0, 1)]
        streams = [runtime.new_stream() for _ in slots]

        def copy(way: int) -> None:
            to, source = slots[way][:: 1 - 2 * way]
            while not ends.is_set():
                runtime.copy(to, source, streams[way])
                runtime.synchronize(runtime.record(streams[way]))
                counts[way] += nbytes

        threads = [threading.Thread(target=copy, args=(way,)) for way in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            yield lambda: sum(counts) / 2
        finally:
            ends.set()
            for thread in threads:
                thread.join()


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
