"""native/uring_engine: memory that is registered with the kernel."""

import ctypes
import gc
import mmap
import os
import resource
import threading

import pytest
import torch

from offload import _native
from tests.support.native.io_tools import (
    BLOCK,
    MIB,
    Memory,
    add_file,
    needs_uring,
    run_script,
)

PAGES = 16 * MIB


def mapped_again_and_again(nbytes: int) -> _native.Arena:
    """An arena of that size whose pages are those of its first `PAGES` bytes."""
    space = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    keep = ctypes.c_char.from_buffer(space)
    begin = ctypes.addressof(keep)
    pages = os.memfd_create("pages")
    os.truncate(pages, PAGES)
    map_at = ctypes.CDLL(None).mmap
    number, map_at.restype = ctypes.c_int, ctypes.c_void_p
    map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    fixed, both = 0x10, mmap.PROT_READ | mmap.PROT_WRITE
    for at in range(begin, begin + nbytes, PAGES):
        assert map_at(at, PAGES, both, mmap.MAP_SHARED | fixed, pages, 0) == at
    os.close(pages)
    return _native.Arena.over(begin, nbytes, 1, 0, keep)


def test_registered_arena_is_kept_and_cannot_be_discarded(kind, tmp_path):
    if kind == "threads":
        engine = _native.IoEngine(kind)
        memory = Memory(BLOCK)
        assert not engine.register(memory.arena)
        memory.arena.discard(0, BLOCK)
        engine.unregister(memory.arena)
        engine.close()
        return
    engine = _native.IoEngine(kind, block_bytes=BLOCK)
    memory = Memory(8 * MIB)
    assert engine.register(memory.arena)
    assert engine.register(memory.arena)
    with pytest.raises(RuntimeError, match="unregister it first"):
        memory.arena.discard(0, 4096)
    # The memory is still written to after its Python objects are gone.
    address, nbytes = memory.address, memory.arena.nbytes
    file = add_file(engine, tmp_path, nbytes)
    arena = memory.arena
    del memory, arena
    gc.collect()
    engine.read(file, address, nbytes, 0).wait()
    engine.close()


def test_unregister_waits_and_lets_go(engine, tmp_path):
    memory = Memory(64 * BLOCK)
    file = add_file(engine, tmp_path)
    memory.randomise()
    for _ in range(3):
        engine.register(memory.arena)
        op = engine.write(file, memory.address, 64 * BLOCK, 0)
        engine.unregister(memory.arena)
        if engine.kind == "io_uring":
            assert op.done()
        op.wait()
        memory.arena.discard(0, 4096)
    engine.unregister(memory.arena)
    engine.read(file, memory.address, 64 * BLOCK, 0).wait()
    assert not memory.bytes[:4096].any()


@needs_uring
def test_unregister_does_not_wait_for_transfers_of_other_memory(piped, tmp_path):
    engine, pipe = piped(2)
    memory, other = Memory(8 * BLOCK), Memory(BLOCK)
    file = add_file(engine, tmp_path, 8 * BLOCK)
    engine.register(memory.arena)
    ops = [engine.read(pipe.file, other.address, 4096, 0)]
    ops.append(engine.read(file, memory.address, 8 * BLOCK, 0))
    done = threading.Thread(target=engine.unregister, args=(memory.arena,), daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive()
    assert [op.done() for op in ops] == [False, True]
    pipe.feed(4096)
    ops[0].wait()


@needs_uring
def test_transfer_across_the_edge_of_registered_memory(tmp_path):
    engine = _native.IoEngine("io_uring", block_bytes=BLOCK)
    memories = sorted((Memory(4 * MIB) for _ in range(4)), key=lambda memory: memory.address)
    for memory in memories[::2]:
        assert engine.register(memory.arena)
    file = add_file(engine, tmp_path)
    for memory in memories:
        want = memory.randomise()
        engine.write(file, memory.address + 100, 4 * MIB - 100, 0).wait()
        memory.bytes.zero_()
        engine.read(file, memory.address + 100, 4 * MIB - 100, 0).wait()
        assert torch.equal(memory.bytes[100:], want[100:])
    engine.close()


@needs_uring
def test_locked_memory_limit_falls_back_to_plain_transfers(tmp_path):
    out = run_script(f"""
        import ctypes, os, resource
        from offload import _native
        fd = os.open({str(tmp_path)!r}, os.O_TMPFILE | os.O_RDWR)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)  # root is not limited
        engine = _native.IoEngine("io_uring")
        arena = _native.Arena(8 << 20)
        print(engine.register(arena))
        print(engine.notes)
        arena.discard(0, arena.nbytes)
        file = engine.add_file(fd, "scratch")
        ctypes.memset(arena.address, 3, arena.nbytes)
        engine.write(file, arena.address, arena.nbytes, 0).wait()
        ctypes.memset(arena.address, 0, arena.nbytes)
        engine.read(file, arena.address, arena.nbytes, 0).wait()
        assert ctypes.string_at(arena.address, arena.nbytes) == bytes([3]) * arena.nbytes
        engine.close()
        """)
    registered, notes = out.splitlines()
    assert registered == "False"
    assert "registered buffers refused for 8388608 bytes" in notes
    assert "1048576 bytes" in notes


@needs_uring
def test_a_kernel_without_sparse_tables_is_noted_once(tmp_path):
    out = run_script("""
        import errno
        from offload import _native
        from tests.support.native.seccomp import IO_URING_REGISTER, refuse
        refuse(IO_URING_REGISTER, errno.EINVAL, second_is=15)  # IORING_REGISTER_BUFFERS2
        engine = _native.IoEngine("io_uring")
        arena = _native.Arena(4096)
        print(engine.register(arena), engine.register(arena))
        engine.unregister(arena)
        print(len(engine.notes), engine.notes[0])
        engine.close()
        """)
    registered, notes = out.splitlines()
    assert registered == "False False"
    assert notes.startswith("1 registered buffers refused: Invalid argument")


@needs_uring
def test_arena_larger_than_one_kernel_buffer(tmp_path):
    """The same pages over and over: a GiB of different ones takes seconds to be made."""
    nbytes = (1 << 30) + PAGES
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() != 0 and limit not in (resource.RLIM_INFINITY, -1) and limit < nbytes:
        pytest.skip("the locked-memory limit is too small")
    engine = _native.IoEngine("io_uring", block_bytes=MIB)
    arena = mapped_again_and_again(nbytes)
    assert engine.register(arena), engine.notes
    file = add_file(engine, tmp_path)
    # Blocks before, across and after the seam between the two kernel buffers.
    begin = (1 << 30) - 2 * MIB - 4096
    part = torch.from_dlpack(arena.export(begin, 5 * MIB))
    want = part.random_(0, 256).clone()
    engine.write(file, arena.address + begin, 5 * MIB, 0).wait()
    part.zero_()
    engine.read(file, arena.address + begin, 5 * MIB, 0).wait()
    assert torch.equal(part, want)
    engine.close()
