"""offload/device/home_copy: homes between DEVICE and RAM or the file, in tiles; failures end it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload import _native
from offload.cache.slot_cache import Transfers
from offload.device.backend import EmulatedBackend
from offload.device.grad_offload import BUFFERS
from offload.device.home_copy import HomeCopier
from offload.disk.scratch_file import ScratchFile
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier

PAGE = 4096
BUFFER = 2 * PAGE
WAYS = ("to_file", "from_file", "to_ram", "from_ram")


class Rig:
    def __init__(self, path: Path) -> None:
        self.ledger = Ledger(dict.fromkeys(Tier))
        self.engine = _native.IoEngine("threads", threads=2)
        self.scratch = ScratchFile(str(path), self.ledger, Account.FILE)
        self.offset = self.scratch.reserve(64 * PAGE)
        self.transfers = Transfers(self.engine, self.scratch)
        self.backend = EmulatedBackend(1e11)
        self.buffers = HostArena(BUFFERS, BUFFER, self.ledger, Account.LINK)
        self.buffers.commit(0, BUFFERS)
        self.home_copier = HomeCopier(self.backend, self.buffers, self.transfers)

    def close(self) -> None:
        self.backend.close()
        self.transfers.close()
        self.engine.close()
        self.scratch.close()
        self.buffers.close()
        assert set(self.ledger.in_use_bytes.values()) == {0}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def randoms(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def test_bytes_go_out_and_come_back(rig: Rig) -> None:
    for pages in (1, 2, 3, 6, 7, 32):
        device, before = randoms(pages * PAGE), rig.backend.d2h_bytes
        ram, back, again = (torch.zeros_like(device) for _ in range(3))
        rig.home_copier.to_ram(device, ram)
        assert torch.equal(ram, device)
        rig.home_copier.from_ram(ram, back)
        assert torch.equal(back, device)
        rig.home_copier.to_file(device, rig.offset + PAGE)
        rig.home_copier.from_file(rig.offset + PAGE, again)
        assert torch.equal(again, device)
        assert rig.backend.d2h_bytes == rig.backend.h2d_bytes == before + 2 * len(device)


def test_ram_need_not_be_whole_pages(rig: Rig) -> None:
    device = randoms(3 * BUFFER + 100)
    ram = torch.zeros_like(device)
    rig.home_copier.to_ram(device, ram)
    assert torch.equal(ram, device)
    rig.home_copier.from_ram(randoms(0), torch.zeros(0, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("way", "side"),
    [*((way, "link") for way in WAYS), *((way, "file") for way in WAYS if "file" in way)],
)
def test_a_failure_is_told_and_nothing_is_under_way(rig: Rig, way: str, side: str) -> None:
    device, other = randoms(12 * PAGE), torch.zeros(12 * PAGE, dtype=torch.uint8)
    of_file = {"to_file": (device, rig.offset), "from_file": (rig.offset, other)}
    ends = of_file.get(way, (device, other))
    is_out, buffers = way.startswith("to"), rig.buffers.view(0, BUFFERS, torch.uint8)
    for nth in (0, 1, 2, 5):
        if side == "link":
            (rig.backend.d2h if is_out else rig.backend.h2d).inject(nth)
        else:
            rig.engine.inject("write" if is_out else "read", nth, errno.EIO)
        with pytest.raises(OSError, match=r"failed|Input/output"):
            getattr(rig.home_copier, way)(*ends)
        assert rig.engine.stats["in_flight"] == 0
        buffers.fill_(7)  # nobody writes to it any more
        assert (buffers == 7).all()
        getattr(rig.home_copier, way)(*ends)
