"""Measures the profile of this machine, with the kernels and the I/O engine that training uses.

Rates are medians of ROUNDS rounds in which all that is measured takes its turn, so that a machine
whose speed drifts is judged fairly.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch

from offload import _native
from offload._native import Arena, Hyper, IoOp, UpdateKind
from offload.cache.slot_cache import Transfers
from offload.device.cuda_backend import CudaBackend, cuda_available
from offload.device.cuda_runtime import CudaRuntime
from offload.device.updater import DeviceTask
from offload.disk.directories import check_directories, total_free_bytes
from offload.disk.scratch_file import ScratchFile, make_io_engine
from offload.memory.ledger import Ledger
from offload.memory.sizes import round_up
from offload.memory.tiers import Account
from offload.profile.machine_profile import Profile

if TYPE_CHECKING:
    from offload._native import DtypeName

ROUNDS = 3
DISK_WINDOW_S = 0.5  # of one measurement
FILL_S = 3.0  # at most, for the first writing of the area
DISK_AREA_BYTES = 2 << 30  # larger than what a disk keeps in a cache of its own, as a rule
TRANSFER_BYTES = 8 << 20  # as large as a chunk's
IN_FLIGHT = 4  # transfers, as prefetch and pipeline have
NUMEL = 16 << 20  # of the arrays of an update: far more than caches hold
# Rows, inner dimension and columns of products of a transformer.
SHAPES = ((1024, 1024, 1024), (1024, 4096, 1024))
_TRIAL_SHAPE = (256, 256, 256)
_MOST_PRODUCT_S = 0.5  # a larger product is not worth waiting for: the small one's rate is taken

# Of a CUDA device.
_CUDA_ROUNDS = 5
COPY_BYTES = 64 << 20  # of one copy; several follow each other
COPIES = 4
CUDA_NUMEL = 64 << 20  # of an update
# A transformer's, with as many tokens as a device is given.
CUDA_SHAPES = ((4096, 4096, 4096), (4096, 4096, 16384))
TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}

# Of the bytes moved, those read.
READ_SHARES = {"read": 1.0, "write": 0.0, "mixed": 0.5}


def measure_profile(
    nvme_paths: Sequence[str] = (),
    name: str = "this machine",
    tell: Callable[[str], None] = lambda text: None,
    *,
    numel: int = NUMEL,
    area_bytes: int = DISK_AREA_BYTES,
    window_s: float = DISK_WINDOW_S,
) -> Profile:
    """The profile of this machine; takes less than 20 s.

    Its devices are CUDA's, as far as torch sees some, or else the CPU is the only one.
    Disks are measured in the directories `nvme_paths`, striped as training stripes them; a file of
    `area_bytes` there (less if the disk is slow or full) goes when it is done. `tell` gets a line
    for what is being done and for what may be wrong. Uses the worker pool as it is set. Takes about
    20 * `numel` bytes of RAM. Raises StoreError and NativeIoError.
    """
    paths = check_directories(nvme_paths) if nvme_paths else ()
    tell("RAM, updates, products of matrices")
    arrays = UpdateArrays(numel)
    samplers: dict[str, Callable[[], float]] = {"dram": arrays.stream}
    for dtype in TORCH_DTYPES:
        samplers[f"update {dtype}"] = partial(arrays.update, UpdateKind(dtype, dtype))
        samplers[f"matmul {dtype}"] = _matmul_sampler(dtype)
    rates = _medians(samplers)
    nvme: dict[str, float] = {}
    nvme_bytes = None
    if paths:
        nvme_bytes = total_free_bytes(paths)
        tell(f"NVMe in {', '.join(paths)}")
        nvme = measure_disk(paths, tell, area_bytes=area_bytes, window_s=window_s)
    profile = Profile(
        name=name,
        date=date.today().isoformat(),
        source=f"measured; medians of {ROUNDS} rounds, {_native.isa()} kernels, torch "
        f"{torch.__version__} on {torch.get_num_threads()} threads",
        devices=1,
        threads=_native.threads(),
        dram_bytes_per_s=rates["dram"],
        nvme_read_bytes_per_s=nvme.get("read"),
        nvme_write_bytes_per_s=nvme.get("write"),
        nvme_mixed_bytes_per_s=nvme.get("mixed"),
        update_bytes_per_s={dtype: rates[f"update {dtype}"] for dtype in TORCH_DTYPES},
        matmul_flop_per_s={dtype: rates[f"matmul {dtype}"] for dtype in TORCH_DTYPES},
        host_bytes=psutil.virtual_memory().total,
        nvme_bytes=nvme_bytes,
    )
    if cuda_available():
        device = torch.cuda.get_device_name()
        tell(f"{device}: the link, updates, products of matrices")
        source = f"{profile.source}; CUDA {torch.version.cuda} on {device}"
        profile = dataclasses.replace(profile, source=source, **measure_cuda())
    return profile


def measure_disk(
    paths: Sequence[str],
    tell: Callable[[str], None],
    *,
    area_bytes: int = DISK_AREA_BYTES,
    window_s: float = DISK_WINDOW_S,
    rounds: int = ROUNDS,
) -> dict[str, float]:
    """Bytes per second of READ_SHARES in the directories `paths`, as measure_profile() says.

    Takes FILL_S at most, and `rounds` times `window_s` for each mode. Raises StoreError and
    NativeIoError.
    """
    with open_disk(paths, tell, area_bytes=area_bytes, window_s=window_s) as rate:
        modes = {mode: partial(rate, share) for mode, share in READ_SHARES.items()}
        return _medians(modes, rounds)


def _medians(samplers: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            samples[name].append(sample())
    return {name: statistics.median(values) for name, values in samples.items()}


_ARRAY_GAP_BYTES = 128 << 10


class UpdateArrays:
    """Memory of an update of `numel` elements of any kind, and of the stream kernel."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        # Arrays that lie a multiple of 64 MiB apart get in each other's way in the caches (measured
        # on Zen 5: 256 MiB apart, updates take two to four times as long). Tiles never do.
        part_bytes = round_up(4 * numel, 2 << 20) + _ARRAY_GAP_BYTES
        self._arena = Arena(5 * part_bytes)
        self._parts = [self._arena.address + part * part_bytes for part in range(5)]
        memory = torch.from_dlpack(self._arena.export(0, self._arena.nbytes))  # type: ignore[attr-defined]
        # Zeros are numbers in every dtype, and no denormals come of them.
        memory.zero_()

    def stream(self) -> float:
        """Bytes per second of the memory yardstick."""
        param, grad, exp_avg, exp_avg_sq, _ = self._parts
        return self._rate(
            28 * self._numel, lambda: _native.stream(param, grad, exp_avg, exp_avg_sq, self._numel)
        )

    def update(self, kind: UpdateKind) -> float:
        """Bytes per second, as UpdateKind.bytes_moved counts them, of one update."""
        param, grad, master, *states = self._parts
        master = 0 if kind.dtype == "fp32" else master
        states = states[: kind.states]
        decoupled = kind.rule not in ("adagrad", "sgd")  # which add the decay to the gradient
        hyper = Hyper(lr=1e-4, weight_decay=0.01, decoupled=decoupled, step=10)
        return self._rate(
            kind.bytes_moved(self._numel),
            lambda: _native.update(kind, param, grad, master, states, self._numel, hyper),
        )

    def _rate(self, nbytes: int, run: Callable[[], None]) -> float:
        run()  # caches and clocks as in the middle of a step
        begin = time.perf_counter()
        run()
        return nbytes / (time.perf_counter() - begin)


def _matmul_sampler(dtype: DtypeName) -> Callable[[], float]:
    """Measures FLOP/s of a linear layer's three products."""

    def rate(shape: tuple[int, int, int]) -> float:
        flop, run = linear_products(shape, TORCH_DTYPES[dtype], torch.device("cpu"))
        begin = time.perf_counter()
        run()
        return flop / (time.perf_counter() - begin)

    trial = max(rate(_TRIAL_SHAPE) for _ in range(5))
    shapes = [s for s in SHAPES if 6 * s[0] * s[1] * s[2] / trial < _MOST_PRODUCT_S]
    for shape in shapes:
        rate(shape)  # torch prepares its kernels
    return lambda: statistics.harmonic_mean([rate(s) for s in shapes or [_TRIAL_SHAPE]])


@contextmanager
def open_disk(
    paths: Sequence[str],
    tell: Callable[[str], None],
    *,
    area_bytes: int = DISK_AREA_BYTES,
    window_s: float = DISK_WINDOW_S,
    transfer_bytes: int = TRANSFER_BYTES,
) -> Iterator[Callable[[float], float]]:
    """Writes a file of `area_bytes` at most, and gives what measures transfers within it.

    That takes the share of the bytes that are read, 0 to 1, the others being written, and gives
    bytes per second, both directions together. Raises StoreError and NativeIoError.
    """
    area_bytes = min(area_bytes, total_free_bytes(paths) // 2) // transfer_bytes * transfer_bytes
    area_bytes = max(area_bytes, transfer_bytes)
    with ExitStack() as resources:
        scratch = ScratchFile(paths, Ledger({}), Account.FILE)
        resources.callback(scratch.close)
        engine, notes = make_io_engine("auto", len(paths))
        resources.callback(engine.close)
        scratch.deal(area_bytes)
        scratch.reserve(area_bytes)
        transfers = Transfers(engine, scratch)
        resources.callback(transfers.close)
        arena = Arena(IN_FLIGHT * transfer_bytes)
        fill_randomly(arena)
        engine.register(arena)
        for note in (*notes, *scratch.notes):
            tell(f"note: {note}")
        first, end = arena.address, arena.address + arena.nbytes
        addresses = itertools.cycle(range(first, end, transfer_bytes))
        offsets: list[int] = []  # written

        def fill() -> Iterator[IoOp]:
            end_s = time.perf_counter() + FILL_S
            while len(offsets) * transfer_bytes < area_bytes and time.perf_counter() < end_s:
                offsets.append(len(offsets) * transfer_bytes)
                yield transfers.write(next(addresses), transfer_bytes, offsets[-1])

        transfer(fill(), transfer_bytes, IN_FLIGHT)
        places = itertools.cycle(offsets)

        def rate(read_share: float) -> float:
            numbers = itertools.count(1)

            def start() -> IoOp:
                number = next(numbers)
                is_read = int(number * read_share) > int((number - 1) * read_share)
                move = transfers.read if is_read else transfers.write
                return move(next(addresses), transfer_bytes, next(places))

            return transfer(started_for(window_s, start), transfer_bytes, IN_FLIGHT)

        yield rate


def fill_randomly(arena: Arena) -> None:
    """Not zeros, which some disks do not write; and not from the generator of the user."""
    content = torch.from_dlpack(arena.export(0, arena.nbytes))  # type: ignore[attr-defined]
    content.random_(0, 256, generator=torch.Generator().manual_seed(0))


def started_for(seconds: float, start: Callable[[], IoOp]) -> Iterator[IoOp]:
    """Operations that are started when they are asked for, within `seconds`; at least one."""
    end = time.perf_counter() + seconds
    yield start()
    while time.perf_counter() < end:
        yield start()


def transfer(ops: Iterable[IoOp], nbytes: int, depth: int) -> float:
    """Bytes per second of operations of `nbytes` each, `depth` of them in flight at a time."""
    flying: deque[IoOp] = deque()
    begin = time.perf_counter()
    moved = 0
    for op in ops:
        flying.append(op)
        moved += nbytes
        if len(flying) == depth:
            flying.popleft().wait()
    for op in flying:
        op.wait()
    return moved / (time.perf_counter() - begin)


# CUDA devices, by the copies and the kernels that training uses


def measure_cuda(
    runtime: CudaRuntime | None = None,
    *,
    copy_bytes: int = COPY_BYTES,
    numel: int = CUDA_NUMEL,
    shapes: tuple[tuple[int, int, int], ...] = CUDA_SHAPES,
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
    for _ in range(_CUDA_ROUNDS + 1):  # the first prepares
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
