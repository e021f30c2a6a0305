"""Measures a CUDA device and its link, with the copies and the kernels that training uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from offload._native import Hyper, UpdateKind
from offload.device.cuda_backend import CudaBackend
from offload.device.cuda_runtime import CudaRuntime
from offload.device.updater import DeviceTask
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account

if TYPE_CHECKING:
    from offload._native import DtypeName

ROUNDS = 5
COPY_BYTES = 64 << 20  # of one copy; several follow each other
COPIES = 4
NUMEL = 64 << 20  # of an update
# Rows, inner dimension and columns: a transformer's, with as many tokens as a device is given.
SHAPES = ((4096, 4096, 4096), (4096, 4096, 16384))
TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def measure_cuda(
    runtime: CudaRuntime | None = None,
    *,
    copy_bytes: int = COPY_BYTES,
    numel: int = NUMEL,
    shapes: tuple[tuple[int, int, int], ...] = SHAPES,
    devices: int | None = None,
) -> dict[str, Any]:
    """Fields of a Profile: medians on torch's current device; takes a few seconds.

    Takes some 2 GiB of the device's memory. Raises BudgetError if it has no room, HeteroError if
    its kernels cannot be compiled. What is not given is for training's sizes.
    """
    backend = CudaBackend(runtime)
    try:
        h2d, d2h = _link(backend, copy_bytes)
        return {
            "devices": torch.cuda.device_count() if devices is None else devices,
            "h2d_bytes_per_s": h2d,
            "d2h_bytes_per_s": d2h,
            "device_update_bytes_per_s": {d: _update(backend, d, numel) for d in TORCH_DTYPES},
            "matmul_flop_per_s": {d: _products(backend, d, shapes) for d in TORCH_DTYPES},
            "device_bytes": backend.runtime.memory()[1],
        }
    finally:
        backend.close()


def _median_s(backend: CudaBackend, run: Callable[[], object]) -> float:
    """Seconds until the device is done with what `run` gives it."""
    times_s = []
    for _ in range(ROUNDS + 1):  # the first prepares
        backend.runtime.synchronize_all()
        begin_s = time.perf_counter()
        run()
        backend.runtime.synchronize_all()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[1:])


def _link(backend: CudaBackend, copy_bytes: int) -> tuple[float, float]:
    """Bytes per second to the device, and from it."""
    ledger = Ledger({})
    with (
        closing(backend.arena(COPIES, copy_bytes, ledger, Account.GATHERED)) as there,
        closing(backend.host_arena(COPIES, copy_bytes, ledger, Account.PARAM)) as ram,
    ):
        ram.commit(0, COPIES)
        sides = [
            (there.view(slot, 1, torch.uint8), ram.view(slot, 1, torch.uint8))
            for slot in range(COPIES)
        ]
        h2d_s = _median_s(backend, lambda: [backend.fetch(to, source) for to, source in sides])
        d2h_s = _median_s(backend, lambda: [backend.to_ram(to, source) for source, to in sides])
        return COPIES * copy_bytes / h2d_s, COPIES * copy_bytes / d2h_s


def _update(backend: CudaBackend, dtype: DtypeName, numel: int) -> float:
    """Bytes per second, as UpdateKind.bytes_moved counts them, of AdamW's update."""
    kind = UpdateKind(dtype, dtype)
    itemsize = TORCH_DTYPES[dtype].itemsize
    sizes = (itemsize * numel, itemsize * numel, kind.optim_state_bytes(numel))
    # Zeros are numbers in every dtype.
    param, grad, optim_state = (backend.runtime.empty(size).zero_() for size in sizes)
    task = DeviceTask(param.data_ptr(), grad.data_ptr(), optim_state.data_ptr(), [(0, numel, 0, 0)])
    hyper = Hyper(lr=1e-4, weight_decay=0.01, decoupled=True, step=10)
    updater = backend.updater(kind, numel)
    seconds = _median_s(backend, lambda: updater.update([task], [hyper]))
    return kind.bytes_moved(numel) / seconds


def _products(
    backend: CudaBackend, dtype: DtypeName, shapes: tuple[tuple[int, int, int], ...]
) -> float:
    """FLOP/s of a linear layer's three products."""
    rates = []
    for shape in shapes:
        flop, run = linear_products(shape, TORCH_DTYPES[dtype], backend.device)
        rates.append(flop / _median_s(backend, run))
    return statistics.harmonic_mean(rates)


def linear_products(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[int, Callable[[], None]]:
    """The FLOP of a linear layer's three products, of its forward and two of backward, and they.

    `shape` is rows, inner dimension and columns.
    """
    rows, inner, columns = shape
    generator = torch.Generator(device).manual_seed(0)
    inputs, weight, grad = (
        torch.randn(size, generator=generator, device=device).to(dtype)
        for size in ((rows, inner), (columns, inner), (rows, columns))
    )

    def run() -> None:
        inputs @ weight.t()
        grad @ weight
        grad.t() @ inputs

    return 6 * rows * inner * columns, run
