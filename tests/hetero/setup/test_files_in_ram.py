"""nvme_path on a filesystem whose files are RAM: refused, or counted as RAM."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.config import Config
from offload.disk.directories import mounted_at, ram_filesystem
from offload.memory.tiers import Tier
from tests.support.training.small_net import Net

SHM = "/dev/shm"


@pytest.fixture
def in_ram() -> Iterator[str]:
    """A folder of a true RAM filesystem."""
    if not os.access(SHM, os.W_OK) or ram_filesystem(SHM) is None:
        pytest.skip(f"{SHM} is no RAM filesystem that can be written to")
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        yield folder


@pytest.fixture
def as_if_in_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that the kernel seems to have on a tmpfs."""
    folder = tmp_path / "ram"
    folder.mkdir()

    def mounted(path: Path) -> tuple[str, str]:
        return ("tmpfs", "tmpfs") if path == folder.resolve() else mounted_at(path)

    monkeypatch.setattr("offload.disk.directories.mounted_at", mounted)
    return str(folder)


def losses(**options: Any) -> tuple[list[float], hetero.HybridAdam]:
    torch.manual_seed(0)
    model = Net()
    optimizer = hetero.HybridAdam(model.parameters(), lr=1e-2)
    hetero.initialize(
        model, optimizer, placement_policy="nvme", dtype="fp32", chunk_numel=4096, **options
    )
    found = []
    for _ in range(3):
        loss = model(torch.ones(4, 64)).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, optimizer


def test_it_is_refused_by_name(in_ram: str) -> None:
    fact = rf"of type tmpfs, whose files are RAM.*debug={{'allow_ram_filesystem': True}}.*{in_ram}"
    with pytest.raises(hetero.StoreError, match=fact):
        hetero.ZeroInitContext(placement_policy="nvme", nvme_path=in_ram)
    with pytest.raises(hetero.StoreError, match=fact):
        losses(nvme_path=in_ram)


def test_a_link_to_it_is_refused(in_ram: str, tmp_path: Path) -> None:
    (tmp_path / "nvme").symlink_to(in_ram)
    with pytest.raises(hetero.StoreError, match="whose files are RAM"):
        Config.make(nvme_path=tmp_path / "nvme")


def test_what_is_allowed_is_taken_from_host_memory(in_ram: str, tmp_path: Path) -> None:
    found, optimizer = losses(
        nvme_path=in_ram,
        debug={"allow_ram_filesystem": True},
        host_memory="1MiB",
        nvme_capacity="640KiB",
    )
    ledger = optimizer.engine.ledger
    assert ledger.budget_bytes["host"] == 384 << 10
    assert 0 < ledger.peak_bytes["disk"] <= 640 << 10
    assert ledger.peak_bytes["host"] + ledger.peak_bytes["disk"] <= 1 << 20
    (note,) = [note for note in optimizer.engine.notes if "are RAM" in note]
    assert "640.0 KiB of host_memory are for them" in note
    optimizer.engine.close()
    on_disk, other = losses(nvme_path=tmp_path, host_memory="384KiB")
    assert found == on_disk
    other.engine.close()


def test_without_a_capacity_files_get_half(as_if_in_ram: str) -> None:
    config = Config.make(
        nvme_path=as_if_in_ram, debug={"allow_ram_filesystem": True}, host_memory="1MiB"
    )
    assert config.disk_bytes() == config.host_bytes() == 1 << 19
    assert config.budget(Tier.DISK) is None
    free = Config.make(nvme_path=as_if_in_ram, debug={"allow_ram_filesystem": True})
    assert free.disk_bytes() <= 1.1 * free.host_bytes()


def test_one_of_several_folders_is_enough(as_if_in_ram: str, tmp_path: Path) -> None:
    folders = [str(tmp_path), as_if_in_ram]
    with pytest.raises(hetero.StoreError, match="whose files are RAM"):
        Config.make(nvme_path=folders)
    assert Config.make(nvme_path=folders, debug={"allow_ram_filesystem": True}).files_are_ram
    assert not Config.make(nvme_path=tmp_path, debug={"allow_ram_filesystem": True}).files_are_ram


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"durable": True}, r"durable=True: files in .* are RAM, which no loss of power leaves"),
        ({"process_memory": "4GiB"}, r"process_memory=.*no process's own"),
        ({"process_memory": "auto"}, r"process_memory='auto'.*cgroup"),
        (
            {"host_memory": 1 << 20, "nvme_capacity": 1 << 20},
            r"nvme_capacity=1048576 leaves nothing of host_memory=1048576",
        ),
        ({"debug": {"allow_ram_filesystem": "yes"}}, r"allow_ram_filesystem must be True or False"),
    ],
)
def test_what_files_in_ram_would_break(
    options: dict[str, Any], said: str, as_if_in_ram: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Config.make(
            **{"nvme_path": as_if_in_ram, "debug": {"allow_ram_filesystem": True}, **options}
        )
