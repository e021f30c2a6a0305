"""`hetero doctor`: facts of this machine, and a finding for each thing that is looked at.

Findings follow of facts and of nothing else, so that tests can make up a machine.
"""

from __future__ import annotations

import argparse
import contextlib
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

import hetero
from hetero.cli.outcome import EXIT_FAILED, EXIT_OK, EXTRAS, install_line
from hetero.text_table import columns, terminal_width
from offload import _native
from offload.cgroups import usable_cpus
from offload.device.cuda_backend import cuda_available
from offload.device.nccl import has_nccl
from offload.disk.directories import IN_RAM, check_directory, free_bytes, mounted_at
from offload.disk.file_member import open_direct
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
        findings = list(findings_of(facts))
    healthy = all(finding.level is not Level.PROBLEM for finding in findings)
    if arguments.json:
        found = {"ok": healthy, "findings": [finding._asdict() for finding in findings]}
        print(json.dumps({**found, "facts": facts}, default=vars))
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


class Facts(SimpleNamespace):
    """What gather() says of this machine, or of a folder for state files; None: there is none, or
    no limit, or it is not known.

    `exempt`: from `limit_bytes` of locked memory, by CAP_IPC_LOCK. `registered`: io_uring took
    `trial_bytes` as a buffer; None: there is no ring. `hidden`: CUDA_VISIBLE_DEVICES says which of
    the `devices`, names and bytes, are seen. `error`: why no file can be made in a folder.
    """


# What follows of facts


def software(facts: Facts) -> Iterator[Finding]:
    """The versions of what hetero cannot do without, and of each extra's packages."""

    def listed(versions: Mapping[str, str | None]) -> str:
        return ", ".join(f"{package} {version}" for package, version in versions.items())

    yield _found("versions", listed(facts.versions))
    for extra, packages in facts.extras.items():
        missing = [package for package, version in packages.items() if version is None]
        fact = f"missing: {', '.join(missing)}" if missing else listed(packages)
        yield _found(f"extra {extra}", fact, install_line(extra) if missing else "")


def cpu(facts: Facts) -> Iterator[Finding]:
    """The processors that updates run on, their instruction set, and the nodes of their memory."""
    usable = f"{facts.usable_cpus} of {facts.cpus} CPUs ({facts.architecture})"
    yield _found("processors", f"{usable}, by affinity and quota")
    fact, fix = f"{facts.isa} (this machine and build have {', '.join(facts.available_isas)})", ""
    if facts.isa != facts.available_isas[0]:
        fact += f"; {'HETERO_ISA' if facts.forced_isa else 'set_isa()'} chose it"
        fix = "unset HETERO_ISA"
    elif facts.isa == "scalar":
        fact += f": this build has no vector kernels for this {facts.architecture}"
        fix = "updates are slow here; use a machine with AVX2, AVX-512 or NEON"
    yield _found("update kernels", fact, fix)
    fact, fix = "one node", ""
    if facts.numa_nodes > 1:
        fact = f"{facts.numa_nodes} nodes; memory lies where the thread is that first touches it"
        fix = "start a rank for each node by numactl --cpunodebind=N --membind=N, or one for all by"
        fix += " numactl --interleave=all"
    yield _found("NUMA", fact, fix)


def memory(facts: Facts) -> Iterator[Finding]:
    """RAM, how much of it this process may have, and huge pages."""
    version, allowed = facts.cgroup_version, facts.allowed_bytes
    groups = "no control groups" if version is None else f"control groups version {version}"
    fact = f"{format_bytes(facts.ram_bytes)} of RAM"
    fact += f", {format_bytes(facts.available_bytes)} of it available"
    if allowed is None or allowed >= facts.ram_bytes:
        yield _found("memory", f"{fact}, all of it allowed ({groups})")
    else:
        fact += f", but this process is ended if it takes more than {format_bytes(allowed)}"
        fix = "keep within it: hetero train --process-memory auto"
        yield _found("memory", f"{fact} ({groups}, or ulimit -v)", fix)
    fact, fix = f"transparent huge pages: {facts.huge_pages}", ""
    if facts.huge_pages not in ("always", "madvise"):
        has = "this kernel has no transparent huge pages"
        fact = has if facts.huge_pages is None else f"set to {facts.huge_pages!r}"
        fact += ": updates and transfers take more time for addresses"
        fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    yield _found("huge pages", fact, fix)


def io_uring(facts: Facts) -> Iterator[Finding]:
    """Whether a ring can be made, and if not, who refuses it."""
    code, without = facts.refused_errno, "all I/O is done by threads, which cost more CPU time"
    fact = f"Linux {facts.kernel} refuses it ({os.strerror(code or 0)}): {without}"
    fix = "look into the kernel's log: dmesg | tail"
    if facts.liburing is None:
        fact = f"hetero was built without liburing: {without}"
        fix = "apt-get install liburing-dev pkg-config, then build hetero again"
    elif code is None:
        fact, fix = f"works on Linux {facts.kernel}, by liburing {facts.liburing}", ""
    elif facts.disabled:
        fact += f"; kernel.io_uring_disabled is {facts.disabled}"
        fix = "sudo sysctl kernel.io_uring_disabled=0"
    elif facts.seccomp and code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        fact += "; a seccomp filter is on this process, as in most containers"
        fix = "allow io_uring_setup, io_uring_enter and io_uring_register: docker run"
        fix += " --security-opt seccomp=unconfined, or a profile of your own"
    elif code == errno.ENOMEM:
        fact, fix = f"{fact}; too little memory may be locked", "ulimit -l unlimited"
    elif code == errno.ENOSYS:
        fix = "use Linux 5.19 or newer, with CONFIG_IO_URING"
    yield _found("io_uring", fact, fix)


def locked_memory(facts: Facts) -> Iterator[Finding]:
    """Whether buffers can be registered with io_uring, which RLIMIT_MEMLOCK limits."""
    limit = "unlimited" if facts.limit_bytes is None else format_bytes(facts.limit_bytes)
    fact, buffer = f"RLIMIT_MEMLOCK is {limit}", f"buffer of {format_bytes(facts.trial_bytes)}"
    if facts.exempt and facts.limit_bytes is not None:
        fact += ", from which this process is exempt (CAP_IPC_LOCK)"
    fact += {
        None: "; it matters for io_uring alone",
        True: f"; io_uring took a registered {buffer}",
        False: f"; io_uring refused a registered {buffer}, so each transfer pins its pages anew",
    }[facts.registered]
    yield _found("locked memory", fact, _UNLIMITED if facts.registered is False else "")


def folder(facts: Facts) -> Iterator[Finding]:
    """A folder for state files: a single finding if no file can be made there."""
    path, kind, free = facts.path, facts.filesystem, facts.free_bytes
    if facts.error is not None:
        fix = f"mkdir -p {path}, or name another folder: hetero doctor --nvme-path DIR"
        fact = f"no state file can be made there: {facts.error}"
        yield _found(f"folder {path}", fact, fix, problem=True)
        return
    fact, fix = f"{kind} on {facts.source}", ""
    if kind in IN_RAM:
        fact = f"{kind}: files there are RAM themselves, so state that goes there frees none"
        fix = "name a folder on an NVMe disk: hetero train --nvme-path DIR (which refuses this"
        fix += " one without --allow-ram-filesystem)"
    elif kind == "overlay":
        fact = "overlay: a container's own layer, whose files go with it"
        fix = "mount a folder of an NVMe disk: docker run -v /nvme:/nvme"
    elif kind in _NETWORK or kind.startswith("fuse"):
        fact = f"{kind} of {facts.source}: not a disk of this machine"
        fix = "name a folder on a local NVMe disk: hetero train --nvme-path DIR"
    yield _found(f"filesystem {path}", fact, fix, problem=kind in IN_RAM)
    billions = free / _STATE_BYTES_PER_PARAM / 1e9
    fact = f"{format_bytes(free)}: all state of {billions:.2g} billion parameters with AdamW,"
    fact += f" at {_STATE_BYTES_PER_PARAM} bytes each"
    fix = f"free some (du -xh {path} | sort -h | tail), or name a folder on a larger disk"
    fix = fix if free < _FEW_FREE_BYTES else ""
    yield _found(f"free space {path}", fact, fix, problem=free < _LEAST_FREE_BYTES)
    fact, fix = f"{kind} has it: transfers go past the page cache", ""
    if not facts.direct_io:
        fact = f"{kind} has none: state goes through the page cache, which takes RAM and CPU time"
        fix = "name a folder on ext4 or xfs: hetero train --nvme-path DIR"
    yield _found(f"O_DIRECT {path}", fact, fix)
    read, write = facts.read_bytes_per_s, facts.write_bytes_per_s
    if read is None or write is None:
        return
    fact, fix = f"{read / 1e9:.2f} GB/s reading, {write / 1e9:.2f} GB/s writing", ""
    if min(read, write) < _SLOW_BYTES_PER_S:
        least = f"{_SLOW_BYTES_PER_S / 1e9:.0f} GB/s at the least"
        fact += f": slower than an NVMe disk is, {least}"
        fix = "look what the disk is (lsblk -o NAME,ROTA,TRAN,MODEL), and give --nvme-path once"
        fix += " for each of several disks"
    yield _found(f"disk speed {path}", fact, fix)


def device(facts: Facts) -> Iterator[Finding]:
    """Whether torch sees the GPUs that there are, and how they and ranks exchange bytes."""
    there, problem, fix = "NVIDIA's driver is there", False, ""
    if facts.devices:
        each = ", ".join(f"{name} ({format_bytes(size)})" for name, size in facts.devices)
        fact = f"{each}, CUDA {facts.torch_cuda}"
    elif not facts.driver:
        fact = "no NVIDIA driver: models compute on the CPU"
    elif facts.torch_cuda is None:
        fact = f"{there}, but this torch is built without CUDA: models compute on the CPU"
        fix = "install a build of torch for CUDA"
    elif facts.hidden:
        fact = f"{there}, and CUDA_VISIBLE_DEVICES hides its devices: models compute on the CPU"
        fix = "unset CUDA_VISIBLE_DEVICES, if that is not meant"
    else:
        fact = f"{there} and torch is built for CUDA {facts.torch_cuda}, but torch sees no device"
        fix = "nvidia-smi says what the driver sees; in a container: docker run --gpus all"
        problem = True
    yield _found("GPU", fact, fix, problem)
    if facts.page_locking is not None:
        fact = f"CUDA refused to page-lock RAM: {facts.page_locking}"
        yield _found("page-locked RAM", fact, _UNLIMITED, problem=True)
    fact, fix = "gloo and NCCL" if facts.nccl else "gloo", ""
    if not facts.gloo:
        fact = "torch.distributed has no gloo: several ranks cannot train together"
        fix = "install a build of torch with torch.distributed"
    elif len(facts.devices) > 1 and not facts.nccl:
        fact = "gloo, no NCCL: shards of several GPUs go through RAM"
        fix = "install a build of torch for CUDA with NCCL"
    yield _found("collectives", fact, fix, problem=not facts.gloo)


def findings_of(facts: Facts) -> Iterator[Finding]:
    """What follows of all facts, in the order in which it is shown."""
    for check in (software, cpu, memory, io_uring, locked_memory):
        yield from check(facts)
    for each in facts.folders:
        yield from folder(each)
    yield from device(facts)


def gather(
    paths: Sequence[str], measure: bool, tell: Callable[[str], None], root: Path = Path("/")
) -> Facts:
    """The facts of this machine and of the folders `paths`.

    `measure`: write and read up to 256 MiB in each folder, for some seconds. `tell` gets a line for
    what is being done. `root` is put before /proc and /sys.
    """
    extras = {extra: {name: _version(name) for name in names} for extra, names in EXTRAS.items()}
    versions = {"hetero": hetero.__version__, "Python": platform.python_version()}
    versions |= {name: _version(name) or "missing" for name in ("torch", "numpy", "psutil")}
    ram = psutil.virtual_memory()
    huge = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    groups = root / "sys/fs/cgroup"
    version = 2 if (groups / "cgroup.controllers").exists() else 1
    return Facts(
        versions=versions,
        extras=extras,
        architecture=platform.machine(),
        cpus=os.cpu_count() or 1,
        usable_cpus=usable_cpus(),  # after affinity and quota
        isa=_native.isa(),
        available_isas=_native.isa_available(),
        forced_isa=os.environ.get("HETERO_ISA"),
        numa_nodes=_numa_nodes(root),  # on whose CPUs this process may run
        ram_bytes=ram.total,
        available_bytes=ram.available,
        allowed_bytes=allowed_bytes(),
        cgroup_version=version if groups.exists() else None,
        huge_pages=huge.partition("[")[2].partition("]")[0] if huge else None,
        **_io_uring(root),
        folders=[_folder(path, measure, tell, root) for path in paths],
        **_gpus(),
        driver=(root / "dev/nvidiactl").exists(),
    )


def _io_uring(root: Path) -> dict[str, Any]:
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
    return {
        "kernel": platform.release(),
        "liburing": _native.build_info()["liburing"],
        "refused_errno": refused,
        "disabled": int(disabled) if disabled else None,
        "seccomp": status.get("Seccomp", "0") != "0",
        "limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "exempt": bool(int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1),
        "trial_bytes": _TRIAL_BYTES,
        "registered": registered,
    }


def _folder(path: str, measure: bool, tell: Callable[[str], None], root: Path) -> Facts:
    facts = Facts(path=path, error=None, filesystem="unknown", source="unknown", free_bytes=0)
    facts.read_bytes_per_s = facts.write_bytes_per_s = None
    try:
        check_directory(path, allow_ram_filesystem=True)
        mounts = root / "proc/self/mountinfo"
        facts.filesystem, facts.source = mounted_at(Path(path).resolve(), mounts)
        facts.direct_io, facts.free_bytes = _has_direct_io(path), free_bytes(path)
        if measure and facts.free_bytes > 2 * _AREA_BYTES:
            tell(f"measuring the disk of {path}")
            rates = measure_disk([path], tell, area_bytes=_AREA_BYTES, window_s=_WINDOW_S, rounds=1)
            facts.read_bytes_per_s, facts.write_bytes_per_s = rates["read"], rates["write"]
    except (HeteroError, OSError) as error:
        facts.error = str(error)
    return facts


def _has_direct_io(path: str) -> bool:
    """Whether a file there can be opened with O_DIRECT."""
    with tempfile.NamedTemporaryFile(dir=path, prefix="hetero-") as file:
        descriptor, is_direct = open_direct(file.name, os.O_RDWR)
        os.close(descriptor)
    return is_direct


def _gpus() -> dict[str, Any]:
    devices, page_locking = [], None
    if cuda_available():
        found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        devices = [(about.name, about.total_memory) for about in found]
        try:
            torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            page_locking = str(error).partition("\n")[0]
    return {
        "torch_cuda": torch.version.cuda,
        "devices": devices,
        "page_locking": page_locking,
        "nccl": has_nccl(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "hidden": "CUDA_VISIBLE_DEVICES" in os.environ,
    }


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
