"""A cache over a real file, for its tests."""

import tempfile
from collections.abc import Callable

import torch

from offload import _native
from offload.cache.slot_cache import FileBacking, SlotState, Transfers, UseOrder, WriteBackCache
from offload.disk.scratch_file import Extent, ScratchFile
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier
from tests.support.native.scratch_files import read_from, write_to

SLOT = 8192
PAGE = 4096
UINT8 = torch.uint8


def next_use(order: UseOrder, chunk: int) -> int:
    """How many uses from now `chunk` is needed; a large number if it is not known to be."""
    best = order._best
    if best is None:
        return 1
    distance = best.distance(chunk)
    return len(best.uses) + 1 if distance is None else distance


class Rig:
    """A cache of `slots` slots over a file with one extent per entry of `runs`."""

    def __init__(self, slots: int, runs: list[int]) -> None:
        self.ledger = Ledger({Tier.HOST: slots * SLOT})
        # One thread, so that transfers and the faults injected into them keep their order.
        self.engine = _native.IoEngine("threads", threads=1)
        self.scratch = ScratchFile(tempfile.gettempdir(), self.ledger, Account.PARAM)
        self.transfers = Transfers(self.engine, self.scratch)
        self.arena = HostArena(slots, SLOT, self.ledger, Account.GATHERED)
        self.order = UseOrder()
        self.extents: dict[int, Extent] = {}
        for chunk, run in enumerate(runs):
            # Every other chunk ends a page before its last slot does.
            nbytes = run * SLOT - PAGE * (chunk % 2)
            self.extents[chunk] = Extent(self.scratch.reserve(run * SLOT), nbytes, run)
            self.put(chunk, pattern(nbytes, chunk))
        self.cache = WriteBackCache(
            self.arena,
            FileBacking(
                self.arena,
                self.transfers,
                self.extents,
                lambda chunk: self.before_read(chunk),
                lambda chunk: self.before_write(chunk),
            ),
            dict(enumerate(runs)),
            self.order,
            "chunk {}".format,
        )
        self.reads: list[int] = []
        self.writes: list[int] = []
        # Tests may put others in their place.
        self.before_read: Callable[[int], object] = self.reads.append
        self.before_write: Callable[[int], object] = self.writes.append

    def bounce(self, nbytes: int) -> torch.Tensor:
        return torch.from_dlpack(_native.Arena(nbytes).export(0, nbytes))

    def put(self, chunk: int, content: torch.Tensor) -> None:
        aligned = self.bounce(len(content)).copy_(content)
        write_to(self.scratch, memoryview(aligned.numpy()), self.extents[chunk].offset)

    def on_file(self, chunk: int) -> torch.Tensor:
        aligned = self.bounce(self.extents[chunk].nbytes)
        read_from(self.scratch, memoryview(aligned.numpy()), self.extents[chunk].offset)
        return aligned

    def tensor(self, chunk: int) -> torch.Tensor:
        """A pin on what is transferred of the chunk."""
        return self.cache.tensor(chunk, UINT8)[: self.extents[chunk].nbytes]

    def got(self, chunk: int) -> torch.Tensor:
        self.cache.get(chunk)
        return self.tensor(chunk)

    def use(self, chunk: int) -> torch.Tensor:
        self.order.note(chunk)
        return self.got(chunk)

    def held(self) -> set[int]:
        return {chunk for chunk in self.extents if self.cache.holds(chunk)}

    def state(self, chunk: int) -> SlotState:
        return self.cache._entries[chunk].state

    def is_dirty(self, chunk: int) -> bool:
        """Whether it is held with bytes that the file does not have."""
        return self.cache.holds(chunk) and self.state(chunk) is SlotState.DIRTY

    def close(self) -> None:
        self.cache.close()
        self.transfers.close()
        self.engine.close()
        self.scratch.close()
        self.arena.close()


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=UINT8, generator=torch.Generator().manual_seed(seed)
    )
