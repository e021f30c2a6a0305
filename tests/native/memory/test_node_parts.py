"""native/node_parts: where the parts of an array belong, and pages that are populated there."""

import ctypes
import errno
import mmap
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload import _native
from tests.support.native.io_tools import run_script
from tests.support.numa import (
    CPUS,
    MADVISE,
    SCHED_SETAFFINITY,
    TWO_NODES,
    kernels_nodes,
    numa_nodes,
    resident,
)

HUGE = 2 << 20
BASE = 1 << 30


@given(
    address=st.integers(0, 2 * HUGE).map(lambda offset: BASE + offset),
    nbytes=st.one_of(st.integers(0, 4 * HUGE), st.integers(0, 64 * HUGE)),
    nodes=st.integers(1, 9),
)
def test_parts_cover_an_array_and_are_cut_at_huge_pages(
    address: int, nbytes: int, nodes: int
) -> None:
    parts = _native.numa.node_parts(address, nbytes, nodes)
    ends = [address, *(end for _, end, _ in parts)]
    assert [begin for begin, _, _ in parts] == ends[:-1]
    assert ends[-1] == address + nbytes
    assert all(begin < end for begin, end, _ in parts)
    assert all(end % HUGE == 0 for end in ends[1:-1])
    assert all(node < nodes for _, _, node in parts)
    if nbytes >= nodes * HUGE:
        assert [node for _, _, node in parts] == list(range(nodes))
        for end, node in zip(ends[1:], range(nodes), strict=True):
            assert abs(end - (address + (node + 1) * nbytes / nodes)) <= HUGE / 2 + nodes
    else:
        assert all(node == begin // HUGE % nodes for begin, _, node in parts)


def populated(arena: _native.Arena) -> list[bool]:
    """By slot of a huge page, whether all of it is in memory; a slot is so whole, or not at all."""
    pages = resident(arena.address, arena.nbytes)
    per_slot = HUGE // mmap.PAGESIZE
    slots = [pages[i : i + per_slot] for i in range(0, len(pages), per_slot)]
    assert all(len(set(slot)) == 1 for slot in slots)
    return [slot[0] for slot in slots]


@pytest.mark.parametrize("nodes", [TWO_NODES, [[CPUS[0]], [1022], [1023]]])
def test_slots_are_populated_and_threads_go_back(nodes: list[list[int]]) -> None:
    """Also where the kernel refuses a node, as it does CPUs that do not exist."""
    arena = _native.Arena(8 * HUGE, 4 * HUGE)
    with numa_nodes(nodes):
        _native.set_threads(3)
        os.sched_setaffinity(0, CPUS[:1])
        try:
            arena.spread(1, 1, [(0, HUGE), (HUGE, 2 * HUGE)])
            assert os.sched_getaffinity(0) == set(CPUS[:1])
        finally:
            os.sched_setaffinity(0, CPUS)
        assert populated(arena) == [False] * 4 + [True] * 3 + [False]
        ctypes.memset(arena.address, 7, arena.nbytes)
        arena.spread(0, 2, [(0, 4 * HUGE)])
        assert ctypes.string_at(arena.address, arena.nbytes) == b"\7" * arena.nbytes
        arena.discard(0, 4 * HUGE)
        arena.spread(0, 1, [(0, 4 * HUGE)])
        assert populated(arena) == [True] * 8
        assert ctypes.string_at(arena.address, 4 * HUGE) == bytes(4 * HUGE)


def test_slots_are_populated_on_one_node() -> None:
    arena = _native.Arena(4 * HUGE, HUGE)
    with numa_nodes(TWO_NODES):
        arena.put_on_node(1, 2, 1)
    assert populated(arena) == [False, True, True, False]
    ctypes.memset(arena.address, 7, arena.nbytes)
    arena.put_on_node(0, 4, 0)
    assert ctypes.string_at(arena.address, arena.nbytes) == b"\7" * arena.nbytes
    with pytest.raises(ValueError, match="outside an arena"):
        arena.put_on_node(3, 2, 0)


@pytest.mark.skipif(_native.numa.count() == 1, reason="this machine has one node, or uses one")
def test_what_is_put_on_a_node_is_there() -> None:
    arena = _native.Arena(_native.numa.count() * HUGE, HUGE)
    nodes = []
    for node in range(_native.numa.count()):
        arena.put_on_node(node, 1, node)
        nodes += set(kernels_nodes(arena.address + node * HUGE, HUGE))
    assert len(nodes) == len(set(nodes)) == _native.numa.count()


def test_of_small_arrays_whole_pages_are_populated() -> None:
    page = mmap.PAGESIZE
    arena = _native.Arena(8 * page, 8 * page)
    with numa_nodes(TWO_NODES):
        arena.spread(0, 1, [(0, page), (2 * page - 1, page + 2), (5 * page, 0)])
    found = resident(arena.address, arena.nbytes)
    assert found == [True, False, True, False, False, False, False, False]


def test_on_one_node_nothing_is_populated() -> None:
    arena = _native.Arena(2 * HUGE, HUGE)
    with numa_nodes([CPUS]):
        arena.spread(0, 2, [(0, HUGE)])
    assert populated(arena) == [False, False]


@pytest.mark.parametrize(("slot", "array"), [(2, (0, 1)), (1, (0, HUGE + 1)), (0, (3 * HUGE, 0))])
def test_what_is_outside_is_refused(slot: int, array: tuple[int, int]) -> None:
    arena = _native.Arena(2 * HUGE, HUGE)
    with numa_nodes(TWO_NODES), pytest.raises(ValueError, match="outside an arena"):
        arena.spread(slot, 1, [array])


def test_somebody_elses_memory_is_left_alone() -> None:
    owner = mmap.mmap(-1, HUGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    with numa_nodes(TWO_NODES):
        _native.Arena.over(address, HUGE, 1, 0, owner).spread(0, 1, [(0, HUGE)])
    assert not any(resident(address, HUGE))


@pytest.mark.parametrize(
    ("syscall", "refusal"),
    [
        pytest.param(MADVISE, errno.EINVAL, id="populating"),  # as Linux before 5.14 does
        pytest.param(SCHED_SETAFFINITY, errno.EPERM, id="affinity"),
    ],
)
def test_what_the_kernel_refuses_loses_nothing(syscall: int, refusal: int) -> None:
    found = run_script(f"""
        import ctypes
        from offload import _native
        from tests.support.numa import TWO_NODES, resident
        from tests.support.native.seccomp import refuse
        HUGE = {HUGE}
        _native.numa.set_nodes(TWO_NODES)
        _native.set_threads(2)
        refuse({syscall}, {refusal})
        arena = _native.Arena(6 * HUGE, 2 * HUGE)
        ctypes.memset(arena.address, 7, HUGE)
        arena.spread(0, 2, [(0, HUGE), (HUGE, HUGE)])
        pages = resident(arena.address, arena.nbytes)
        print(all(pages[: len(pages) * 2 // 3]), any(pages[len(pages) * 2 // 3 :]))
        print(ctypes.string_at(arena.address, 4 * HUGE) == b"\\7" * HUGE + bytes(3 * HUGE))
        """)
    assert found.split() == ["True", "False", "True"]


@pytest.mark.skipif(_native.numa.count() == 1, reason="this machine has one node, or uses one")
def test_parts_lie_on_their_nodes() -> None:
    nodes = _native.numa.count()
    nbytes = 8 * nodes * HUGE
    arena = _native.Arena(2 * nbytes, 2 * nbytes)
    arena.spread(0, 1, [(0, nbytes), (nbytes, nbytes)])
    seen = []
    for array in (arena.address, arena.address + nbytes):
        for begin, end, _ in _native.numa.node_parts(array, nbytes, nodes):
            (node,) = set(kernels_nodes(begin, end - begin))
            seen.append(node)
    assert len(set(seen[:nodes])) == nodes
    assert seen[:nodes] == seen[nodes:]
