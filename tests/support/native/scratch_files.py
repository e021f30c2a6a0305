"""What tests of scratch files need: memory, and transfers of it."""

import torch

from offload import _native
from offload.cache.slot_cache import Transfers
from offload.disk.scratch_file import ScratchFile
from offload.memory.sizes import PAGE_BYTES

MIB = 1 << 20


def memory_of(nbytes: int) -> tuple[torch.Tensor, memoryview]:
    """Page-aligned memory as a tensor, and as what the file is read into."""
    tensor = torch.from_dlpack(_native.Arena(nbytes).export(0, nbytes))
    tensor.random_(0, 256, generator=torch.Generator().manual_seed(nbytes))
    return tensor, memoryview(tensor.numpy())


def write_to(scratch: ScratchFile, memory: memoryview, offset: int) -> None:
    """Writes page-aligned memory, and returns when it is written."""
    _move(scratch, "write", memory, offset)


def read_from(scratch: ScratchFile, memory: memoryview, offset: int) -> None:
    """Fills page-aligned memory, and returns when it is read."""
    _move(scratch, "read", memory, offset)


def _move(scratch: ScratchFile, verb: str, memory: memoryview, offset: int) -> None:
    engine = _native.IoEngine("threads", threads=1)
    transfers = Transfers(engine, scratch)
    try:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        getattr(transfers, verb)(address, len(memory), offset).wait()
    finally:
        transfers.close()
        engine.close()


def assert_round_trip(scratch: ScratchFile, pages: int = 3) -> None:
    offset = scratch.reserve(pages * PAGE_BYTES)
    wrote, memory = memory_of(pages * PAGE_BYTES)
    write_to(scratch, memory, offset)
    read, memory = memory_of(pages * PAGE_BYTES)
    read.zero_()
    read_from(scratch, memory, offset)
    assert torch.equal(read, wrote)
