"""offload/memory/process_memory: what the system says and allows."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from offload.memory import process_memory as process


def test_resident_bytes_are_those_of_the_system() -> None:
    before = process.resident_bytes()
    # (malloc may have as much left of what was freed before.)
    kept = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8).fill_(1)
    after = process.resident_bytes()
    assert after - before >= 60 << 20
    assert abs(process.resident_bytes() - psutil.Process().memory_info().rss) < 16 << 20
    del kept


def group_of(root: Path, lines: str) -> None:
    """What the process's groups are said to be."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)


def test_the_least_limit_of_all_cgroups_above_counts(tmp_path: Path) -> None:
    group_of(tmp_path, "0::/user/job\n")
    root = tmp_path / "sys/fs/cgroup"
    (root / "user" / "job").mkdir(parents=True)
    (root / "user" / "memory.max").write_text("3000\n")
    (root / "user" / "job" / "memory.max").write_text("max\n")
    assert process._cgroup_limits(tmp_path) == [3000]
    (root / "user" / "job" / "memory.max").write_text("2000\n")
    assert sorted(process._cgroup_limits(tmp_path)) == [2000, 3000]


def test_the_first_version_of_cgroups_counts_too(tmp_path: Path) -> None:
    group_of(tmp_path, "5:cpu,cpuacct:/a\n4:memory:/a\n")
    memory = tmp_path / "sys/fs/cgroup/memory"
    (memory / "a").mkdir(parents=True)
    (memory / "a" / "memory.limit_in_bytes").write_text("5000\n")
    (memory / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert process._cgroup_limits(tmp_path) == [5000]
    assert process._cgroup_limits(tmp_path / "none") == []


def test_an_address_limit_counts() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40));"
        "from offload.memory.process_memory import allowed_bytes; print(allowed_bytes())"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0 < int(out.stdout) <= 1 << 40
