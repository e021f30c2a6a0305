"""The facts that the checks judge: plain data, which tests make up as they like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class IoUringFacts:
    """The kernel's io_uring, as hetero's engine meets it.

    Attributes:
        kernel: its release.
        liburing: the version that the native core was built with; None: without.
        refused_errno: why a ring could not be made; None: it could.
        disabled: the setting kernel.io_uring_disabled; None: this kernel has none.
        seccomp: whether a filter of system calls is on this process.
    """

    kernel: str
    liburing: str | None
    refused_errno: int | None
    disabled: int | None
    seccomp: bool


@dataclass(frozen=True)
class LockedMemoryFacts:
    """How much memory this process may lock: `limit_bytes`, None without a limit.

    `exempt`: it has CAP_IPC_LOCK, so that the limit is none. `registered`: whether io_uring took
    `trial_bytes` of RAM as a registered buffer; None: there is no ring to try it with.
    """

    limit_bytes: int | None
    exempt: bool
    trial_bytes: int
    registered: bool | None


@dataclass(frozen=True)
class FolderFacts:
    """A folder for state files.

    Attributes:
        path: as it was given.
        error: why no file can be made there; None: one can, and the rest is known.
        filesystem: its type, as the kernel names it.
        source: the device, or what the filesystem is mounted from.
        direct_io: whether it knows O_DIRECT.
        free_bytes: what this user may still write.
        read_bytes_per_s, write_bytes_per_s: O_DIRECT, in large transfers, by hetero's own engine;
            None where they were not measured.
    """

    path: str
    error: str | None
    filesystem: str = "unknown"
    source: str = "unknown"
    direct_io: bool = False
    free_bytes: int = 0
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None


@dataclass(frozen=True)
class MemoryFacts:
    """RAM, and how much of it this process may have: `allowed_bytes`, None without a limit.

    `cgroup_version` is 1, 2, or None without control groups; `huge_pages` is what is chosen in
    /sys/kernel/mm/transparent_hugepage/enabled, None without that file.
    """

    ram_bytes: int
    available_bytes: int
    allowed_bytes: int | None
    cgroup_version: int | None
    huge_pages: str | None


@dataclass(frozen=True)
class CpuFacts:
    """Processors: `cpus` there are, `usable_cpus` after affinity and quota.

    `isa` is the instruction set of the update kernels, `available_isas` are those that this machine
    runs, best first; `forced_isa` is HETERO_ISA. `numa_nodes` are those this process uses, and
    `memory_policy` says whether it may choose among them.
    """

    architecture: str
    cpus: int
    usable_cpus: int
    isa: str
    available_isas: tuple[str, ...]
    forced_isa: str | None
    numa_nodes: int
    memory_policy: bool


@dataclass(frozen=True)
class DeviceFacts:
    """GPUs, as torch sees them.

    Attributes:
        torch_cuda: the CUDA that torch was built for; None: without.
        driver: whether NVIDIA's driver is there (/dev/nvidiactl).
        hidden: whether CUDA_VISIBLE_DEVICES says which devices programs may see.
        devices: name and bytes of memory of each device.
        page_locking: why RAM could not be page-locked for copies; None: it could, or no device.
        nccl, gloo: whether torch has them for collectives.
    """

    torch_cuda: str | None
    driver: bool
    devices: tuple[tuple[str, int], ...]
    page_locking: str | None
    nccl: bool
    gloo: bool
    hidden: bool = False


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions of what is installed.

    `versions` of hetero and what it cannot do without; `extras` has, for each extra, its packages'
    versions, None for one that is missing.
    """

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
