"""native/arena: mapped memory, its exports as tensors, and the pins they hold."""

import gc
import mmap
import subprocess
import sys
import threading
import weakref

import psutil
import pytest
import torch

from offload import _native
from tests.support.native.io_tools import add_file, hold

HUGE = 2 << 20


def resident_bytes(address: int, nbytes: int) -> int:
    """Of the mappings that overlap the range; an arena is a mapping of its own or shares it with
    other anonymous memory, so the callers look at differences."""
    total, counting = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                begin, end = (int(part, 16) for part in head.split("-"))
                counting = begin < address + nbytes and end > address
            elif counting and head == "Rss:":
                total += int(line.split()[1]) * 1024
    return total


def view(arena, offset=0, nbytes=None, pins=None, slot=0):
    nbytes = arena.nbytes - offset if nbytes is None else nbytes
    return torch.from_dlpack(arena.export(offset, nbytes, pins, slot))


def test_size_is_rounded_to_pages_and_memory_is_zero():
    for nbytes in (1, mmap.PAGESIZE, HUGE - 1, HUGE, 3 * HUGE + 5):
        arena = _native.Arena(nbytes)
        assert arena.nbytes == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert arena.address % (HUGE if arena.nbytes >= HUGE else mmap.PAGESIZE) == 0
        assert not view(arena).any()


def mapped_bytes(begin, nbytes):
    """How many of these bytes of the address space are mapped."""
    with open("/proc/self/maps") as maps:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return sum(max(0, min(last, begin + nbytes) - max(first, begin)) for first, last in ranges)


def test_memory_stays_mapped_for_tensors_and_for_nothing_else():
    arena, pins = _native.Arena(64 * HUGE), _native.Pins(1)
    tensor, address, nbytes = view(arena, 0, HUGE, pins), arena.address, arena.nbytes
    del arena
    gc.collect()
    assert mapped_bytes(address, nbytes) == nbytes
    assert int(tensor.fill_(9)[-1]) == 9
    del tensor
    assert pins[0] == 0
    assert mapped_bytes(address, nbytes) < nbytes / 2  # another thread may map something there


def test_an_arena_maps_nothing_beside():
    def beside():
        with open("/proc/self/statm") as statm:
            before = int(statm.read().split()[0]) * mmap.PAGESIZE
            arena = _native.Arena(64 * HUGE)
            statm.seek(0)
            return int(statm.read().split()[0]) * mmap.PAGESIZE - before - arena.nbytes

    # (Threads that end, and Python, map and unmap blocks of their own, but not each time.)
    assert any(0 <= beside() < HUGE for _ in range(10))


def test_pages_are_populated_on_first_touch():
    arena = _native.Arena(32 * HUGE)
    before = resident_bytes(arena.address, arena.nbytes)
    view(arena, 0, HUGE).fill_(1)
    grown = resident_bytes(arena.address, arena.nbytes) - before
    assert HUGE <= grown < 4 * HUGE


def test_impossible_sizes_are_refused():
    more_than_there_is = 2 * (psutil.virtual_memory().total + psutil.swap_memory().total)
    with open("/proc/sys/vm/overcommit_memory") as mode:
        promises_anything = mode.read().strip() == "1"
    for nbytes in (1 << 62, (1 << 64) - 1, *([] if promises_anything else [more_than_there_is])):
        with pytest.raises(MemoryError, match=str(nbytes)):
            _native.Arena(nbytes)
    with pytest.raises(ValueError, match="at least one byte"):
        _native.Arena(0)
    with pytest.raises(TypeError):
        _native.Arena(-1)


def test_export_is_the_memory_itself():
    arena = _native.Arena(4 * mmap.PAGESIZE)
    tensor = view(arena, 100, 50)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (50,)
    assert tensor.stride() == (1,)
    assert tensor.device.type == "cpu"
    assert tensor.data_ptr() == arena.address + 100
    tensor.fill_(7)
    whole = view(arena)
    assert int(whole.sum()) == 7 * 50
    assert view(arena, arena.nbytes, 0).numel() == 0


def test_export_and_discard_outside_are_refused():
    arena = _native.Arena(4096)
    for offset, nbytes in ((0, 4097), (4096, 1), (4097, 0), (1, (1 << 64) - 1)):
        for use in (arena.export, arena.discard):
            with pytest.raises(ValueError, match="outside an arena of 4096 bytes"):
                use(offset, nbytes)


def test_pins_follow_the_last_view():
    arena, pins = _native.Arena(1 << 16), _native.Pins(3)
    assert len(pins) == 3
    first = view(arena, 0, 64, pins, 1)
    second = view(arena, 64, 64, pins, 1)
    assert [pins[i] for i in range(3)] == [0, 2, 0]
    part = first.view(torch.float32)[3:]
    del first
    assert pins[1] == 2
    del part
    assert pins[1] == 1
    del second
    assert pins[1] == 0


def test_capsule_that_is_never_consumed_gives_its_pin_back():
    arena, pins = _native.Arena(4096), _native.Pins(1)
    capsule = arena.export(0, 16, pins, 0)
    assert pins[0] == 1
    del capsule
    assert pins[0] == 0
    with pytest.raises(IndexError):
        pins[1]
    with pytest.raises(IndexError):
        arena.export(0, 16, pins, 1)


def test_pins_end_in_autograd_and_on_other_threads():
    arena, pins = _native.Arena(1 << 16), _native.Pins(1)
    saved = view(arena, 0, 64, pins).view(torch.float32)
    weight = torch.ones(16, requires_grad=True)
    loss = (weight * saved).sum()
    del saved
    assert pins[0] == 1  # autograd keeps it
    loss.backward()
    assert pins[0] == 0

    held = [view(arena, 0, 64, pins)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pins[0] == 0


def test_pin_count_is_atomic():
    arena, pins = _native.Arena(1 << 16), _native.Pins(1)

    def churn():
        for _ in range(2000):
            view(arena, 0, 64, pins)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pins[0] == 0


def test_discard_gives_whole_pages_back():
    arena = _native.Arena(8 * HUGE)
    tensor = view(arena)
    tensor.fill_(5)
    before = resident_bytes(arena.address, arena.nbytes)
    # Starts and ends within a page: those two pages stay.
    arena.discard(HUGE - 1, 4 * HUGE + 2)
    assert before - resident_bytes(arena.address, arena.nbytes) == 4 * HUGE
    assert int(tensor[:HUGE].min()) == 5
    assert not tensor[HUGE : 5 * HUGE].any()
    assert int(tensor[5 * HUGE :].min()) == 5
    arena.discard(1, mmap.PAGESIZE)  # no whole page inside: nothing happens
    assert int(tensor[: 2 * mmap.PAGESIZE].min()) == 5


def test_pages_of_a_transfer_are_not_given_back(tmp_path):
    engine = _native.IoEngine("threads", queue_depth=1, threads=1, block_bytes=4096)
    arena = _native.Arena(4 * HUGE, HUGE)
    file = add_file(engine, tmp_path, 2 * HUGE)
    hold(engine)
    op = engine.read(file, arena.address + HUGE, 2 * HUGE, 0)
    for offset, nbytes in [(0, 4 * HUGE), (HUGE, HUGE), (3 * HUGE - mmap.PAGESIZE, HUGE)]:
        with pytest.raises(RuntimeError, match="a transfer uses slot [12] of the arena"):
            arena.discard(offset, nbytes)
    arena.discard(0, HUGE)
    arena.discard(3 * HUGE, HUGE)
    op.cancel()
    with pytest.raises(OSError, match="cancel"):
        op.wait()
    arena.discard(0, 4 * HUGE)
    engine.close()


# The deleter of an exported tensor is called as a static object of C++ that holds it would.
AFTER_PYTHON = """
import builtins, ctypes, sys
from offload import _native
libc, api = ctypes.CDLL(None), ctypes.pythonapi
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
libc.__cxa_atexit.argtypes = [ctypes.c_void_p] * 3
if sys.argv[1] == "own":
    arena = _native.Arena(1 << 20)
else:
    block = ctypes.create_string_buffer(1 << 20)
    arena = _native.Arena.over(ctypes.addressof(block), 1 << 20, 1, 0, block)
    del block
capsule = arena.export(0, 4096)
tensor = api.PyCapsule_GetPointer(capsule, b"dltensor")
builtins.name = b"used_dltensor"  # kept: the capsule has the pointer alone
api.PyCapsule_SetName(capsule, builtins.name)
deleter = ctypes.c_void_p.from_address(tensor + 56).value
libc.__cxa_atexit(deleter, tensor, tensor)  # (ThreadSanitizer drops it if there is no library)
del arena, capsule
print("to the end", flush=True)
"""


@pytest.mark.parametrize("memory", ["own", pytest.param("another's", marks=pytest.mark.extra)])
def test_a_tensor_may_die_after_python(memory):
    done = subprocess.run(
        [sys.executable, "-c", AFTER_PYTHON, memory], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "to the end\n"), done.stderr


class TestOthersMemory:
    def over(self, block: torch.Tensor) -> _native.Arena:
        return _native.Arena.over(block.data_ptr(), block.nbytes, 1, 0, block)

    def test_tensors_keep_the_owner_alive(self):
        block = torch.arange(64, dtype=torch.uint8)
        alive = weakref.ref(block)
        arena, pins = self.over(block), _native.Pins(2)
        assert (arena.address, arena.nbytes) == (block.data_ptr(), 64)
        views = [torch.from_dlpack(arena.export(16, 8, pins, 1))]
        del block, arena
        assert alive() is not None
        assert views[0].tolist() == list(range(16, 24))
        assert pins[1] == 1
        thread = threading.Thread(target=views.clear)  # the last one may die in any thread
        thread.start()
        thread.join()
        assert pins[1] == 0
        assert alive() is None

    def test_it_has_no_pages_to_give_back(self):
        with pytest.raises(RuntimeError, match="somebody else's"):
            self.over(torch.zeros(64, dtype=torch.uint8)).discard(0, 64)

    def test_nothing_is_refused(self):
        owner = torch.zeros(1)
        alive = sys.getrefcount(owner)
        for address, nbytes in ((0, 64), (4096, 0)):
            with pytest.raises(ValueError, match="arena"):
                _native.Arena.over(address, nbytes, 1, 0, owner)
            assert sys.getrefcount(owner) == alive
