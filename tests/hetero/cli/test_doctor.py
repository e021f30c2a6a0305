"""`hetero doctor`: facts of this machine, what follows of facts of every kind, and its printing."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.cli import doctor
from hetero.cli.doctor import Facts, Finding, Level, findings_of, folder, gather
from hetero.cli.main import main
from offload import _native
from offload.disk.directories import mounted_at

GIB = 1 << 30
OK, NOTE, PROBLEM = Level
FOLDER = Facts(
    path="/nvme",
    error=None,
    filesystem="ext4",
    source="/dev/nvme0n1",
    direct_io=True,
    free_bytes=500 * GIB,
    read_bytes_per_s=3.25e9,
    write_bytes_per_s=2e9,
)
H100 = ("H100", 80 * GIB)
MACHINE = Facts(
    versions={"hetero": "0.1.0", "torch": "2.13.0"},
    extras={"train": {"rich": "15.0", "matplotlib": None}, "finetune": {"trl": "0.29"}},
    architecture="x86_64",
    cpus=8,
    usable_cpus=8,
    isa="avx512",
    available_isas=("avx512", "avx2", "scalar"),
    forced_isa=None,
    numa_nodes=1,
    ram_bytes=64 * GIB,
    available_bytes=32 * GIB,
    allowed_bytes=None,
    cgroup_version=2,
    huge_pages="madvise",
    kernel="6.1.0",
    liburing="2.3",
    refused_errno=None,
    disabled=0,
    seccomp=False,
    limit_bytes=8 << 20,
    exempt=False,
    trial_bytes=64 << 20,
    registered=True,
    folders=[FOLDER],
    torch_cuda="12.6",
    driver=True,
    devices=(H100,),
    page_locking=None,
    nccl=True,
    gloo=True,
    hidden=False,
)
NO_GPU = {"torch_cuda": None, "driver": False, "devices": (), "nccl": False}
UNSEEN = {"devices": ()}
REFUSED = {"refused_errno": errno.EPERM}
NO_SYSCALL = {"refused_errno": errno.ENOSYS}

# By finding: facts other than those of MACHINE and FOLDER, its level, and words of fact and fix.
CASES: dict[str, list[tuple[dict[str, Any], Level, str, str]]] = {
    "versions": [({}, OK, "hetero 0.1.0, torch 2.13.0", "")],
    "extra train": [({}, NOTE, "missing: matplotlib", 'pip install "hetero[train]"')],
    "extra finetune": [({}, OK, "trl 0.29", "")],
    "processors": [({"usable_cpus": 3}, OK, "3 of 8 CPUs (x86_64)", "")],
    "update kernels": [
        ({}, OK, "avx512 (this machine and build have avx512, avx2", ""),
        ({"isa": "avx2"}, NOTE, "set_isa() chose it", "unset HETERO_ISA"),
        ({"isa": "avx2", "forced_isa": "avx2"}, NOTE, "HETERO_ISA chose it", "unset"),
        ({"isa": "scalar", "available_isas": ("scalar",)}, NOTE, "no vector kernels", "AVX2"),
    ],
    "NUMA": [
        ({}, OK, "one node", ""),
        ({"numa_nodes": 2}, NOTE, "2 nodes; memory lies", "numactl"),
    ],
    "memory": [
        ({}, OK, "64.0 GiB of RAM, 32.0 GiB of it available, all of it allowed (c", ""),
        ({"allowed_bytes": 65 * GIB}, OK, "all of it", ""),
        ({"cgroup_version": None}, OK, "no control groups", ""),
        (
            {"allowed_bytes": 8 * GIB, "cgroup_version": 1},
            NOTE,
            "more than 8.0 GiB",
            "--process-memory auto",
        ),
    ],
    "huge pages": [
        ({"huge_pages": "always"}, OK, "always", ""),
        ({}, OK, "madvise", ""),
        ({"huge_pages": "never"}, NOTE, "'never'", "transparent_hugepage/en"),
        ({"huge_pages": None}, NOTE, "kernel has no", "echo"),
    ],
    "io_uring": [
        ({}, OK, "works on Linux 6.1.0, by liburing 2.3", ""),
        ({"liburing": None, **NO_SYSCALL}, NOTE, "without liburing", "liburing-dev"),
        ({**REFUSED, "disabled": 2}, NOTE, "io_uring_disabled is 2", "sudo sysctl"),
        ({**REFUSED, "seccomp": True}, NOTE, "seccomp filter", "seccomp=unconfined"),
        ({**NO_SYSCALL, "seccomp": True}, NOTE, "seccomp filter", "io_uring_enter"),
        ({**NO_SYSCALL, "disabled": None}, NOTE, "not implemented", "Linux 5.19"),
        ({"refused_errno": errno.ENOMEM}, NOTE, "may be locked", "ulimit -l unl"),
        ({"refused_errno": errno.EMFILE}, NOTE, "Too many open files", "dmesg"),
    ],
    "locked memory": [
        ({}, OK, "8.0 MiB; io_uring took a registered buffer of 64", ""),
        ({"exempt": True}, OK, "8.0 MiB, from which this process is ex", ""),
        ({"limit_bytes": None, "exempt": True}, OK, "is unlimited; io_uring took", ""),
        ({"registered": False}, NOTE, "refused a registered", "ulimit -l"),
        ({"registered": None}, OK, "io_uring alone", ""),
    ],
    "filesystem /nvme": [
        ({}, OK, "ext4 on /dev/nvme0n1", ""),
        ({"filesystem": "xfs"}, OK, "xfs on", ""),
        ({"filesystem": "tmpfs"}, PROBLEM, "are RAM themselves", "--nvme-path"),
        ({"filesystem": "overlay"}, NOTE, "container's own layer", "docker run -v"),
        ({"filesystem": "nfs4"}, NOTE, "not a disk of this", "local NVMe"),
        ({"filesystem": "fuse.x"}, NOTE, "not a disk of", "local NVMe"),
    ],
    "free space /nvme": [
        ({}, OK, "500.0 GiB: all state of 38 billion parameters", ""),
        ({"free_bytes": 10 * GIB}, NOTE, "10.0 GiB", "du -xh /nvme"),
        ({"free_bytes": GIB - 1}, PROBLEM, "1024.0 MiB", "larger disk"),
    ],
    "O_DIRECT /nvme": [
        ({}, OK, "past the page cache", ""),
        ({"direct_io": False}, NOTE, "page cache", "xfs"),
    ],
    "disk speed /nvme": [
        ({}, OK, "3.25 GB/s reading, 2.00 GB/s writing", ""),
        (
            {"write_bytes_per_s": 0.2e9},
            NOTE,
            "0.20 GB/s writing: slower than an NVMe disk",
            "lsblk",
        ),
    ],
    "folder /nvme": [
        ({"error": "it does not exist"}, PROBLEM, "it does not exist", "mkdir -p /nvme")
    ],
    "GPU": [
        ({}, OK, "H100 (80.0 GiB), CUDA 12.6", ""),
        (NO_GPU, OK, "compute on the CPU", ""),
        ({**NO_GPU, "driver": True}, NOTE, "built without CUDA", "build of torch for CUDA"),
        (UNSEEN, PROBLEM, "sees no device", "docker run --gpus all"),
        ({**UNSEEN, "hidden": True}, NOTE, "CUDA_VISIBLE_DEVICES hides", "unset"),
    ],
    "page-locked RAM": [({"page_locking": "no memory"}, PROBLEM, "no memory", "ulimit -l unl")],
    "collectives": [
        (NO_GPU, OK, "gloo", ""),
        ({}, OK, "gloo and NCCL", ""),
        ({"devices": (H100, H100), "nccl": False}, NOTE, "go through RAM", "NCCL"),
        ({"gloo": False}, PROBLEM, "no gloo", "torch.distributed"),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "level", "fact", "fix"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_what_follows_of_facts(
    name: str, changes: dict[str, Any], level: Level, fact: str, fix: str
) -> None:
    """A finding that has something to do says what; one that is ok has nothing to do."""
    of_folder = {key: value for key, value in changes.items() if hasattr(FOLDER, key)}
    where = Facts(**vars(FOLDER) | of_folder)
    facts = Facts(**vars(MACHINE) | changes | {"folders": [where]})
    found = {finding.name: finding for finding in findings_of(facts)}[name]
    assert found.level is level, found
    assert fact in found.fact
    assert fix in found.fix
    assert bool(found.fix) == (level is not OK)


def test_what_is_not_known_of_a_folder() -> None:
    names = [each.name for each in folder(Facts(**vars(FOLDER) | {"read_bytes_per_s": None}))]
    assert names == ["filesystem /nvme", "free space /nvme", "O_DIRECT /nvme"]
    assert len(list(folder(Facts(**vars(FOLDER) | {"error": "it does not exist"})))) == 1


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw
31 22 259:1 / /big\\040disk rw - xfs /dev/nvme0n1 rw
32 31 0:30 / /big\\040disk/far rw master:2 propagate_from:3 - nfs4 server:/x rw
33 32 0:31 / /big\\040disk/far rw - fuse.sshfs me@there:/y rw
"""


def test_the_filesystem_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    for path, filesystem in (
        ("/home/x", ("ext4", "/dev/vda")),
        ("/dev/shm", ("tmpfs", "tmpfs")),
        ("/dev/shmoo", ("ext4", "/dev/vda")),
        ("/big disk/a/b", ("xfs", "/dev/nvme0n1")),
        ("/big disk/far/c", ("fuse.sshfs", "me@there:/y")),
    ):
        assert mounted_at(Path(path), tmp_path / "mountinfo") == filesystem
    assert mounted_at(Path("/"), tmp_path / "none") == ("unknown", "unknown")


def test_facts_of_this_machine(tmp_path: Path, nothing_left: None) -> None:
    said: list[str] = []
    facts = gather([str(tmp_path), str(tmp_path / "none")], False, said.append)
    assert not said
    there, missing = facts.folders
    assert there.error is None
    assert there.free_bytes > 0
    assert there.read_bytes_per_s is None
    assert "does not exist" in missing.error
    assert not list(tmp_path.iterdir())
    assert facts.ram_bytes == psutil.virtual_memory().total
    assert facts.isa == _native.isa()
    assert facts.kernel == os.uname().release
    assert facts.versions["psutil"] == psutil.__version__
    assert facts.gloo


def test_what_a_container_hides(tmp_path: Path) -> None:
    """Facts from another /proc and /sys, which are empty at first."""

    def of_container() -> Facts:
        return gather([], False, print, tmp_path)

    facts = of_container()
    assert (facts.seccomp, facts.disabled) == (False, None)
    assert (facts.huge_pages, facts.cgroup_version) == (None, None)
    assert facts.numa_nodes == 0
    files = {
        "proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\nSeccomp:\t2\n",
        "proc/sys/kernel/io_uring_disabled": "2\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/fs/cgroup/cgroup.controllers": "memory\n",
        "dev/nvidiactl": "",
        f"sys/devices/system/node/node0/cpu{min(os.sched_getaffinity(0))}": "",
        "sys/devices/system/node/node1/cpu999999": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    facts = of_container()
    assert (facts.seccomp, facts.disabled) == (True, 2)
    assert (facts.huge_pages, facts.cgroup_version) == ("never", 2)
    assert facts.exempt
    assert facts.numa_nodes == 1
    assert facts.driver


def test_the_disk_is_measured(tmp_path: Path, nothing_left: None) -> None:
    said: list[str] = []
    (measured,) = gather([str(tmp_path)], True, said.append).folders
    assert said[0] == f"measuring the disk of {tmp_path}"
    assert measured.read_bytes_per_s > 0
    assert not list(tmp_path.iterdir())


# The command

FINDINGS = [
    Finding("versions", "hetero 0.1.0"),
    Finding("io_uring", "refused by the kernel", NOTE, "sudo sysctl kernel.io_uring_disabled=0"),
    Finding("filesystem /x", "tmpfs: files there are RAM themselves", PROBLEM, "name another one"),
]
TEXT = """\
ok       versions       hetero 0.1.0
note     io_uring       refused by the kernel
                        -> sudo sysctl kernel.io_uring_disabled=0
problem  filesystem /x  tmpfs: files there are RAM themselves
                        -> name another one

1 ok, 1 note, 1 problem
"""


def test_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem is 1, notes are 0."""
    assert main(["doctor", "--no-disk-speed", "--json", "--nvme-path", str(tmp_path / "no")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    (bad,) = (each for each in found["findings"] if each["level"] == "problem")
    assert bad["name"] == f"folder {tmp_path / 'no'}"
    assert bad["fix"].startswith("mkdir -p ")
    assert found["facts"]["ram_bytes"] > 0
    monkeypatch.setattr(doctor, "findings_of", lambda facts: iter(FINDINGS[:2]))
    assert main(["doctor", "--no-disk-speed"]) == 0
    assert capsys.readouterr().out.endswith("\n1 ok, 1 note, 0 problems\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_text(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on a terminal, but for colours; long lines are broken between words."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    doctor.show(FINDINGS)
    out = capsys.readouterr().out
    assert re.sub(r"\033\[[\d;]+m", "", out) == TEXT
    assert ("\033[1;31mproblem" in out) == terminal
    text = doctor.lines([Finding("x", "word " * 40), Finding("y", "z", NOTE, "do " * 40)], 60)
    assert max(map(len, text)) <= 60
    assert text[1].startswith(" " * 12 + "word")
