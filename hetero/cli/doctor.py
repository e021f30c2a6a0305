"""`hetero doctor`: facts of this machine, and a finding for each thing that is looked at.

Facts are plain data, which tests make up as they like, and say by themselves what follows of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import errno
import importlib.metadata
import json
import os
import platform
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

import hetero
from hetero.cli.extras import EXTRAS, install_line
from hetero.cli.outcome import EXIT_FAILED, EXIT_OK
from hetero.text_table import columns, terminal_width
from offload import _native
from offload.device.cuda_backend import cuda_available
from offload.device.nccl import has_nccl
from offload.disk.directories import IN_RAM, check_directory, free_bytes, mounted_at
from offload.errors import HeteroError
from offload.memory.process_memory import allowed_bytes
from offload.memory.sizes import format_bytes
from offload.profile.measure import measure_disk

_TRIAL_BYTES = 64 << 20  # more than the 8 MiB that many systems allow
_AREA_BYTES = 256 << 20  # written and read again by a measurement
_WINDOW_S = 0.3
_CAP_IPC_LOCK = 14  # capabilities(7); its number is in linux/capability.h
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs")
_LEAST_FREE_BYTES = 1 << 30
_FEW_FREE_BYTES = 20 << 30
_SLOW_BYTES_PER_S = 1e9  # any NVMe disk reads and writes faster
_STATE_BYTES_PER_PARAM = 14  # bf16 parameter and gradient, and AdamW's state of 10
_UNLIMITED = "ulimit -l unlimited (in a container: docker run --ulimit memlock=-1)"


def run(arguments: argparse.Namespace) -> int:
    """Gathers facts, checks them and prints the findings; returns 1 if one is a problem."""

    def tell(text: str) -> None:
        print(f"hetero doctor: {text}", file=sys.stderr)

    # Under --json nothing else may reach stdout, whatever a library prints.
    with contextlib.redirect_stdout(sys.stderr):
        facts = gather(arguments.nvme_path or ["."], not arguments.no_disk_speed, tell)
        findings = list(facts.findings())
    healthy = all(finding.level is not Level.PROBLEM for finding in findings)
    if arguments.json:
        found = {"ok": healthy, "findings": [finding._asdict() for finding in findings]}
        print(json.dumps({**found, "facts": dataclasses.asdict(facts)}))
    else:
        show(findings)
    return EXIT_OK if healthy else EXIT_FAILED


class Level(str, enum.Enum):
    """How much a finding matters.

    OK: as it should be. NOTE: hetero works, but slower, with less memory, or without something.
    PROBLEM: training as asked for would fail, or would not do what it is for.
    """

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        name: of what was looked at.
        fact: what is so, with its numbers.
        level: how much it matters.
        fix: what to do about it, a command line where there is one; "" if there is nothing to do.
    """

    name: str
    fact: str
    level: Level = Level.OK
    fix: str = ""


def _found(name: str, fact: str, fix: str = "", problem: bool = False) -> Finding:
    """A finding with something to do about it is a note, if it is no problem."""
    level = Level.PROBLEM if problem else Level.NOTE if fix else Level.OK
    return Finding(name, fact, level, fix)


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions of what is installed: of what hetero cannot do without, and of each extra's
    packages, None for one that is missing."""

    versions: Mapping[str, str]
    extras: Mapping[str, Mapping[str, str | None]]

    def findings(self) -> Iterator[Finding]:
        """The versions, and each extra."""

        def listed(versions: Mapping[str, str | None]) -> str:
            return ", ".join(f"{package} {version}" for package, version in versions.items())

        yield _found("versions", listed(self.versions))
        for extra, packages in self.extras.items():
            missing = [package for package, version in packages.items() if version is None]
            fact = f"missing: {', '.join(missing)}" if missing else listed(packages)
            yield _found(f"extra {extra}", fact, install_line(extra) if missing else "")


@dataclass(frozen=True)
class CpuFacts:
    """Processors that updates run on."""

    architecture: str
    cpus: int
    usable_cpus: int  # after affinity and quota
    isa: str  # the instruction set of the update kernels
    available_isas: tuple[str, ...]  # those that this machine runs, best first
    forced_isa: str | None  # HETERO_ISA
    numa_nodes: int  # on whose CPUs this process may run; 0 if that is not known

    def findings(self) -> Iterator[Finding]:
        """The processors, their instruction set, and the nodes of their memory."""
        usable = f"{self.usable_cpus} of {self.cpus} CPUs ({self.architecture})"
        yield _found("processors", f"{usable}, by affinity and quota")
        fact = f"{self.isa} (this machine and build have {', '.join(self.available_isas)})"
        fix = ""
        if self.isa != self.available_isas[0]:
            fact += f"; {'HETERO_ISA' if self.forced_isa else 'set_isa()'} chose it"
            fix = "unset HETERO_ISA"
        elif self.isa == "scalar":
            fact += f": this build has no vector kernels for this {self.architecture}"
            fix = "updates are slow here; use a machine with AVX2, AVX-512 or NEON"
        yield _found("update kernels", fact, fix)
        fact, fix = "one node", ""
        if self.numa_nodes > 1:
            fact = f"{self.numa_nodes} nodes; memory lies where the thread is that first touches it"
            fix = (
                "start a rank for each node by numactl --cpunodebind=N --membind=N, or one for all "
                "by numactl --interleave=all"
            )
        yield _found("NUMA", fact, fix)


@dataclass(frozen=True)
class MemoryFacts:
    """RAM, and how much of it this process may have."""

    ram_bytes: int
    available_bytes: int
    allowed_bytes: int | None  # None: no limit
    cgroup_version: int | None  # 1 or 2; None: no control groups
    huge_pages: str | None  # the chosen word of transparent_hugepage/enabled; None: no such file

    def findings(self) -> Iterator[Finding]:
        """RAM, and huge pages, which hetero asks for by madvise()."""
        version, allowed = self.cgroup_version, self.allowed_bytes
        groups = "no control groups" if version is None else f"control groups version {version}"
        fact = f"{format_bytes(self.ram_bytes)} of RAM"
        fact += f", {format_bytes(self.available_bytes)} of it available"
        if allowed is None or allowed >= self.ram_bytes:
            yield _found("memory", f"{fact}, all of it allowed ({groups})")
        else:
            fact += f", but this process is ended if it takes more than {format_bytes(allowed)}"
            fix = "keep within it: hetero train --process-memory auto"
            yield _found("memory", f"{fact} ({groups}, or ulimit -v)", fix)
        fact, fix = f"transparent huge pages: {self.huge_pages}", ""
        if self.huge_pages not in ("always", "madvise"):
            fact = "this kernel has no transparent huge pages"
            if self.huge_pages is not None:
                fact = f"set to {self.huge_pages!r}"
            fact += ": updates and transfers take more time for addresses"
            fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield _found("huge pages", fact, fix)


@dataclass(frozen=True)
class IoUringFacts:
    """The kernel's io_uring, as hetero's engine meets it."""

    kernel: str  # its release
    liburing: str | None  # the version that the native core was built with; None: without
    refused_errno: int | None  # why a ring could not be made; None: it could
    disabled: int | None  # the setting kernel.io_uring_disabled; None: this kernel has none
    seccomp: bool  # a filter of system calls is on this process

    def findings(self) -> Iterator[Finding]:
        """Whether the ring can be made, and if not, who refuses it."""
        code, without = self.refused_errno, "all I/O is done by threads, which cost more CPU time"
        fact = f"Linux {self.kernel} refuses it ({os.strerror(code or 0)}): {without}"
        fix = "look into the kernel's log: dmesg | tail"
        if self.liburing is None:
            fact = f"hetero was built without liburing: {without}"
            fix = "apt-get install liburing-dev pkg-config, then build hetero again"
        elif code is None:
            fact, fix = f"works on Linux {self.kernel}, by liburing {self.liburing}", ""
        elif self.disabled:
            fact += f"; kernel.io_uring_disabled is {self.disabled}"
            fix = "sudo sysctl kernel.io_uring_disabled=0"
        elif self.seccomp and code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            fact += "; a seccomp filter is on this process, as in most containers"
            fix = "allow io_uring_setup, io_uring_enter and io_uring_register: docker run"
            fix += " --security-opt seccomp=unconfined, or a profile of your own"
        elif code == errno.ENOMEM:
            fact, fix = f"{fact}; too little memory may be locked", "ulimit -l unlimited"
        elif code == errno.ENOSYS:
            fix = "use Linux 5.19 or newer, with CONFIG_IO_URING"
        yield _found("io_uring", fact, fix)


@dataclass(frozen=True)
class LockedMemoryFacts:
    """How much memory this process may lock."""

    limit_bytes: int | None  # None: no limit
    exempt: bool  # it has CAP_IPC_LOCK, so that the limit is none
    trial_bytes: int
    registered: bool | None  # io_uring took `trial_bytes` as a buffer; None: there is no ring

    def findings(self) -> Iterator[Finding]:
        """Whether buffers can be registered with io_uring, which RLIMIT_MEMLOCK limits."""
        limit = "unlimited" if self.limit_bytes is None else format_bytes(self.limit_bytes)
        fact, buffer = f"RLIMIT_MEMLOCK is {limit}", f"buffer of {format_bytes(self.trial_bytes)}"
        if self.exempt and self.limit_bytes is not None:
            fact += ", from which this process is exempt (CAP_IPC_LOCK)"
        if self.registered is None:
            fact += "; it matters for io_uring alone"
        elif self.registered:
            fact += f"; io_uring took a registered {buffer}"
        else:
            fact += (
                f"; io_uring refused a registered {buffer}, so each transfer pins its pages anew"
            )
        yield _found("locked memory", fact, _UNLIMITED if self.registered is False else "")


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

    def findings(self) -> Iterator[Finding]:
        """A single finding if no file can be made there."""
        path, kind, free = self.path, self.filesystem, self.free_bytes
        if self.error is not None:
            fact = f"no state file can be made there: {self.error}"
            fix = f"mkdir -p {path}, or name another folder: hetero doctor --nvme-path DIR"
            yield _found(f"folder {path}", fact, fix, problem=True)
            return
        fact, fix = f"{kind} on {self.source}", ""
        if kind in IN_RAM:
            fact = f"{kind}: files there are RAM themselves, so state that goes there frees none"
            fix = "name a folder on an NVMe disk: hetero train --nvme-path DIR (which refuses this"
            fix += " one without --allow-ram-filesystem)"
        elif kind == "overlay":
            fact = "overlay: a container's own layer, whose files go with it"
            fix = "mount a folder of an NVMe disk: docker run -v /nvme:/nvme"
        elif kind in _NETWORK or kind.startswith("fuse"):
            fact = f"{kind} of {self.source}: not a disk of this machine"
            fix = "name a folder on a local NVMe disk: hetero train --nvme-path DIR"
        yield _found(f"filesystem {path}", fact, fix, problem=kind in IN_RAM)
        billions = free / _STATE_BYTES_PER_PARAM / 1e9
        fact = f"{format_bytes(free)}: all state of {billions:.2g} billion parameters with AdamW,"
        fact += f" at {_STATE_BYTES_PER_PARAM} bytes each"
        fix = f"free some (du -xh {path} | sort -h | tail), or name a folder on a larger disk"
        fix = fix if free < _FEW_FREE_BYTES else ""
        yield _found(f"free space {path}", fact, fix, problem=free < _LEAST_FREE_BYTES)
        fact, fix = f"{kind} has it: transfers go past the page cache", ""
        if not self.direct_io:
            fact = f"{kind} has none: state goes through the page cache, which takes RAM and CPU"
            fact, fix = f"{fact} time", "name a folder on ext4 or xfs: hetero train --nvme-path DIR"
        yield _found(f"O_DIRECT {path}", fact, fix)
        read, write = self.read_bytes_per_s, self.write_bytes_per_s
        if read is None or write is None:
            return
        fact, fix = f"{read / 1e9:.2f} GB/s reading, {write / 1e9:.2f} GB/s writing", ""
        if min(read, write) < _SLOW_BYTES_PER_S:
            least = f"{_SLOW_BYTES_PER_S / 1e9:.0f} GB/s at the least"
            fact += f": slower than an NVMe disk is, {least}"
            fix = "look what the disk is (lsblk -o NAME,ROTA,TRAN,MODEL), and give --nvme-path once"
            fix += " for each of several disks"
        yield _found(f"disk speed {path}", fact, fix)


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

    def findings(self) -> Iterator[Finding]:
        """Whether torch sees the GPUs that there are, and how they and ranks exchange bytes."""
        there, problem, fix = "NVIDIA's driver is there", False, ""
        if self.devices:
            each = ", ".join(f"{device} ({format_bytes(size)})" for device, size in self.devices)
            fact = f"{each}, CUDA {self.torch_cuda}"
        elif not self.driver:
            fact = "no NVIDIA driver: models compute on the CPU"
        elif self.torch_cuda is None:
            fact = f"{there}, but this torch is built without CUDA: models compute on the CPU"
            fix = "install a build of torch for CUDA"
        elif self.hidden:
            fact = f"{there}, and CUDA_VISIBLE_DEVICES hides its devices: models compute on the CPU"
            fix = "unset CUDA_VISIBLE_DEVICES, if that is not meant"
        else:
            fact = (
                f"{there} and torch is built for CUDA {self.torch_cuda}, but torch sees no device"
            )
            fix = "nvidia-smi says what the driver sees; in a container: docker run --gpus all"
            problem = True
        yield _found("GPU", fact, fix, problem)
        if not self.devices:
            yield _found("page-locked RAM", "not needed without a GPU")
        elif self.page_locking is None:
            yield _found("page-locked RAM", "CUDA page-locks RAM for copies")
        else:
            fact = f"CUDA refused to page-lock RAM: {self.page_locking}"
            yield _found("page-locked RAM", fact, _UNLIMITED, problem=True)
        fact, fix = "gloo and NCCL" if self.nccl else "gloo", ""
        if not self.gloo:
            fact = "torch.distributed has no gloo: several ranks cannot train together"
            fix = "install a build of torch with torch.distributed"
        elif len(self.devices) > 1 and not self.nccl:
            fact = "gloo, no NCCL: shards of several GPUs go through RAM"
            fix = "install a build of torch for CUDA with NCCL"
        yield _found("collectives", fact, fix, problem=not self.gloo)


@dataclass(frozen=True)
class Facts:
    """All of them, in the order in which they are shown."""

    software: SoftwareFacts
    cpu: CpuFacts
    memory: MemoryFacts
    io_uring: IoUringFacts
    locked_memory: LockedMemoryFacts
    folders: tuple[FolderFacts, ...]
    device: DeviceFacts

    def findings(self) -> Iterator[Finding]:
        """Those of all facts."""
        for each in (self.software, self.cpu, self.memory, self.io_uring, self.locked_memory):
            yield from each.findings()
        for folder in self.folders:
            yield from folder.findings()
        yield from self.device.findings()


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
    version = 2 if (groups / "cgroup.controllers").exists() else 1
    return Facts(
        SoftwareFacts(versions, extras),
        CpuFacts(
            architecture=platform.machine(),
            cpus=os.cpu_count() or 1,
            usable_cpus=_native.usable_cpus(),
            isa=_native.isa(),
            available_isas=tuple(_native.isa_available()),
            forced_isa=os.environ.get("HETERO_ISA"),
            numa_nodes=_numa_nodes(root),
        ),
        MemoryFacts(
            ram_bytes=memory.total,
            available_bytes=memory.available,
            allowed_bytes=allowed_bytes(),
            cgroup_version=version if groups.exists() else None,
            huge_pages=huge.partition("[")[2].partition("]")[0] if huge else None,
        ),
        uring,
        locked,
        tuple(_folder(path, measure, tell, root) for path in paths),
        _device(root),
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


def _numa_nodes(root: Path) -> int:
    cpus = os.sched_getaffinity(0)
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    return sum(any((node / f"cpu{cpu}").exists() for cpu in cpus) for node in nodes)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


# For people

_COLOURS = {Level.OK: "32", Level.NOTE: "33", Level.PROBLEM: "1;31"}  # of ECMA-48
_LEVEL_WIDTH = 7


def lines(findings: Sequence[Finding], width: int) -> list[str]:
    """Plain text of at most `width` columns, as far as words allow; the last says how many there
    are of each level."""
    rows = []
    for finding in findings:
        rows.append((finding.level.value.ljust(_LEVEL_WIDTH), finding.name, finding.fact))
        if finding.fix:
            rows.append(("", "", f"-> {finding.fix}"))
    counts = Counter(finding.level for finding in findings)
    words = [
        f"{counts[level]} {level.value}{'' if level is Level.OK or counts[level] == 1 else 's'}"
        for level in Level
    ]
    return [*columns(rows, width), "", ", ".join(words)]


def show(findings: Sequence[Finding]) -> None:
    """Prints them on stdout, in colours where that is a terminal."""
    for line in lines(findings, terminal_width()):
        level = next((each for each in Level if line.startswith(f"{each.value} ")), None)
        if level is not None and sys.stdout.isatty():
            line = f"\033[{_COLOURS[level]}m{line[:_LEVEL_WIDTH]}\033[0m{line[_LEVEL_WIDTH:]}"
        print(line)
