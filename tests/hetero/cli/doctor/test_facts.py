"""hetero/cli/doctor/facts: the facts are this machine's."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from hetero.cli.doctor.facts import gather
from offload import _native
from offload.disk.directories import mounted_at

pytestmark = pytest.mark.usefixtures("nothing_left")

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw
31 22 259:1 / /big\\040disk rw - xfs /dev/nvme0n1 rw
32 31 0:30 / /big\\040disk/far rw master:2 propagate_from:3 - nfs4 server:/x rw
33 32 0:31 / /big\\040disk/far rw - fuse.sshfs me@there:/y rw
"""


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/home/x", ("ext4", "/dev/vda")),
        ("/dev/shm", ("tmpfs", "tmpfs")),
        ("/dev/shmoo", ("ext4", "/dev/vda")),
        ("/big disk/a/b", ("xfs", "/dev/nvme0n1")),
        ("/big disk/far/c", ("fuse.sshfs", "me@there:/y")),
    ],
)
def test_the_filesystem_of_a_path(path: str, filesystem: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert mounted_at(Path(path), tmp_path / "mountinfo") == filesystem


def test_the_filesystem_is_unknown_without_proc(tmp_path: Path) -> None:
    assert mounted_at(Path("/"), tmp_path / "none") == ("unknown", "unknown")


def test_facts_of_this_machine(tmp_path: Path) -> None:
    said: list[str] = []
    facts = gather([str(tmp_path), str(tmp_path / "none")], False, said.append)
    assert not said
    folder, missing = facts.folders
    assert folder.error is None
    assert folder.free_bytes > 0
    assert folder.read_bytes_per_s is None
    assert missing.error is not None
    assert "does not exist" in missing.error
    assert not list(tmp_path.iterdir())
    assert facts.memory.ram_bytes == psutil.virtual_memory().total
    assert facts.cpu.isa == _native.isa()
    assert facts.io_uring.kernel == os.uname().release
    assert facts.software.versions["psutil"] == psutil.__version__
    assert facts.device.gloo


def test_what_a_container_hides(tmp_path: Path) -> None:
    """Facts from another /proc and /sys."""
    files = {
        "proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\nSeccomp:\t2\n",
        "proc/sys/kernel/io_uring_disabled": "2\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/fs/cgroup/cgroup.controllers": "memory\n",
        "dev/nvidiactl": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    facts = gather([], False, print, tmp_path)
    assert facts.io_uring.seccomp
    assert facts.io_uring.disabled == 2
    assert facts.locked_memory.exempt
    assert facts.memory.huge_pages == "never"
    assert facts.memory.cgroup_version == 2
    assert facts.device.driver


def test_nothing_of_proc_and_sys(tmp_path: Path) -> None:
    facts = gather([], False, print, tmp_path)
    assert not facts.io_uring.seccomp
    assert facts.io_uring.disabled is None
    assert facts.memory.huge_pages is None
    assert facts.memory.cgroup_version is None


def test_the_disk_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    (folder,) = gather([str(tmp_path)], True, said.append).folders
    assert said[0] == f"measuring the disk of {tmp_path}"
    assert folder.read_bytes_per_s is not None
    assert folder.read_bytes_per_s > 0
    assert not list(tmp_path.iterdir())
