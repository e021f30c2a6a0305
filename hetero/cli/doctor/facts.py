"""The facts that the findings judge, and how they are gathered: as this machine and process have
them now. They are plain data, which tests make up as they like."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import hetero
from hetero.cli.extras import EXTRAS
from offload import _native
from offload.device.cuda_backend import cuda_available
from offload.device.nccl import has_nccl
from offload.disk.directories import check_directory, free_bytes, mounted_at
from offload.errors import HeteroError
from offload.memory.process_memory import allowed_bytes
from offload.profile.measure import measure_disk

_TRIAL_BYTES = 64 << 20  # more than the 8 MiB that many systems allow
_AREA_BYTES = 256 << 20  # written and read again by a measurement
_WINDOW_S = 0.3
_CAP_IPC_LOCK = 14  # capabilities(7); its number is in linux/capability.h


@dataclass(frozen=True)
class IoUringFacts:
    """The kernel's io_uring, as hetero's engine meets it."""

    kernel: str  # its release
    liburing: str | None  # the version that the native core was built with; None: without
    refused_errno: int | None  # why a ring could not be made; None: it could
    disabled: int | None  # the setting kernel.io_uring_disabled; None: this kernel has none
    seccomp: bool  # a filter of system calls is on this process


@dataclass(frozen=True)
class LockedMemoryFacts:
    """How much memory this process may lock."""

    limit_bytes: int | None  # None: no limit
    exempt: bool  # it has CAP_IPC_LOCK, so that the limit is none
    trial_bytes: int
    registered: bool | None  # io_uring took `trial_bytes` as a buffer; None: there is no ring


@dataclass(frozen=True)
class FolderFacts:
    """A folder for state files."""

    path: str  # as it was given
    error: str | None  # why no file can be made there; None: one can, and the rest is known
    filesystem: str = "unknown"  # its type, as the kernel names it
    source: str = "unknown"  # the device, or what the filesystem is mounted from
    direct_io: bool = False  # it knows O_DIRECT
    free_bytes: int = 0  # what this user may still write
    # O_DIRECT, in large transfers, by hetero's own engine; None: not measured.
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None


@dataclass(frozen=True)
class MemoryFacts:
    """RAM, and how much of it this process may have."""

    ram_bytes: int
    available_bytes: int
    allowed_bytes: int | None  # None: no limit
    cgroup_version: int | None  # 1 or 2; None: no control groups
    huge_pages: str | None  # the chosen word of transparent_hugepage/enabled; None: no such file


@dataclass(frozen=True)
class CpuFacts:
    """Processors."""

    architecture: str
    cpus: int
    usable_cpus: int  # after affinity and quota
    isa: str  # the instruction set of the update kernels
    available_isas: tuple[str, ...]  # those that this machine runs, best first
    forced_isa: str | None  # HETERO_ISA
    numa_nodes: int  # that this process uses
    memory_policy: bool  # it may choose among them


@dataclass(frozen=True)
class DeviceFacts:
    """GPUs, as torch sees them."""

    torch_cuda: str | None  # the CUDA that torch was built for; None: without
    driver: bool  # NVIDIA's is there (/dev/nvidiactl)
    devices: tuple[tuple[str, int], ...]  # name and bytes of memory of each
    page_locking: str | None  # why RAM could not be page-locked; None: it could, or no device
    nccl: bool
    gloo: bool
    hidden: bool = False  # CUDA_VISIBLE_DEVICES says which devices programs may see


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions of what is installed: of what hetero cannot do without, and of each extra's
    packages, None for one that is missing."""

    versions: Mapping[str, str]
    extras: Mapping[str, Mapping[str, str | None]]


@dataclass(frozen=True)
class Facts:
    """All of them."""

    io_uring: IoUringFacts
    locked_memory: LockedMemoryFacts
    folders: tuple[FolderFacts, ...]
    memory: MemoryFacts
    cpu: CpuFacts
    device: DeviceFacts
    software: SoftwareFacts


def gather(
    paths: Sequence[str], measure: bool, tell: Callable[[str], None], root: Path = Path("/")
) -> Facts:
    """The facts of this machine and of the folders `paths`.

    `measure`: write and read up to 256 MiB in each folder, for some seconds. `tell` gets a line for
    what is being done. `root` is put before /proc and /sys.
    """
    uring, locked = _io_uring(root)
    extras = {extra: {name: _version(name) for name in names} for extra, names in EXTRAS.items()}
    versions = {"hetero": hetero.__version__, "Python": platform.python_version()}
    versions |= {name: _version(name) or "missing" for name in ("torch", "numpy", "psutil")}
    memory = psutil.virtual_memory()
    huge = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    groups = root / "sys/fs/cgroup"
    return Facts(
        uring,
        locked,
        tuple(_folder(path, measure, tell, root) for path in paths),
        MemoryFacts(
            ram_bytes=memory.total,
            available_bytes=memory.available,
            allowed_bytes=allowed_bytes(),
            cgroup_version=2
            if (groups / "cgroup.controllers").exists()
            else 1
            if groups.exists()
            else None,
            huge_pages=huge.partition("[")[2].partition("]")[0] if huge else None,
        ),
        CpuFacts(
            architecture=platform.machine(),
            cpus=os.cpu_count() or 1,
            usable_cpus=_native.usable_cpus(),
            isa=_native.isa(),
            available_isas=tuple(_native.isa_available()),
            forced_isa=os.environ.get("HETERO_ISA"),
            numa_nodes=_native.numa.count(),
            memory_policy=_native.numa.has_memory_policy(),
        ),
        _device(root),
        SoftwareFacts(versions, extras),
    )


def _io_uring(root: Path) -> tuple[IoUringFacts, LockedMemoryFacts]:
    lines = (_text(root / "proc/self/status") or "").splitlines()
    status = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    refused, registered = None, None
    try:
        engine = _native.IoEngine("io_uring")
    except OSError as error:
        refused = error.errno
    else:
        arena = _native.Arena(_TRIAL_BYTES)
        registered = engine.register(arena)
        engine.unregister(arena)
        engine.close()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    disabled = _text(root / "proc/sys/kernel/io_uring_disabled")
    exempt = bool(int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1)
    return (
        IoUringFacts(
            kernel=platform.release(),
            liburing=_native.build_info()["liburing"],
            refused_errno=refused,
            disabled=int(disabled) if disabled else None,
            seccomp=status.get("Seccomp", "0") != "0",
        ),
        LockedMemoryFacts(
            None if soft == resource.RLIM_INFINITY else soft, exempt, _TRIAL_BYTES, registered
        ),
    )


def _folder(path: str, measure: bool, tell: Callable[[str], None], root: Path) -> FolderFacts:
    try:
        check_directory(path, allow_ram_filesystem=True)
        mounted = mounted_at(Path(path).resolve(), root / "proc/self/mountinfo")
        direct, free = _has_direct_io(path), free_bytes(path)
        rates: dict[str, float] = {}
        if measure and free > 2 * _AREA_BYTES:
            tell(f"measuring the disk of {path}")
            rates = measure_disk([path], tell, area_bytes=_AREA_BYTES, window_s=_WINDOW_S, rounds=1)
    except (HeteroError, OSError) as error:
        return FolderFacts(path, error=str(error))
    return FolderFacts(path, None, *mounted, direct, free, rates.get("read"), rates.get("write"))


def _has_direct_io(path: str) -> bool:
    """Whether a file there can be opened with O_DIRECT."""
    with tempfile.NamedTemporaryFile(dir=path, prefix="hetero-") as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
        except OSError:
            return False
    return True


def _device(root: Path) -> DeviceFacts:
    devices, page_locking = [], None
    if cuda_available():
        found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        devices = [(about.name, about.total_memory) for about in found]
        try:
            torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            page_locking = str(error).partition("\n")[0]
    return DeviceFacts(
        torch_cuda=torch.version.cuda,
        driver=(root / "dev/nvidiactl").exists(),
        devices=tuple(devices),
        page_locking=page_locking,
        nccl=has_nccl(),
        gloo=dist.is_available() and dist.is_gloo_available(),
        hidden="CUDA_VISIBLE_DEVICES" in os.environ,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
