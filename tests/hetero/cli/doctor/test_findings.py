"""hetero/cli/doctor: what each check says of facts of every kind."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from hetero.cli.doctor.facts import (
    CpuFacts,
    DeviceFacts,
    FolderFacts,
    IoUringFacts,
    LockedMemoryFacts,
    MemoryFacts,
    SoftwareFacts,
)
from hetero.cli.doctor.findings import (
    Finding,
    Level,
    of_cpu,
    of_device,
    of_folder,
    of_io_uring,
    of_locked_memory,
    of_memory,
    of_software,
)

GIB = 1 << 30

URING = IoUringFacts("6.1.0", "2.3", refused_errno=None, disabled=0, seccomp=False)
LOCKED = LockedMemoryFacts(8 << 20, exempt=False, trial_bytes=64 << 20, registered=True)
FOLDER = FolderFacts("/nvme", None, "ext4", "/dev/nvme0n1", True, 500 * GIB, 3.25e9, 2e9)
MEMORY = MemoryFacts(64 * GIB, 32 * GIB, None, 2, "madvise")
CPU = CpuFacts("x86_64", 8, 8, "avx512", ("avx512", "avx2", "scalar"), None, 1, True)
NO_GPU = DeviceFacts(None, False, (), None, nccl=False, gloo=True)
GPU = DeviceFacts("12.6", True, (("H100", 80 * GIB),), None, nccl=True, gloo=True)


def expect(finding: Finding, level: Level, fact: str, fix: str = "") -> None:
    """A finding that has something to do says what; one that is ok has nothing to do."""
    assert finding.level is level, finding
    assert fact in finding.fact
    assert fix in finding.fix
    assert bool(finding.fix) == (level is not Level.OK)


def named(name: str, judge: Callable[[Any], Iterator[Finding]], facts: object) -> Finding:
    """The finding of that name."""
    return next(finding for finding in judge(facts) if finding.name == name)


def test_io_uring_works() -> None:
    expect(of_io_uring(URING), Level.OK, "works on Linux 6.1.0, by liburing 2.3")


@pytest.mark.parametrize(
    ("changes", "fact", "fix"),
    [
        ({"liburing": None, "refused_errno": errno.ENOSYS}, "without liburing", "liburing-dev"),
        ({"refused_errno": errno.EPERM, "disabled": 2}, "io_uring_disabled is 2", "sudo sysctl"),
        ({"refused_errno": errno.EPERM, "seccomp": True}, "seccomp filter", "seccomp=unconfined"),
        ({"refused_errno": errno.ENOSYS, "seccomp": True}, "seccomp filter", "io_uring_enter"),
        ({"refused_errno": errno.ENOSYS, "disabled": None}, "not implemented", "Linux 5.19"),
        ({"refused_errno": errno.ENOMEM}, "memory may be locked", "ulimit -l unlimited"),
        ({"refused_errno": errno.EMFILE}, "Too many open files", "dmesg"),
    ],
)
def test_io_uring_is_refused(changes: dict[str, object], fact: str, fix: str) -> None:
    expect(of_io_uring(replace(URING, **changes)), Level.NOTE, fact, fix)  # type: ignore[arg-type]


def test_locked_memory() -> None:
    expect(of_locked_memory(LOCKED), Level.OK, "8.0 MiB; io_uring took a registered buffer of 64")
    exempt = replace(LOCKED, exempt=True)
    expect(of_locked_memory(exempt), Level.OK, "8.0 MiB, from which this process is exempt")
    unlimited = replace(LOCKED, limit_bytes=None, exempt=True)
    expect(of_locked_memory(unlimited), Level.OK, "is unlimited; io_uring took")
    refused = replace(LOCKED, registered=False)
    expect(of_locked_memory(refused), Level.NOTE, "refused a registered buffer", "ulimit -l")
    expect(of_locked_memory(replace(LOCKED, registered=None)), Level.OK, "io_uring alone")


def of(folder: FolderFacts) -> dict[str, Finding]:
    """The findings of a folder, by the first word of their names."""
    return {finding.name.split()[0]: finding for finding in of_folder(folder)}


def test_a_good_folder() -> None:
    found = of(FOLDER)
    assert {finding.level for finding in found.values()} == {Level.OK}
    expect(found["filesystem"], Level.OK, "ext4 on /dev/nvme0n1")
    expect(found["free"], Level.OK, "500.0 GiB: all state of 38 billion parameters")
    expect(found["O_DIRECT"], Level.OK, "past the page cache")
    expect(found["disk"], Level.OK, "3.25 GB/s reading, 2.00 GB/s writing")


@pytest.mark.parametrize(
    ("kind", "level", "fact", "fix"),
    [
        ("tmpfs", Level.PROBLEM, "are RAM themselves", "--nvme-path"),
        ("overlay", Level.NOTE, "container's own layer", "docker run -v"),
        ("nfs4", Level.NOTE, "not a disk of this machine", "local NVMe"),
        ("fuse.sshfs", Level.NOTE, "not a disk of this machine", "local NVMe"),
        ("xfs", Level.OK, "xfs on", ""),
    ],
)
def test_filesystems(kind: str, level: Level, fact: str, fix: str) -> None:
    expect(of(replace(FOLDER, filesystem=kind))["filesystem"], level, fact, fix)


def test_folders_with_something_to_do() -> None:
    few = of(replace(FOLDER, free_bytes=10 * GIB))["free"]
    expect(few, Level.NOTE, "10.0 GiB", "du -xh /nvme")
    none = of(replace(FOLDER, free_bytes=GIB - 1))["free"]
    expect(none, Level.PROBLEM, "1024.0 MiB", "larger disk")
    expect(of(replace(FOLDER, direct_io=False))["O_DIRECT"], Level.NOTE, "page cache", "xfs")
    slow = of(replace(FOLDER, write_bytes_per_s=0.2e9))["disk"]
    expect(slow, Level.NOTE, "0.20 GB/s writing: slower than an NVMe disk", "lsblk")
    assert "disk" not in of(replace(FOLDER, read_bytes_per_s=None))
    (missing,) = of_folder(FolderFacts("/no", "it does not exist"))
    expect(missing, Level.PROBLEM, "it does not exist", "mkdir -p /no")


def test_memory_limits() -> None:
    said = "64.0 GiB of RAM, 32.0 GiB of it available"
    expect(
        named("memory", of_memory, MEMORY),
        Level.OK,
        f"{said}, all of it allowed (control groups ver",
    )
    expect(
        named("memory", of_memory, replace(MEMORY, allowed_bytes=65 * GIB)), Level.OK, "all of it"
    )
    expect(
        named("memory", of_memory, replace(MEMORY, cgroup_version=None)),
        Level.OK,
        "no control groups",
    )
    limited = replace(MEMORY, allowed_bytes=8 * GIB, cgroup_version=1)
    expect(
        named("memory", of_memory, limited),
        Level.NOTE,
        "more than 8.0 GiB",
        "--process-memory auto",
    )


def test_huge_pages() -> None:
    for chosen in ("always", "madvise"):
        expect(named("huge pages", of_memory, replace(MEMORY, huge_pages=chosen)), Level.OK, chosen)
    never = named("huge pages", of_memory, replace(MEMORY, huge_pages="never"))
    expect(never, Level.NOTE, "'never'", "transparent_hugepage/enabled")
    expect(
        named("huge pages", of_memory, replace(MEMORY, huge_pages=None)),
        Level.NOTE,
        "kernel has no",
        "echo",
    )


def test_processors() -> None:
    expect(
        named("processors", of_cpu, replace(CPU, usable_cpus=3)), Level.OK, "3 of 8 CPUs (x86_64)"
    )
    expect(
        named("update kernels", of_cpu, CPU),
        Level.OK,
        "avx512 (this machine and build have avx512, avx2, scalar)",
    )
    forced = named("update kernels", of_cpu, replace(CPU, isa="avx2", forced_isa="avx2"))
    expect(forced, Level.NOTE, "HETERO_ISA chose it", "unset HETERO_ISA")
    expect(
        named("update kernels", of_cpu, replace(CPU, isa="avx2")),
        Level.NOTE,
        "set_isa() chose it",
        "unset",
    )
    scalar = replace(CPU, isa="scalar", available_isas=("scalar",))
    expect(named("update kernels", of_cpu, scalar), Level.NOTE, "no vector kernels", "AVX2")


def test_numa() -> None:
    expect(named("NUMA", of_cpu, CPU), Level.OK, "one node")
    expect(named("NUMA", of_cpu, replace(CPU, numa_nodes=2)), Level.OK, "2 nodes; memory is spread")
    held = replace(CPU, numa_nodes=2, memory_policy=False)
    expect(named("NUMA", of_cpu, held), Level.NOTE, "may not choose", "--cap-add SYS_NICE")


def test_devices() -> None:
    expect(named("GPU", of_device, GPU), Level.OK, "H100 (80.0 GiB), CUDA 12.6")
    expect(named("GPU", of_device, NO_GPU), Level.OK, "compute on the CPU")
    built = replace(NO_GPU, driver=True)
    expect(
        named("GPU", of_device, built), Level.NOTE, "built without CUDA", "build of torch for CUDA"
    )
    unseen = replace(GPU, devices=())
    expect(
        named("GPU", of_device, unseen), Level.PROBLEM, "sees no device", "docker run --gpus all"
    )
    hidden = replace(unseen, hidden=True)
    expect(named("GPU", of_device, hidden), Level.NOTE, "CUDA_VISIBLE_DEVICES hides", "unset")


def test_page_locking() -> None:
    expect(named("page-locked RAM", of_device, NO_GPU), Level.OK, "not needed")
    expect(named("page-locked RAM", of_device, GPU), Level.OK, "page-locks RAM")
    refused = replace(GPU, page_locking="out of memory")
    expect(
        named("page-locked RAM", of_device, refused),
        Level.PROBLEM,
        "out of memory",
        "ulimit -l unlimited",
    )


def test_collectives() -> None:
    expect(named("collectives", of_device, NO_GPU), Level.OK, "gloo")
    expect(named("collectives", of_device, GPU), Level.OK, "gloo and NCCL")
    several = replace(GPU, devices=GPU.devices * 2, nccl=False)
    expect(named("collectives", of_device, several), Level.NOTE, "go through RAM", "NCCL")
    none = replace(GPU, gloo=False)
    expect(named("collectives", of_device, none), Level.PROBLEM, "no gloo", "torch.distributed")


def test_what_is_installed() -> None:
    facts = SoftwareFacts(
        {"hetero": "0.1.0", "torch": "2.13.0"},
        {"train": {"rich": "15.0", "matplotlib": None}, "completion": {"shtab": "1.7"}},
    )
    versions, train, completion = of_software(facts)
    expect(versions, Level.OK, "hetero 0.1.0, torch 2.13.0")

    expect(train, Level.NOTE, "missing: matplotlib", 'pip install "hetero[train]"')
    expect(completion, Level.OK, "shtab 1.7")
