"""What a forked child has of an engine and its memory: nothing that costs or holds."""

import signal
import textwrap

import pytest

from tests.support.native.io_tools import needs_uring, run_script

PRELUDE = """
import ctypes, os, re, sys, time, warnings
from offload import _native
warnings.simplefilter("ignore")  # Python's own about threads and fork
MIB = 1 << 20

def kib(file, *fields):
    text = open(file).read()
    return sum(int(kib) for f in fields for kib in re.findall(rf"^{f}:\\s+(\\d+) kB", text, re.M))

def private_mib():
    return kib("/proc/self/smaps_rollup", "Private_Clean", "Private_Dirty") // 1024

def in_child(call):
    '''What `call` returns in a forked child, or the signal that has ended it.'''
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(sink, str(call()).encode())
        os._exit(0)
    os.close(sink)
    _, status = os.waitpid(child, 0)
    return -status if os.WIFSIGNALED(status) else eval(os.read(source, 100_000))

def full(nbytes):
    arena = _native.Arena(nbytes)
    ctypes.memset(arena.address, 7, nbytes)
    return arena

def byte(arena):
    return ctypes.c_ubyte.from_address(arena.address + arena.nbytes // 2).value
"""


def run(script: str) -> list[str]:
    return run_script(PRELUDE + textwrap.dedent(script)).splitlines()


def test_registered_memory_is_not_copied_for_a_child(kind):
    """Linux copies pinned pages at fork() at once, and direct transfers pin what is not."""
    out = run(f"""
        engine = _native.IoEngine({kind!r})
        other = full(MIB)
        before = in_child(private_mib)
        arena = full(64 * MIB)
        huge = kib("/proc/self/smaps_rollup", "AnonHugePages")
        engine.register(arena)
        print(in_child(private_mib) - before < 32)
        print(kib("/proc/self/smaps_rollup", "AnonHugePages") >= huge)
        print(in_child(lambda: byte(arena)), byte(arena), in_child(lambda: byte(other)))
        engine.unregister(arena)
        engine.close()
        """)
    assert out == ["True", "True", f"{-signal.SIGSEGV} 7 7"]


def test_a_child_gets_no_tensor_over_zeros():
    """A parameter whose copy is in a slot would read 0 in a worker of a DataLoader."""
    out = run("""
        def export(arena):
            try:
                return bool(arena.export(0, MIB))
            except RuntimeError as error:
                return str(error)

        arena, other = full(4 * MIB), full(4 * MIB)
        arena.wipe_on_fork(0, 4 * MIB)
        print(export(arena), in_child(lambda: repr(export(arena))), in_child(lambda: export(other)))
        """)
    (found,) = out
    assert found.startswith("True this memory belongs to process ")
    assert found.endswith(": use it there, because it is left out here True")


def test_a_tensor_from_before_cannot_be_read_in_a_child():
    """It would be zeros: wrong numbers, and nobody is told."""
    out = run("""
        import torch
        arena = full(4 * MIB)
        before = torch.from_dlpack(arena.export(0, MIB))
        arena.wipe_on_fork(0, 2 * MIB)
        arena.wipe_on_fork(0, 4096)  # once more, as what is committed anew
        read = lambda: int(before[-1])
        print(read(), in_child(read), in_child(lambda: in_child(read)), read())
        """)
    assert out == [f"7 {-signal.SIGSEGV} {-signal.SIGSEGV} 7"]


def test_part_of_an_arena_can_be_left_out_of_children():
    out = run("""
        arena = full(4 * MIB)
        arena.wipe_on_fork(MIB + 1, 2 * MIB)
        at = lambda offset: ctypes.c_ubyte.from_address(arena.address + offset).value
        places = [0, MIB - 1, MIB, 3 * MIB, 3 * MIB + 4096, 4 * MIB - 1]
        print([in_child(lambda: at(place)) for place in places])
        print([at(place) for place in places])
        try:
            arena.wipe_on_fork(MIB, 4 * MIB)
        except ValueError as error:
            print(error)
        owner = bytearray(8192)
        _native.Arena.over(arena.address, 8192, 1, 0, owner).wipe_on_fork(0, 8192)
        print(in_child(lambda: at(0)))
        """)
    assert out == [
        f"[7, 7, {-signal.SIGSEGV}, {-signal.SIGSEGV}, 7, 7]",
        "[7, 7, 7, 7, 7, 7]",
        "4194304 bytes at offset 1048576 are outside an arena of 4194304 bytes",
        "7",
    ]


def test_a_child_has_no_descriptor_of_an_engine(kind, tmp_path):
    """Else an unlinked file's space, and a ring's pins, would last as long as the child."""
    out = run(f"""
        def ours():
            found = []
            for fd in os.listdir("/proc/self/fd"):
                try:
                    name = os.readlink(f"/proc/self/fd/{{fd}}")
                except FileNotFoundError:
                    continue  # the directory's own
                if "anon_inode" in name or "(deleted)" in name:
                    found.append(name)
            return found

        engine = _native.IoEngine({kind!r})
        fd = os.open({str(tmp_path)!r}, os.O_TMPFILE | os.O_RDWR)
        engine.add_file(fd, "scratch")
        os.close(fd)
        print(len(ours()) > 0, in_child(ours))
        engine.close()
        print(ours())
        """)
    assert out == ["True []", "[]"]


@needs_uring
def test_close_unpins_memory_although_somebody_else_has_the_ring():
    out = run("""
        engine = _native.IoEngine("io_uring")
        arena = full(32 * MIB)
        assert engine.register(arena)
        print(kib("/proc/self/status", "VmPin") // 1024)
        # Past the C library, whose fork() calls what closes the ring.
        clone = 56 if os.uname().machine == "x86_64" else 220
        child = ctypes.CDLL(None).syscall(clone, 17, 0, 0, 0, 0)
        if child == 0:
            time.sleep(100)
            os._exit(0)
        engine.close()
        deadline = time.monotonic() + 10  # the kernel may take its time
        while kib("/proc/self/status", "VmPin") and time.monotonic() < deadline:
            time.sleep(0.01)
        print(kib("/proc/self/status", "VmPin"))
        os.kill(child, 9)
        os.waitpid(child, 0)
        """)
    if out[0] == "0":
        pytest.skip("the kernel does not count what it pins")
    assert out == ["32", "0"]
