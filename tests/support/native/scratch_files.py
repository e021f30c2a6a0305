"""What tests of scratch files need: memory to transfer, descriptors that are open."""

import contextlib
import os

import torch

from offload import _native
from offload.disk.scratch_file import ScratchFile
from offload.memory.sizes import PAGE_BYTES

MIB = 1 << 20


def memory_of(nbytes: int) -> tuple[torch.Tensor, memoryview]:
    """Page-aligned memory as a tensor, and as what the file is read into."""
    tensor = torch.from_dlpack(_native.Arena(nbytes).export(0, nbytes))
    tensor.random_(0, 256, generator=torch.Generator().manual_seed(nbytes))
    return tensor, memoryview(tensor.numpy())


def open_fds() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def assert_round_trip(scratch: ScratchFile, pages: int = 3) -> None:
    offset = scratch.reserve(pages * PAGE_BYTES)
    wrote, memory = memory_of(pages * PAGE_BYTES)
    scratch.write_from(memory, offset)
    read, memory = memory_of(pages * PAGE_BYTES)
    read.zero_()
    scratch.read_into(memory, offset)
    assert torch.equal(read, wrote)
