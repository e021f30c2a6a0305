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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from typing import TYPE_CHECKING, Literal

import psutil
import torch

from offload import _native
from offload._native import Arena, Hyper, IoOp, UpdateKind
from offload.device.cuda_backend import cuda_available
from offload.disk.directories import check_directories, total_free_bytes
from offload.disk.scratch_file import ScratchFile, Transfers, make_io_engine
from offload.memory.ledger import Ledger
from offload.memory.sizes import round_up
from offload.memory.tiers import Account
from offload.profile.machine_profile import Profile
from offload.profile.measure_cuda import measure_cuda

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
_TORCH: dict[DtypeName, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}

Mode = Literal["read", "write", "mixed"]


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
    tell("RAM, updates, products of matrices")
    arrays = _Arrays(numel)
    samplers: dict[str, Callable[[], float]] = {"dram": arrays.stream}
    for dtype in _TORCH:
        samplers[f"update {dtype}"] = lambda dtype=dtype: arrays.update(dtype)  # type: ignore[misc]
        samplers[f"matmul {dtype}"] = _matmul_sampler(dtype)
    rates = _medians(samplers)
    found = {f"nvme {mode}": float("nan") for mode in ("read", "write", "mixed")}
    nvme_bytes = None
    if nvme_paths:
        paths = check_directories(nvme_paths)
        nvme_bytes = total_free_bytes(paths)
        tell(f"NVMe in {', '.join(paths)}")
        with _open_disk(paths, area_bytes, tell) as disk:
            modes: tuple[Mode, ...] = ("read", "write", "mixed")
            found = _medians(
                {f"nvme {mode}": lambda mode=mode: disk.rate(mode, window_s) for mode in modes}  # type: ignore[misc]
            )

    def nvme(mode: Mode) -> float | None:
        return found[f"nvme {mode}"] if nvme_paths else None

    profile = Profile(
        name=name,
        date=date.today().isoformat(),
        source=f"measured; medians of {ROUNDS} rounds, {_native.isa()} kernels, torch "
        f"{torch.__version__} on {torch.get_num_threads()} threads",
        devices=1,
        threads=_native.threads(),
        dram_bytes_per_s=rates["dram"],
        nvme_read_bytes_per_s=nvme("read"),
        nvme_write_bytes_per_s=nvme("write"),
        nvme_mixed_bytes_per_s=nvme("mixed"),
        h2d_bytes_per_s=None,
        d2h_bytes_per_s=None,
        rank_bytes_per_s=None,
        node_bytes_per_s=None,
        update_bytes_per_s={dtype: rates[f"update {dtype}"] for dtype in _TORCH},
        device_update_bytes_per_s=None,
        matmul_flop_per_s={dtype: rates[f"matmul {dtype}"] for dtype in _TORCH},
        host_bytes=psutil.virtual_memory().total,
        device_bytes=None,
        nvme_bytes=nvme_bytes,
    )
    if cuda_available():
        device = torch.cuda.get_device_name()
        tell(f"{device}: the link, updates, products of matrices")
        source = f"{profile.source}; CUDA {torch.version.cuda} on {device}"
        profile = dataclasses.replace(profile, source=source, **measure_cuda())
    return profile


def _medians(samplers: dict[str, Callable[[], float]]) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(ROUNDS):
        for name, sample in samplers.items():
            samples[name].append(sample())
    return {name: statistics.median(values) for name, values in samples.items()}


class _Arrays:
    """Memory of an AdamW update of `numel` elements in any dtype, and of the stream kernel."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._part_bytes = round_up(4 * numel, 2 << 20)
        self._arena = Arena(5 * self._part_bytes)
        memory = torch.from_dlpack(self._arena.export(0, self._arena.nbytes))  # type: ignore[attr-defined]
        # Zeros are numbers in every dtype, and no denormals come of them.
        memory.zero_()
        self._hyper = Hyper(lr=1e-4, weight_decay=0.01, decoupled=True, step=10)

    def stream(self) -> float:
        """Bytes per second of the memory yardstick."""
        param, grad, exp_avg, exp_avg_sq = (self._address(part) for part in range(4))
        return self._rate(28, lambda: _native.stream(param, grad, exp_avg, exp_avg_sq, self._numel))

    def update(self, dtype: DtypeName) -> float:
        """Bytes per second, as UpdateKind.bytes_moved counts them, of one AdamW update."""
        kind = UpdateKind(dtype, dtype)
        param, grad, master, *states = (self._address(part) for part in range(5))
        master = 0 if dtype == "fp32" else master
        return self._rate(
            kind.bytes_moved,
            lambda: _native.update(kind, param, grad, master, states, self._numel, self._hyper),
        )

    def _rate(self, bytes_per_element: int, run: Callable[[], None]) -> float:
        run()  # caches and clocks as in the middle of a step
        begin = time.perf_counter()
        run()
        return self._numel * bytes_per_element / (time.perf_counter() - begin)

    def _address(self, part: int) -> int:
        return self._arena.address + part * self._part_bytes


def _matmul_sampler(dtype: DtypeName) -> Callable[[], float]:
    """Measures FLOP/s of a linear layer's three products: of its forward, and two of backward."""
    generator = torch.Generator().manual_seed(0)

    def rate(shape: tuple[int, int, int]) -> float:
        rows, inner, columns = shape
        made = [(rows, inner), (columns, inner), (rows, columns)]
        inputs, weight, grad = (
            torch.randn(size, generator=generator).to(_TORCH[dtype]) for size in made
        )
        begin = time.perf_counter()
        inputs @ weight.t()
        grad @ weight
        grad.t() @ inputs
        return 6 * rows * inner * columns / (time.perf_counter() - begin)

    trial = max(rate(_TRIAL_SHAPE) for _ in range(5))
    shapes = [s for s in SHAPES if 6 * s[0] * s[1] * s[2] / trial < _MOST_PRODUCT_S]
    for shape in shapes:
        rate(shape)  # torch prepares its kernels
    return lambda: statistics.harmonic_mean([rate(s) for s in shapes or [_TRIAL_SHAPE]])


class _Disk:
    """Transfers within the first `area_bytes` of a file that have been written."""

    def __init__(self, transfers: Transfers, arena: Arena, area_bytes: int) -> None:
        self._transfers = transfers
        self._arena = arena
        self._area_bytes = area_bytes
        self._turn = 0

    def fill(self) -> None:
        """Writes the area once, for FILL_S at most; it is as large from then on as was written."""
        begin = time.perf_counter()
        flying: deque[IoOp] = deque()
        written = 0
        while written < self._area_bytes and time.perf_counter() < begin + FILL_S:
            if len(flying) == IN_FLIGHT:
                flying.popleft().wait()
            address = self._address(written // TRANSFER_BYTES)
            flying.append(self._transfers.write(address, TRANSFER_BYTES, written))
            written += TRANSFER_BYTES
        for op in flying:
            op.wait()
        self._area_bytes = written

    def rate(self, mode: Mode, seconds: float) -> float:
        """Bytes per second, during `seconds`."""
        offsets = range(0, self._area_bytes, TRANSFER_BYTES)
        turns = itertools.cycle(("read", "write") if mode == "mixed" else (mode,))
        flying: deque[IoOp] = deque()
        begin = now = time.perf_counter()
        moved = 0
        while flying or not moved:
            going = now < begin + seconds
            while len(flying) < IN_FLIGHT and (going or not (flying or moved)):
                verb = self._transfers.read if next(turns) == "read" else self._transfers.write
                offset = offsets[self._turn % len(offsets)]
                flying.append(verb(self._address(self._turn), TRANSFER_BYTES, offset))
                self._turn += 1
            flying.popleft().wait()
            moved += TRANSFER_BYTES
            now = time.perf_counter()
        return moved / (now - begin)

    def _address(self, turn: int) -> int:
        return self._arena.address + turn % IN_FLIGHT * TRANSFER_BYTES


@contextmanager
def _open_disk(
    paths: Sequence[str], area_bytes: int, tell: Callable[[str], None]
) -> Iterator[_Disk]:
    area_bytes = min(area_bytes, total_free_bytes(paths) // 2) // TRANSFER_BYTES * TRANSFER_BYTES
    area_bytes = max(area_bytes, TRANSFER_BYTES)
    engine, notes = make_io_engine("auto", len(paths))
    scratch: ScratchFile | None = None
    transfers: Transfers | None = None
    arena = Arena(IN_FLIGHT * TRANSFER_BYTES)
    try:
        scratch = ScratchFile(paths, Ledger({}), Account.FILE)
        scratch.balance(engine, area_bytes)
        scratch.reserve(area_bytes)
        transfers = Transfers(engine, scratch)
        engine.register(arena)
        for note in (*notes, *scratch.notes):
            tell(f"note: {note}")
        # Not zeros, which some disks do not write.
        content = torch.from_dlpack(arena.export(0, arena.nbytes))  # type: ignore[attr-defined]
        content.random_(0, 256, generator=torch.Generator().manual_seed(0))
        disk = _Disk(transfers, arena, area_bytes)
        disk.fill()
        yield disk
    finally:
        if transfers is not None:
            transfers.close()
        engine.close()
        if scratch is not None:
            scratch.close()
