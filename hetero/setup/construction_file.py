"""The scratch file in which parameters under construction wait."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import torch

from hetero.stand_ins.tile_changes import TileChange, largest_tile, tiles
from offload.disk.scratch_file import ScratchFile
from offload.errors import HeteroError
from offload.memory.ledger import Ledger
from offload.memory.sizes import PAGE_BYTES, round_up
from offload.memory.tiers import Account

BLOCK_BYTES = 4 << 20  # of one transfer to or from the file


class ConstructionFile:
    """Bytes of offloaded parameters, in a file that is made when the first ones are written."""

    def __init__(self, paths: Sequence[str], ledger: Ledger) -> None:
        self._paths = paths
        self._ledger = ledger
        self._file: ScratchFile | None = None

    @property
    def notes(self) -> list[str]:
        """What the user should know of the file; nothing after close()."""
        return self._file.notes if self._file is not None else []

    def write(self, flat: torch.Tensor, space: slice) -> slice:
        """Writes bytes to `space`, or to a new one if they do not fit there. Returns where."""
        if self._file is None:
            self._file = ScratchFile(self._paths, self._ledger, Account.INIT)
        if space.stop - space.start < flat.numel():
            offset = self._file.reserve(flat.numel())
            space = slice(offset, offset + flat.numel())
        for begin, block in _blocks(flat.numel()):
            part = flat[begin : begin + len(block)]
            torch.frombuffer(block, dtype=torch.uint8)[: part.numel()].copy_(part)
            whole_pages = block[: round_up(part.numel(), PAGE_BYTES)]
            self._file.write_from(whole_pages, space.start + begin)
        return space

    def change(self, space: slice, nbytes: int, dtype: torch.dtype, change: TileChange) -> None:
        """Makes a change to the first `nbytes` of a space, in which values of `dtype` are."""
        assert self._file is not None
        itemsize = dtype.itemsize
        most = largest_tile(BLOCK_BYTES // itemsize) * itemsize
        block = memoryview(mmap.mmap(-1, round_up(min(most, nbytes), PAGE_BYTES)))
        for tile in tiles(nbytes // itemsize, BLOCK_BYTES // itemsize):
            numel, offset = tile.stop - tile.start, space.start + tile.start * itemsize
            whole_pages = block[: round_up(numel * itemsize, PAGE_BYTES)]
            if not change.fills:
                self._file.read_into(whole_pages, offset)
            change.apply(torch.frombuffer(block, dtype=dtype)[:numel])
            self._file.write_from(whole_pages, offset)

    def read_into(self, raw: torch.Tensor, offset: int) -> None:
        """Fills `raw` with the bytes from `offset` on."""
        for begin, part in self.read(offset, raw.numel()):
            raw[begin : begin + part.numel()] = part

    def elements(
        self, space: slice, wanted: slice, dtype: torch.dtype
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first element, values) of those of a space; they are valid until the next."""
        itemsize = dtype.itemsize
        first = wanted.start * itemsize // PAGE_BYTES * PAGE_BYTES
        skip = wanted.start * itemsize - first
        for begin, raw in self.read(space.start + first, wanted.stop * itemsize - first):
            yield (first + begin + skip) // itemsize, raw[skip:].view(dtype)
            skip = 0

    def read(self, offset: int, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first byte after `offset`, bytes); they are valid until the next ones."""
        if self._file is None:
            raise HeteroError(
                "a parameter's values went when hetero.initialize() had placed another model of "
                "the same ZeroInitContext; build one model in each ZeroInitContext"
            )
        for begin, block in _blocks(nbytes):
            wanted = min(len(block), nbytes - begin)
            self._file.read_into(block[: round_up(wanted, PAGE_BYTES)], offset + begin)
            yield begin, torch.frombuffer(block, dtype=torch.uint8)[:wanted]

    def close(self) -> None:
        """Frees the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _blocks(nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Yields (offset, page-aligned block) over `nbytes`; every block is the same memory."""
    if not nbytes:  # a rank's part of a parameter of few elements
        return
    size = min(BLOCK_BYTES, round_up(nbytes, PAGE_BYTES))
    memory = memoryview(mmap.mmap(-1, size))
    for begin in range(0, nbytes, size):
        yield begin, memory
