"""nvme_path with several directories: the same numbers, and every disk takes part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hetero
from offload.disk import scratch_file as store
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
            debug={"io_engine": io_engine},
        )
        scratch = optimizer.engine.chunk_groups[0].disk.scratch
        assert len(scratch.members) == (3 if path is directories else 1)
        assert sum(member.nbytes for member in scratch.members) == scratch.nbytes
        assert all(member.nbytes > scratch.nbytes // 4 for member in scratch.members)
        assert ("striped" in " ".join(optimizer.engine.notes)) == (path is directories)
        runs.append(train(model, optimizer, batches(4), accumulate=2, clip=1.0))
    assert runs[0].same_bits(runs[1])
    assert len(set(runs[0].losses)) == len(runs[0].losses)


def test_nvme_capacity_is_of_all_together(directories: list[str]) -> None:
    with pytest.raises(hetero.HeteroError, match="disk|nvme"):
        build(placement_policy="nvme", nvme_path=directories, nvme_capacity="100KiB")
