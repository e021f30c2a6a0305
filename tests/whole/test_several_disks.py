"""nvme_path with several directories: the same numbers, and every disk takes part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetero
from offload.disk import bandwidth
from offload.disk import scratch_file as store
from offload.disk.file_member import MemberFile
from tests.support.training.loops import batches, build, train


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Three; with units so small that a tiny model's kinds of state are cut many times."""
    monkeypatch.setattr(store, "UNIT_BYTES", 32768)
    made = [tmp_path / name for name in "abc"]
    for directory in made:
        directory.mkdir()
    yield [str(directory) for directory in made]
    assert [list(directory.iterdir()) for directory in made] == [[], [], []]


@pytest.mark.parametrize("io_engine", ["auto", "threads"])
def test_same_bits_as_one_directory(
    directories: list[str], tmp_path: Path, io_engine: str, nothing_left: None
) -> None:
    runs = []
    for path in (str(tmp_path), directories):
        model, optimizer = build(
            placement_policy="nvme",
            dtype="bf16",
            nvme_path=path,
            host_memory="400KiB",  # so parameters wait on disk while they are made
            io_engine=io_engine,
        )
        scratch = optimizer.engine.chunk_groups[0].disk.scratch
        assert len(scratch.members) == (3 if path is directories else 1)
        assert sum(member.nbytes for member in scratch.members) == scratch.nbytes
        assert all(member.nbytes > scratch.nbytes // 4 for member in scratch.members)
        assert ("striped" in " ".join(optimizer.engine.notes)) == (path is directories)
        runs.append(train(model, optimizer, batches(4), accumulate=2, clip=1.0))
    assert runs[0].same_bits(runs[1])
    assert len(set(runs[0].losses)) == len(runs[0].losses)


def test_measuring_is_no_traffic(
    directories: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bandwidth, store):
        monkeypatch.setattr(module, "AREA_BYTES", 64 << 10)
    sizes = dict.fromkeys(bandwidth._REQUEST_BYTES, 32 << 10)
    monkeypatch.setattr(bandwidth, "_REQUEST_BYTES", sizes)
    monkeypatch.setattr(bandwidth, "WINDOW_S", 0.01)
    monkeypatch.setattr(MemberFile, "_open", open_as_if_direct)
    traffic = []
    for path in (str(tmp_path), directories):
        _, optimizer = build(placement_policy="nvme", dtype="bf16", nvme_path=path)
        engine = optimizer.engine
        assert ("(measured" in " ".join(engine.notes)) == (path is directories)
        traffic.append(engine.traffic)
        assert (engine.chunk_groups[0].disk.io.stats["read_bytes"] > traffic[-1].disk_read) == (
            path is directories
        )
        engine.close()
    assert traffic[0] == traffic[1]


def open_as_if_direct(member: MemberFile) -> int:
    return os.open(member.directory, os.O_RDWR | os.O_TMPFILE)


def test_nvme_capacity_is_of_all_together(directories: list[str]) -> None:
    with pytest.raises(hetero.HeteroError, match="disk|nvme"):
        build(placement_policy="nvme", nvme_path=directories, nvme_capacity="100KiB")
