"""Gathers the facts: what the checks judge, as this machine and process have it now."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import hetero
from hetero.cli.doctor.facts import (
    CpuFacts,
    DeviceFacts,
    Facts,
    FolderFacts,
    IoUringFacts,
    LockedMemoryFacts,
    MemoryFacts,
    SoftwareFacts,
)
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


def gather(
    paths: Sequence[str], measure: bool, tell: Callable[[str], None], root: Path = Path("/")
) -> Facts:
    """The facts of this machine and of the folders `paths`.

    `measure`: write and read up to 256 MiB in each folder, for some seconds. `tell` gets a line for
    what is being done. `root` is put before /proc and /sys.
    """
    status = _status(root / "proc/self/status")
    uring, locked = _io_uring(root, status)
    return Facts(
        io_uring=uring,
        locked_memory=locked,
        folders=tuple(_folder(path, measure, tell, root) for path in paths),
        memory=_memory(root),
        cpu=_cpu(),
        device=_device(root),
        software=_software(),
    )


def _io_uring(root: Path, status: dict[str, str]) -> tuple[IoUringFacts, LockedMemoryFacts]:
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
    capabilities = int(status.get("CapEff", "0"), 16)
    return (
        IoUringFacts(
            kernel=platform.release(),
            liburing=_native.build_info()["liburing"],
            refused_errno=refused,
            disabled=int(disabled) if disabled else None,
            seccomp=status.get("Seccomp", "0") != "0",
        ),
        LockedMemoryFacts(
            limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
            exempt=bool(capabilities >> _CAP_IPC_LOCK & 1),
            trial_bytes=_TRIAL_BYTES,
            registered=registered,
        ),
    )


def _folder(path: str, measure: bool, tell: Callable[[str], None], root: Path) -> FolderFacts:
    try:
        check_directory(path, allow_ram_filesystem=True)
        kind, source = mounted_at(Path(path).resolve(), root / "proc/self/mountinfo")
        direct, free = _has_direct_io(path), free_bytes(path)
        rates: dict[str, float] = {}
        if measure and free > 2 * _AREA_BYTES:
            tell(f"measuring the disk of {path}")
            rates = measure_disk([path], tell, area_bytes=_AREA_BYTES, window_s=_WINDOW_S, rounds=1)
    except (HeteroError, OSError) as error:
        return FolderFacts(path, error=str(error))
    return FolderFacts(
        path,
        error=None,
        filesystem=kind,
        source=source,
        direct_io=direct,
        free_bytes=free,
        read_bytes_per_s=rates.get("read"),
        write_bytes_per_s=rates.get("write"),
    )


def _has_direct_io(path: str) -> bool:
    """Whether a file there can be opened with O_DIRECT."""
    with tempfile.NamedTemporaryFile(dir=path, prefix="hetero-") as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
        except OSError:
            return False
    return True


def _memory(root: Path) -> MemoryFacts:
    memory = psutil.virtual_memory()
    huge = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    groups = root / "sys/fs/cgroup"
    version = 2 if (groups / "cgroup.controllers").exists() else 1 if groups.exists() else None
    return MemoryFacts(
        ram_bytes=memory.total,
        available_bytes=memory.available,
        allowed_bytes=allowed_bytes(),
        cgroup_version=version,
        huge_pages=huge.partition("[")[2].partition("]")[0] if huge else None,
    )


def _cpu() -> CpuFacts:
    return CpuFacts(
        architecture=platform.machine(),
        cpus=os.cpu_count() or 1,
        usable_cpus=_native.usable_cpus(),
        isa=_native.isa(),
        available_isas=tuple(_native.isa_available()),
        forced_isa=os.environ.get("HETERO_ISA"),
        numa_nodes=_native.numa.count(),
        memory_policy=_native.numa.has_memory_policy(),
    )


def _device(root: Path) -> DeviceFacts:
    devices: list[tuple[str, int]] = []
    page_locking = None
    if cuda_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            devices.append((about.name, about.total_memory))
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


def _software() -> SoftwareFacts:
    extras = {extra: {name: _version(name) for name in names} for extra, names in EXTRAS.items()}
    versions = {"hetero": hetero.__version__, "Python": platform.python_version()}
    versions |= {name: _version(name) or "missing" for name in ("torch", "numpy", "psutil")}
    return SoftwareFacts(versions, extras)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _status(path: Path) -> dict[str, str]:
    """The lines of /proc/self/status."""
    lines = (_text(path) or "").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
