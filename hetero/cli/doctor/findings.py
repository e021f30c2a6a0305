"""What the facts mean: a finding for each thing that is looked at, and what to do about it."""

from __future__ import annotations

import enum
import errno
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from hetero.cli.extras import install_line
from hetero.text_table import columns, terminal_width
from offload.disk.directories import IN_RAM
from offload.memory.sizes import format_bytes

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs")
_LEAST_FREE_BYTES = 1 << 30
_FEW_FREE_BYTES = 20 << 30
_SLOW_BYTES_PER_S = 1e9  # any NVMe disk reads and writes faster
_STATE_BYTES_PER_PARAM = 14  # bf16 parameter and gradient, and AdamW's state of 10
_UNLIMITED = "ulimit -l unlimited (in a container: docker run --ulimit memlock=-1)"


class Level(str, enum.Enum):
    """How much a finding matters.

    OK: as it should be. NOTE: hetero works, but slower, with less memory, or without something.
    PROBLEM: training as asked for would fail, or would not do what it is for.
    """

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
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


def examine(facts: Facts) -> list[Finding]:
    """The findings, in the order in which they are shown."""
    return [
        *of_software(facts.software),
        *of_cpu(facts.cpu),
        *of_memory(facts.memory),
        of_io_uring(facts.io_uring),
        of_locked_memory(facts.locked_memory),
        *(finding for folder in facts.folders for finding in of_folder(folder)),
        *of_device(facts.device),
    ]


def of_software(facts: SoftwareFacts) -> Iterator[Finding]:
    """What hetero runs with, and each extra."""

    def listed(versions: Mapping[str, str | None]) -> str:
        return ", ".join(f"{package} {version}" for package, version in versions.items())

    yield Finding("versions", listed(facts.versions))
    for extra, packages in facts.extras.items():
        missing = [package for package, version in packages.items() if version is None]
        if missing:
            fact = f"missing: {', '.join(missing)}"
            yield Finding(f"extra {extra}", fact, Level.NOTE, install_line(extra))
        else:
            yield Finding(f"extra {extra}", listed(packages))


def of_cpu(facts: CpuFacts) -> Iterator[Finding]:
    """The processors that updates run on, their instruction set, and the nodes of their memory."""
    usable = f"{facts.usable_cpus} of {facts.cpus} CPUs ({facts.architecture})"
    yield Finding("processors", f"{usable}, by affinity and quota")
    best = facts.available_isas[0]
    fact = f"{facts.isa} (this machine and build have {', '.join(facts.available_isas)})"
    level, fix = Level.NOTE, "unset HETERO_ISA"
    if facts.isa != best:
        fact += f"; {'HETERO_ISA' if facts.forced_isa else 'set_isa()'} chose it"
    elif best == "scalar":
        fact += f": this build has no vector kernels for this {facts.architecture}"
        fix = "updates are slow here; use a machine with AVX2, AVX-512 or NEON"
    else:
        level, fix = Level.OK, ""
    yield Finding("update kernels", fact, level, fix)
    if facts.numa_nodes < 2:
        yield Finding("NUMA", "one node")
    elif facts.memory_policy:
        yield Finding("NUMA", f"{facts.numa_nodes} nodes; memory is spread over them")
    else:
        yield Finding(
            "NUMA",
            f"{facts.numa_nodes} nodes, but this process may not choose where its memory lies",
            Level.NOTE,
            "in a container: docker run --cap-add SYS_NICE",
        )


def of_memory(facts: MemoryFacts) -> Iterator[Finding]:
    """What this process may have of RAM, and huge pages, which hetero asks for by madvise()."""
    version = facts.cgroup_version
    groups = "no control groups" if version is None else f"control groups version {version}"
    fact = f"{format_bytes(facts.ram_bytes)} of RAM"
    fact += f", {format_bytes(facts.available_bytes)} of it available"
    if facts.allowed_bytes is None or facts.allowed_bytes >= facts.ram_bytes:
        yield Finding("memory", f"{fact}, all of it allowed ({groups})")
    else:
        yield Finding(
            "memory",
            f"{fact}, but this process is ended if it takes more than"
            f" {format_bytes(facts.allowed_bytes)} ({groups}, or ulimit -v)",
            Level.NOTE,
            "keep within it: hetero train --process-memory auto",
        )
    chosen = facts.huge_pages
    if chosen in ("always", "madvise"):
        yield Finding("huge pages", f"transparent huge pages: {chosen}")
    else:
        none = "this kernel has no transparent huge pages"
        yield Finding(
            "huge pages",
            f"{none if chosen is None else f'set to {chosen!r}'}: updates and transfers take more"
            " time for addresses",
            Level.NOTE,
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


def of_io_uring(facts: IoUringFacts) -> Finding:
    """Whether the ring can be made, and if not, who refuses it."""
    code, without = facts.refused_errno, "all I/O is done by threads, which cost more CPU time"
    if facts.liburing is None:
        fact = f"hetero was built without liburing: {without}"
        fix = "apt-get install liburing-dev pkg-config, then build hetero again"
        return Finding("io_uring", fact, Level.NOTE, fix)
    if code is None:
        return Finding("io_uring", f"works on Linux {facts.kernel}, by liburing {facts.liburing}")
    fact = f"Linux {facts.kernel} refuses it ({os.strerror(code)}): {without}"
    fix = "look into the kernel's log: dmesg | tail"
    if facts.disabled:
        fact += f"; kernel.io_uring_disabled is {facts.disabled}"
        fix = "sudo sysctl kernel.io_uring_disabled=0"
    elif facts.seccomp and code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        fact += "; a seccomp filter is on this process, as in most containers"
        fix = (
            "allow io_uring_setup, io_uring_enter and io_uring_register: docker run --security-opt"
            " seccomp=unconfined, or a profile of your own"
        )
    elif code == errno.ENOMEM:
        fact, fix = f"{fact}; too little memory may be locked", "ulimit -l unlimited"
    elif code == errno.ENOSYS:
        fix = "use Linux 5.19 or newer, with CONFIG_IO_URING"
    return Finding("io_uring", fact, Level.NOTE, fix)


def of_locked_memory(facts: LockedMemoryFacts) -> Finding:
    """Whether buffers can be registered with io_uring, which RLIMIT_MEMLOCK limits."""
    limit = "unlimited" if facts.limit_bytes is None else format_bytes(facts.limit_bytes)
    fact, trial = f"RLIMIT_MEMLOCK is {limit}", format_bytes(facts.trial_bytes)
    if facts.exempt and facts.limit_bytes is not None:
        fact += ", from which this process is exempt (CAP_IPC_LOCK)"
    if facts.registered is None:
        return Finding("locked memory", f"{fact}; it matters for io_uring alone")
    if facts.registered:
        return Finding("locked memory", f"{fact}; io_uring took a registered buffer of {trial}")
    fact += f"; io_uring refused a registered buffer of {trial}, so each transfer pins its pages"
    return Finding("locked memory", f"{fact} anew", Level.NOTE, _UNLIMITED)


def of_folder(facts: FolderFacts) -> Iterator[Finding]:
    """A single finding if no file can be made there."""
    path, kind = facts.path, facts.filesystem
    if facts.error is not None:
        yield Finding(
            f"folder {path}",
            f"no state file can be made there: {facts.error}",
            Level.PROBLEM,
            f"mkdir -p {path}, or name another folder: hetero doctor --nvme-path DIR",
        )
        return
    level, fact, fix = Level.NOTE, f"{kind} on {facts.source}", ""
    if kind in IN_RAM:
        level, fact = Level.PROBLEM, f"{kind}: files there are RAM themselves, so state that goes"
        fact += " there frees none"
        fix = "name a folder on an NVMe disk: hetero train --nvme-path DIR (which refuses this one"
        fix += " without --allow-ram-filesystem)"
    elif kind == "overlay":
        fact = "overlay: a container's own layer, whose files go with it"
        fix = "mount a folder of an NVMe disk: docker run -v /nvme:/nvme"
    elif kind in NETWORK or kind.startswith("fuse"):
        fact = f"{kind} of {facts.source}: not a disk of this machine"
        fix = "name a folder on a local NVMe disk: hetero train --nvme-path DIR"
    yield Finding(f"filesystem {path}", fact, level if fix else Level.OK, fix)
    billions = facts.free_bytes / _STATE_BYTES_PER_PARAM / 1e9
    fact = f"{format_bytes(facts.free_bytes)}: all state of {billions:.2g} billion parameters with"
    fact += f" AdamW, at {_STATE_BYTES_PER_PARAM} bytes each"
    few, level = facts.free_bytes < _FEW_FREE_BYTES, Level.OK
    if few:
        level = Level.PROBLEM if facts.free_bytes < _LEAST_FREE_BYTES else Level.NOTE
    fix = f"free some (du -xh {path} | sort -h | tail), or name a folder on a larger disk"
    yield Finding(f"free space {path}", fact, level, fix if few else "")
    if facts.direct_io:
        fact = f"{kind} has it: transfers go past the page cache"
        yield Finding(f"O_DIRECT {path}", fact)
    else:
        yield Finding(
            f"O_DIRECT {path}",
            f"{kind} has none: state goes through the page cache, which takes RAM and CPU time",
            Level.NOTE,
            "name a folder on ext4 or xfs: hetero train --nvme-path DIR",
        )
    read, write = facts.read_bytes_per_s, facts.write_bytes_per_s
    if read is None or write is None:
        return
    fact = f"{read / 1e9:.2f} GB/s reading, {write / 1e9:.2f} GB/s writing"
    if min(read, write) >= _SLOW_BYTES_PER_S:
        yield Finding(f"disk speed {path}", fact)
        return
    yield Finding(
        f"disk speed {path}",
        f"{fact}: slower than an NVMe disk is, {_SLOW_BYTES_PER_S / 1e9:.0f} GB/s at the least",
        Level.NOTE,
        "look what the disk is (lsblk -o NAME,ROTA,TRAN,MODEL), and give --nvme-path once for each"
        " of several disks",
    )


def of_device(facts: DeviceFacts) -> Iterator[Finding]:
    """Whether torch sees the GPUs that there are, and how they and ranks exchange bytes."""
    level, fix = Level.NOTE, ""
    there = "NVIDIA's driver is there"
    if facts.devices:
        each = ", ".join(f"{device} ({format_bytes(size)})" for device, size in facts.devices)
        level, fact = Level.OK, f"{each}, CUDA {facts.torch_cuda}"
    elif not facts.driver:
        level, fact = Level.OK, "no NVIDIA driver: models compute on the CPU"
    elif facts.torch_cuda is None:
        fact = f"{there}, but this torch is built without CUDA: models compute on the CPU"
        fix = "install a build of torch for CUDA"
    elif facts.hidden:
        fact = f"{there}, and CUDA_VISIBLE_DEVICES hides its devices: models compute on the CPU"
        fix = "unset CUDA_VISIBLE_DEVICES, if that is not meant"
    else:
        level = Level.PROBLEM
        fact = f"{there} and torch is built for CUDA {facts.torch_cuda}, but torch sees no device"
        fix = "nvidia-smi says what the driver sees; in a container: docker run --gpus all"
    yield Finding("GPU", fact, level, fix)
    if not facts.devices:
        yield Finding("page-locked RAM", "not needed without a GPU")
    elif facts.page_locking is None:
        yield Finding("page-locked RAM", "CUDA page-locks RAM for copies")
    else:
        fact = f"CUDA refused to page-lock RAM: {facts.page_locking}"
        yield Finding("page-locked RAM", fact, Level.PROBLEM, _UNLIMITED)
    if not facts.gloo:
        fact = "torch.distributed has no gloo: several ranks cannot train together"
        fix = "install a build of torch with torch.distributed"
        yield Finding("collectives", fact, Level.PROBLEM, fix)
    elif len(facts.devices) > 1 and not facts.nccl:
        fact = "gloo, no NCCL: shards of several GPUs go through RAM"
        fix = "install a build of torch for CUDA with NCCL"
        yield Finding("collectives", fact, Level.NOTE, fix)
    else:
        yield Finding("collectives", "gloo and NCCL" if facts.nccl else "gloo")


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
