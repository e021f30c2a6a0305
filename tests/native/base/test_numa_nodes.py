"""native/numa_nodes: which nodes there are, and the threads and results of a pool on several."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload import _native
from tests.native.base.test_worker_pool import BLOCK, FP32, Trained, workers, workers_become
from tests.support.native.io_tools import run_script
from tests.support.native.update_arrays import Arrays, gradients, masters
from tests.support.native.update_oracle import Hyper
from tests.support.numa import CPUS, SET_MEMPOLICY, TWO_NODES, numa_nodes


def machine(root: Path, nodes: dict[int, str], memory: str, allowed: str | None) -> str:
    """A tree of /sys and /proc with the CPUs of each node, and the nodes with memory and those
    whose memory may be used; returns its root."""
    folder = root / "sys/devices/system/node"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "has_memory").write_text(memory + "\n")
    for node, cpus in nodes.items():
        (folder / f"node{node}").mkdir(exist_ok=True)
        (folder / f"node{node}/cpulist").write_text(cpus + "\n")
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    line = "" if allowed is None else f"Mems_allowed_list:\t{allowed}\n"
    (root / "proc/self/status").write_text(f"Name:\tpython\nMems_allowed:\tff\n{line}Seccomp:\t0\n")
    return str(root)


EIGHT = list(range(8))
TWO = {0: "0-3", 1: "4-7"}


@pytest.mark.parametrize(
    ("cpus", "nodes", "memory", "allowed", "found"),
    [
        pytest.param(EIGHT, {0: "0-7"}, "0", "0", [EIGHT], id="one-node"),
        pytest.param(EIGHT, TWO, "0-1", "0-1", [[0, 1, 2, 3], [4, 5, 6, 7]], id="two"),
        pytest.param(EIGHT, TWO, "0-1", "0-1023", [[0, 1, 2, 3], [4, 5, 6, 7]], id="all-numbers"),
        pytest.param(
            EIGHT,
            {0: "0,2,4,6", 1: "1,3,5,7"},
            "0-1",
            "0-1",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
            id="odd",
        ),
        pytest.param(
            EIGHT, {0: "0-3", 8: "4-7"}, "0,8", "0,8", [[0, 1, 2, 3], [4, 5, 6, 7]], id="gaps"
        ),
        pytest.param([0, 1, 6], TWO, "0-1", "0-1", [[0, 1], [6]], id="affinity"),
        pytest.param([4, 5], TWO, "0-1", "0-1", [[4, 5]], id="affinity-of-one-node"),
        # CPUs 2 and 3 are offline, and so in no list.
        pytest.param([0, 1, 4], {0: "0-1", 1: "4-7"}, "0-1", "0-1", [[0, 1], [4]], id="offline"),
        pytest.param(
            EIGHT,
            {**TWO, 2: "", 3: ""},
            "0-3",
            "0-3",
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            id="memory-without-cpus",
        ),
        pytest.param(EIGHT, TWO, "0", "0-1", [], id="cpus-without-memory"),
        pytest.param(EIGHT, TWO, "0-1", "1", [], id="cpuset-of-one-memory"),
        pytest.param([4, 5, 6, 7], TWO, "0-1", "1", [[4, 5, 6, 7]], id="cpuset-of-one-node"),
        pytest.param(EIGHT, TWO, "0-1", None, [], id="no-status"),
        pytest.param(EIGHT, {}, "", "0", [], id="no-nodes"),
        pytest.param(EIGHT, {0: "0-x"}, "0", "0", [], id="nonsense"),
        pytest.param([], TWO, "0-1", "0-1", [], id="too-many-cpus-for-a-mask"),
    ],
)
def test_nodes_are_those_whose_cpus_and_memory_may_be_used(
    tmp_path: Path,
    cpus: list[int],
    nodes: dict[int, str],
    memory: str,
    allowed: str | None,
    found: list[list[int]],
) -> None:
    assert _native.numa.usable_nodes(cpus, machine(tmp_path, nodes, memory, allowed)) == found


def test_without_sys_there_are_no_nodes(tmp_path: Path) -> None:
    assert _native.numa.usable_nodes(EIGHT, str(tmp_path)) == []


def as_list(numbers: set[int]) -> str:
    return ",".join(map(str, sorted(numbers)))


@given(
    node_of=st.lists(st.sampled_from([0, 1, 3, 9]), min_size=1, max_size=12),
    with_memory=st.sets(st.sampled_from([0, 1, 3, 9, 20])),
    allowed=st.sets(st.sampled_from([0, 1, 3, 9, 20])),
    data=st.data(),
)
def test_nodes_of_any_machine(
    tmp_path: Path,
    node_of: list[int],
    with_memory: set[int],
    allowed: set[int],
    data: st.DataObject,
) -> None:
    cpus = sorted(data.draw(st.sets(st.integers(0, len(node_of) - 1), min_size=1)))
    lists = {n: as_list({c for c, of in enumerate(node_of) if of == n}) for n in {0, 1, 3, 9, 20}}
    root = machine(tmp_path, lists, as_list(with_memory), as_list(allowed))
    usable = with_memory & allowed
    nodes = [[c for c in cpus if node_of[c] == n] for n in sorted(usable)]
    expected = [of_node for of_node in nodes if of_node]
    assert _native.numa.usable_nodes(cpus, root) == (
        expected if sum(map(len, nodes)) == len(cpus) else []
    )


def test_this_process_has_the_nodes_that_it_may_use() -> None:
    script = "from offload import _native; print(_native.numa.count())"
    assert int(run_script(script)) == max(1, len(_native.numa.usable_nodes(CPUS)))


def test_who_has_a_memory_policy_has_one_node() -> None:
    """As numactl sets it: here of the calling thread, of which what it starts inherits it."""
    found = run_script(f"""
        import ctypes
        from offload import _native
        print(_native.numa.has_memory_policy())
        preferred, node = 1, ctypes.c_ulong(1)
        libc = ctypes.CDLL(None)
        if libc.syscall({SET_MEMPOLICY}, preferred, ctypes.byref(node), ctypes.c_ulong(64)):
            raise SystemExit(77)
        print(_native.numa.has_memory_policy(), _native.numa.count())
        """)
    assert found.split() == ["False", "True", "1"]


def attach(root: str, device: str, node: str) -> None:
    """A PCI device that is near to a node of the kernel's."""
    folder = Path(root) / "sys/bus/pci/devices" / device
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(node + "\n")


@pytest.mark.parametrize(
    ("node", "nodes", "found"),
    [
        pytest.param("0", [[0, 1], [4]], 0, id="first"),
        pytest.param("8", [[0, 1], [4]], 1, id="numbered-without-gaps"),
        pytest.param("8", [[4], [0]], 0, id="in-another-order"),
        pytest.param("8", [[0], [1]], None, id="not-one-of-ours"),
        pytest.param("9", [[0], [4]], None, id="unknown-node"),
        pytest.param("-1", [[0], [4]], None, id="firmware-does-not-say"),
        pytest.param("x", [[0], [4]], None, id="nonsense"),
        pytest.param("0", [[0, 1, 4]], None, id="one-node"),
    ],
)
def test_a_device_is_near_to_one_of_the_process_s_nodes(
    tmp_path: Path, node: str, nodes: list[list[int]], found: int | None
) -> None:
    root = machine(tmp_path, {0: "0-3", 8: "4-7"}, "0,8", "0,8")
    attach(root, "0000:3b:00.0", node)
    with numa_nodes(nodes):
        assert _native.node_near("0000:3B:00.0", root) == found
        assert _native.node_near("0000:3C:00.0", root) is None


@pytest.mark.parametrize("cpus", [[[0], []], [[0], [-1]], [[0], [1 << 20]]])
def test_impossible_nodes_are_refused(cpus: list[list[int]]) -> None:
    before = _native.numa.count()
    with pytest.raises(ValueError, match="NUMA node"):
        _native.numa.set_nodes(cpus)
    assert _native.numa.count() == before


@pytest.mark.skipif(len(CPUS) < 2, reason="two nodes need two CPUs")
def test_workers_are_shared_out_over_the_nodes() -> None:
    first, second = ({cpu} for cpu in (CPUS[0], CPUS[-1]))
    with numa_nodes(TWO_NODES):
        for count, of_workers in [
            (2, [first]),
            (4, [first, first, second]),
            (5, [first, first, first, second]),
        ]:
            _native.set_threads(count)
            Trained().step()
            assert workers_become(count - 1)
            assert [os.sched_getaffinity(worker) for worker in workers()] == of_workers
        assert sorted(os.sched_getaffinity(0)) == CPUS
        # Named CPUs are those of the workers, whatever their nodes.
        _native.set_threads(4, [CPUS[-1]])
        Trained().step()
        assert workers_become(3)
        assert [os.sched_getaffinity(worker) for worker in workers()] == [second] * 3
    Trained().step()
    _native.set_threads(3)
    Trained().step()
    assert workers_become(2)
    assert all(sorted(os.sched_getaffinity(worker)) == CPUS for worker in workers())


@pytest.mark.skipif(len(CPUS) < 2, reason="two nodes need two CPUs")
def test_a_forked_child_has_the_nodes_too() -> None:
    with numa_nodes(TWO_NODES):
        _native.set_threads(3)
        trained = Trained()
        trained.step()
        child = os.fork()
        if child == 0:
            trained.step()
            masks = [os.sched_getaffinity(worker) for worker in workers()]
            fine = workers_become(2) and masks == [{CPUS[0]}, {CPUS[0]}]
            os._exit(0 if fine and _native.numa.count() == 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@given(
    blocks=st.integers(0, 9),
    rest=st.integers(0, 2),
    # Nodes of CPUs that do not exist have threads, which run anywhere.
    nodes=st.lists(st.sampled_from([CPUS[0], CPUS[-1], 1021, 1022, 1023]), unique=True, min_size=1),
    threads=st.integers(1, 4),
)
def test_nodes_do_not_change_a_bit(blocks: int, rest: int, nodes: list[int], threads: int) -> None:
    numel = blocks * BLOCK + rest
    grad = gradients(numel, "fp32", seed=0)
    found = []
    for cpus in ([], [[cpu] for cpu in nodes]):
        with numa_nodes(cpus):
            _native.set_threads(threads)
            arrays = Arrays(FP32, masters(numel))
            for step in (1, 2):
                arrays.step(grad, Hyper(step=step))
            total = _native.sum_of_squares("fp32", grad.ctypes.data, numel)
            found.append((arrays.bytes(), np.float64(total).tobytes()))
    assert found[0] == found[1]
