"""Checks of what moves state to disk: io_uring, locked memory, and the folders of state files."""

from __future__ import annotations

import errno
import os

from hetero.cli.doctor.facts import FolderFacts, IoUringFacts, LockedMemoryFacts
from hetero.cli.doctor.finding import Finding, note, ok, problem
from offload.disk.directories import IN_RAM
from offload.memory.sizes import format_bytes

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs")
_LEAST_FREE_BYTES = 1 << 30
_FEW_FREE_BYTES = 20 << 30
_SLOW_BYTES_PER_S = 1e9  # any NVMe disk reads and writes faster
_STATE_BYTES_PER_PARAM = 14  # bf16 parameter and gradient, and AdamW's state of 10
_WITHOUT = "all I/O is done by threads, which cost more CPU time"
_CALLS = "io_uring_setup, io_uring_enter and io_uring_register"


def check_io_uring(facts: IoUringFacts) -> Finding:
    """Whether the ring can be made, and if not, who refuses it."""
    name, kernel = "io_uring", f"Linux {facts.kernel}"
    if facts.liburing is None:
        return note(
            name,
            f"hetero was built without liburing: {_WITHOUT}",
            "apt-get install liburing-dev pkg-config, then build hetero again",
        )
    code = facts.refused_errno
    if code is None:
        return ok(name, f"works on {kernel}, by liburing {facts.liburing}")
    refused = f"{kernel} refuses it ({os.strerror(code)}): {_WITHOUT}"
    if facts.disabled:
        return note(
            name,
            f"{refused}; kernel.io_uring_disabled is {facts.disabled}",
            "sudo sysctl kernel.io_uring_disabled=0",
        )
    if facts.seccomp and code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return note(
            name,
            f"{refused}; a seccomp filter is on this process, as in most containers",
            f"allow {_CALLS}: docker run --security-opt seccomp=unconfined, or a profile of your"
            " own",
        )
    if code == errno.ENOMEM:
        return note(name, f"{refused}; too little memory may be locked", "ulimit -l unlimited")
    if code == errno.ENOSYS:
        return note(name, refused, "use Linux 5.19 or newer, with CONFIG_IO_URING")
    return note(name, refused, "look into the kernel's log: dmesg | tail")


def check_locked_memory(facts: LockedMemoryFacts) -> Finding:
    """Whether buffers can be registered with io_uring, which RLIMIT_MEMLOCK limits."""
    name = "locked memory"
    limit = "unlimited" if facts.limit_bytes is None else format_bytes(facts.limit_bytes)
    said = f"RLIMIT_MEMLOCK is {limit}"
    if facts.exempt and facts.limit_bytes is not None:
        said += ", from which this process is exempt (CAP_IPC_LOCK)"
    if facts.registered is None:
        return ok(name, f"{said}; it matters for io_uring alone")
    trial = format_bytes(facts.trial_bytes)
    if facts.registered:
        return ok(name, f"{said}; io_uring took a registered buffer of {trial}")
    return note(
        name,
        f"{said}; io_uring refused a registered buffer of {trial}, so each transfer pins its pages"
        " anew",
        "ulimit -l unlimited (in a container: docker run --ulimit memlock=-1)",
    )


def check_folder(facts: FolderFacts) -> list[Finding]:
    """All findings of one folder; a single one if no file can be made there."""
    if facts.error is not None:
        return [
            problem(
                f"folder {facts.path}",
                f"no state file can be made there: {facts.error}",
                f"mkdir -p {facts.path}, or name another folder: hetero doctor --nvme-path DIR",
            )
        ]
    found = [check_filesystem(facts), check_free_space(facts), check_direct_io(facts)]
    if facts.read_bytes_per_s is not None and facts.write_bytes_per_s is not None:
        found.append(check_disk_speed(facts, facts.read_bytes_per_s, facts.write_bytes_per_s))
    return found


def check_filesystem(facts: FolderFacts) -> Finding:
    """Whether it is on a disk of this machine."""
    name, kind = f"filesystem {facts.path}", facts.filesystem
    if kind in IN_RAM:
        return problem(
            name,
            f"{kind}: files there are RAM themselves, so state that goes there frees none",
            "name a folder on an NVMe disk: hetero train --nvme-path DIR (which refuses this one"
            " without --allow-ram-filesystem)",
        )
    if kind == "overlay":
        return note(
            name,
            "overlay: a container's own layer, whose files go with it",
            "mount a folder of an NVMe disk: docker run -v /nvme:/nvme",
        )
    if kind in NETWORK or kind.startswith("fuse"):
        return note(
            name,
            f"{kind} of {facts.source}: not a disk of this machine",
            "name a folder on a local NVMe disk: hetero train --nvme-path DIR",
        )
    return ok(name, f"{kind} on {facts.source}")


def check_free_space(facts: FolderFacts) -> Finding:
    """How large a model's state it has room for."""
    name = f"free space {facts.path}"
    billions = facts.free_bytes / _STATE_BYTES_PER_PARAM / 1e9
    said = (
        f"{format_bytes(facts.free_bytes)}: all state of {billions:.2g} billion parameters with"
        f" AdamW, at {_STATE_BYTES_PER_PARAM} bytes each"
    )
    fix = f"free some (du -xh {facts.path} | sort -h | tail), or name a folder on a larger disk"
    if facts.free_bytes < _LEAST_FREE_BYTES:
        return problem(name, said, fix)
    if facts.free_bytes < _FEW_FREE_BYTES:
        return note(name, said, fix)
    return ok(name, said)


def check_direct_io(facts: FolderFacts) -> Finding:
    """Whether transfers can go past the page cache."""
    name = f"O_DIRECT {facts.path}"
    if facts.direct_io:
        return ok(name, f"{facts.filesystem} has it: transfers go past the page cache")
    return note(
        name,
        f"{facts.filesystem} has none: state goes through the page cache, which takes RAM and CPU"
        " time",
        "name a folder on ext4 or xfs: hetero train --nvme-path DIR",
    )


def check_disk_speed(facts: FolderFacts, read: float, write: float) -> Finding:
    """Whether it is as fast as NVMe; `read` and `write` in bytes per second."""
    name = f"disk speed {facts.path}"
    said = f"{read / 1e9:.2f} GB/s reading, {write / 1e9:.2f} GB/s writing"
    if min(read, write) >= _SLOW_BYTES_PER_S:
        return ok(name, said)
    slow = f"{said}: slower than an NVMe disk is, {_SLOW_BYTES_PER_S / 1e9:.0f} GB/s at the least"
    return note(
        name,
        slow,
        "look what the disk is (lsblk -o NAME,ROTA,TRAN,MODEL), and give --nvme-path once for each"
        " of several disks",
    )
