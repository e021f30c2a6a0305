"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from offload import _native
from offload.disk.directories import ram_filesystem
from tests.support.own_process import descriptors, native_threads
from tests.support.ranks import quick_python as quick
from tests.support.ranks.processes import Processes, RankPool
from tests.support.schedule import Recorder, covering, longest_first
from tests.support.waiting import PATIENCE_S

# Many tests have state files in temporary folders, which must not be RAM.
if ram_filesystem(tempfile.gettempdir()):
    build = Path(__file__).parents[1] / "build" / "tmp"
    build.mkdir(parents=True, exist_ok=True)
    on_disk = [path for path in (Path("/var/tmp"), build) if not ram_filesystem(path)]
    if not on_disk:
        pytest.exit("tests need a temporary folder on a disk: TMPDIR=DIR", returncode=4)
    tempfile.tempdir = os.environ["TMPDIR"] = str(on_disk[0])

# Several tests at a time leave a core each, as do processes that they start; bits do not depend on
# it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

# Tables are as wide as the documents show them, also where pytest-xdist says that a worker has 80.
os.environ["COLUMNS"] = "120"

# Arrow's own allocator reserves a GiB, which counts where a test limits a process.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

# All processes have one list of fonts, which matplotlib makes in a second.
os.environ.setdefault("MPLCONFIGDIR", str(Path(__file__).parents[1] / "build" / "matplotlib"))

# Predictions know no profile unless a test says so, whatever this machine has saved.
os.environ["XDG_CACHE_HOME"] = "/dev/null/none"

# By default hypothesis fails where an example takes 200 ms, or making up examples takes a second:
# on a machine under load that is no finding.
LOADED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("hetero", deadline=None, suppress_health_check=LOADED, max_examples=20)
settings.load_profile("hetero")
# Of make test-all.
settings.register_profile("thorough", settings.get_profile("hetero"), max_examples=300)
# For builds that run many times slower.
settings.register_profile("sanitized", settings.get_profile("hetero"), max_examples=5)


QUICK_PYTHON = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--covering`: for runs in which each case takes long."""
    parser.addoption("--covering", type=int, default=99, help="lowers the n of all covering(n)")
    parser.addoption("--record-seconds", action="store_true", help="writes tests/seconds.txt anew")


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist report to their controller, which alone records."""
    if hasattr(config, "workerinput"):
        gc.disable()  # until all is collected: what imports make is no garbage
        sys.executable = config.workerinput["python"]
        multiprocessing.set_executable(config.workerinput["quick_python"])
        return
    if config.getoption("--record-seconds"):
        config.pluginmanager.register(Recorder())
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as above, of all that is forked
        started = ExitStack()
        program = started.enter_context(quick.quick_python())
        config.add_cleanup(started.close)
        config.stash[QUICK_PYTHON] = program
        # Workers are forks of one process, which imports for all of them.
        config.option.tx = [f"{spec}//python={program}" for spec in config.option.tx]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of pytest-xdist starts its server of ranks by this one's quick Python, by which it
    was started itself; what tests start is a true one."""
    program = node.config.stash.get(QUICK_PYTHON, sys.executable)
    node.workerinput.update(python=sys.executable, quick_python=str(program))


def axes(case: pytest.Item) -> dict[str, tuple[object, ...]]:
    """The values of the case, by names of parameters that are given together."""
    values = dict(case.callspec.params)  # type: ignore[attr-defined]
    found: dict[str, tuple[object, ...]] = {}
    for marker in case.iter_markers("parametrize"):
        names = marker.args[0]
        together = names.replace(" ", "").split(",") if isinstance(names, str) else names
        found[",".join(together)] = tuple(values.pop(name) for name in together)
    return found | {name: (value,) for name, value in values.items()}  # (of fixtures)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases of a product as extra that its covering(n) can do without; workers begin with
    the files that take longest."""
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("extra"):
            continue
        if item.get_closest_marker("covering"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in products.items():
        marker = cases[0].get_closest_marker("covering")
        assert marker is not None
        strength = min(*marker.args, config.getoption("--covering"))
        chosen = covering([axes(case) for case in cases], strength, zlib.crc32(name.encode()))
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker("extra")
    if hasattr(config, "workerinput"):
        longest_first(items)


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def open_files() -> set[tuple[int, str]]:
    """Descriptors of regular files and rings that are open now."""
    return descriptors("hetero", "(deleted)", "io_uring")


def pytest_collection_finish() -> None:
    """What importing all tests has made stays for good: no collection need go through it again.
    With it, each of nothing_left()'s takes half a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def fake_cuda() -> Iterator[None]:
    """backend="cuda" is a fake device, which finds what torch and copies do without order."""
    from tests.support.cuda.ranks import fake_device

    with fake_device():
        yield


@pytest.fixture
def fake_cuda_of_place(request: pytest.FixtureRequest) -> None:
    """It is there for cases whose place is "cuda": others go on faster without it."""
    if request.getfixturevalue("place") == "cuda":
        request.getfixturevalue("fake_cuda")


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Fails if the test leaves a file, a descriptor or a thread behind."""
    gc.collect()
    gc.freeze()  # as above: models' code is imported when it is first used
    _native.shutdown_workers()
    files, threads = open_files(), native_threads()
    yield
    gc.collect()
    _native.shutdown_workers()
    # The kernel lists a thread for a moment after it was joined, and a thread that is ending may
    # hold the last reference to what closes a file.
    deadline_s = time.monotonic() + PATIENCE_S
    while not (open_files() <= files and native_threads() <= threads):
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.001)
        gc.collect()
    assert open_files() <= files
    assert native_threads() <= threads
    if found := list(tmp_path.rglob("*hetero*")):
        # (Tests of native code alone do not import hetero: under a sanitizer it takes seconds.)
        from hetero.checkpoint.folder import is_checkpoint
        from hetero.state.state_files import FOLDER

        # A durable state's folder is there to stay, and hetero's part of a Trainer's checkpoint.
        assert not [path for path in found if path.name != FOLDER and not is_checkpoint(path)]


@pytest.fixture(autouse=True)
def no_rank_left() -> Iterator[None]:
    """Fails if the test leaves a process group, or variables of torchrun, by which libraries that
    other tests call would make one."""
    before = {name: os.environ.get(name) for name in TORCHRUN}
    had_group = dist.is_initialized()
    yield
    assert {name: os.environ.get(name) for name in TORCHRUN} == before
    assert dist.is_initialized() == had_group


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], RankPool]]:
    """So many ranks. All tests of the session have the same processes, started when the first one
    needs them; what changes them for good needs its own, of run_ranks()."""
    processes = Processes()
    yield lambda world: RankPool(world, processes)
    processes.close()


@pytest.fixture(scope="session")
def ranks2(ranks_of: Callable[[int], RankPool]) -> RankPool:
    """Two of them."""
    return ranks_of(2)


@pytest.fixture(scope="session")
def ranks4(ranks_of: Callable[[int], RankPool]) -> RankPool:
    """Four of them."""
    return ranks_of(4)


@pytest.fixture(scope="session")
def quick_python_program() -> Iterator[Path]:
    """Started when the first test needs it."""
    with quick.quick_python() as program:
        yield program


@pytest.fixture
def quick_python(quick_python_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts by `sys.executable` have imported everything; so have those
    that torchrun starts."""
    monkeypatch.setattr(sys, "executable", str(quick_python_program))
