"""offload/cgroups: what control groups leave a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero import cpu_threads
from offload import _native, cgroups
from offload.cgroups import cpu_quota, usable_cpus

V1 = "3:memory:/box\n2:cpu,cpuacct:/outer/inner\n1:name=systemd:/\n"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {}, None),
        ("", {"cpu.max": "100000 100000"}, None),
        ("0::/\n", {"cpu.max": "800000 100000\n"}, 8.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "9 3\n", "a/cpu.max": "4 2\n", "cpu.max": "5 1\n"}, 2.0),
        # In a container without a namespace of its own the path is the host's.
        ("0::/docker/1f\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("0::/a\n", {"a/cpu.max": "nonsense\n"}, None),
        (
            V1,
            {
                "cpu,cpuacct/outer/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/outer/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/outer/inner/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/outer/inner/cpu.cfs_period_us": "100000\n",
                "memory/box/cpu.max": "1 1\n",
            },
            2.5,
        ),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n"}, None),
    ],
)
def test_quotas_of_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], quota: float | None
) -> None:
    groups_of = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for path, text in {"proc/self/cgroup": groups, **groups_of}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_no_more_cpus_than_the_quota_pays_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    for quota, usable in ((None, 6), (0.5, 1), (2.5, 2), (8.0, 6)):
        monkeypatch.setattr(cgroups, "cpu_quota", lambda found=quota: found)
        assert usable_cpus() == usable
        chosen: list[int] = []
        monkeypatch.setattr(cpu_threads, "_chosen", False)
        monkeypatch.setattr(_native, "set_threads", chosen.append)
        cpu_threads.share_threads(2)
        assert chosen == [max(1, usable // 2)]
