"""native/worker_pool and native/isa: threads, fork, and the choice of instructions."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from offload import _native
from tests.support.native.update_arrays import Arrays, gradients, masters
from tests.support.native.update_oracle import Hyper
from tests.support.own_process import native_threads
from tests.support.waiting import in_time, until

ISAS = _native.isa_available()
BLOCK = 64 * 1024  # what a worker takes at a time
FP32 = _native.UpdateKind("fp32", "fp32")
CPUS = sorted(os.sched_getaffinity(0))


def workers() -> list[int]:
    return sorted(id for id, _ in native_threads("hetero-worker"))


def workers_become(count: int) -> bool:
    """Waits until that many workers live; a new one has its name a moment after its start."""
    return in_time(lambda: len(workers()), count) == count


class Trained:
    """Enough blocks for every worker."""

    def __init__(self) -> None:
        self.arrays = Arrays(FP32, masters(4 * BLOCK))
        self.grad = gradients(4 * BLOCK, "fp32", seed=0)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self.arrays.step(self.grad, Hyper(step=self.steps))


def test_workers_start_at_first_use_and_stop_when_told() -> None:
    trained = Trained()
    _native.shutdown_workers()
    _native.set_threads(3)
    assert _native.threads() == 3
    assert workers_become(0)
    trained.step()
    assert workers_become(2)
    _native.shutdown_workers()
    assert workers_become(0)
    trained.step()
    assert workers_become(2)
    _native.set_threads(1)
    assert workers_become(0)
    for count in (0, -1):
        with pytest.raises(ValueError, match="count"):
            _native.set_threads(count)


def test_the_default_is_the_cpus_that_this_process_may_run_on() -> None:
    script = "from offload import _native; print(_native.threads())"
    root = str(Path(_native.__file__).parents[1])
    run = [sys.executable, "-c", script]
    found = subprocess.check_output(run, env={**os.environ, "PYTHONPATH": root}, text=True)
    assert int(found) == len(CPUS)


def test_idle_workers_use_no_time() -> None:
    _native.set_threads(3)
    Trained().step()
    assert workers_become(2)

    def of_each(name: str, field: int) -> list[str]:
        texts = [Path(f"/proc/self/task/{worker}/{name}").read_text() for worker in workers()]
        return [text.rsplit(")", 1)[-1].split()[field] for text in texts]

    until(lambda: of_each("stat", 0) == ["S", "S"])  # asleep; one that spins never is
    # How often each was given a CPU, which does not depend on how busy the machine is.
    before = of_each("schedstat", 2)
    time.sleep(0.3)
    after = of_each("schedstat", 2)
    # One that polled would have woken hundreds of times; one may have been on its way to sleep.
    assert all(int(b) - int(a) <= 3 for a, b in zip(before, after, strict=True))


def test_a_forked_child_has_workers_of_its_own() -> None:
    _native.set_threads(2)
    trained = Trained()
    trained.step()
    child = os.fork()
    if child == 0:
        trained.step()
        os._exit(0 if workers_become(1) and _native.threads() == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    trained.step()


def test_stream_adds_the_gradient() -> None:
    for isa in ISAS:
        _native.set_isa(isa)
        for numel in (0, 1, 17, 2 * BLOCK + 77):
            arrays = np.random.default_rng(0).standard_normal((4, numel)).astype(np.float32)
            p, g, m, v = (a.copy() for a in arrays)
            _native.stream(p.ctypes.data, g.ctypes.data, m.ctypes.data, v.ctypes.data, numel)
            for found, before in zip((p, m, v), arrays[[0, 2, 3]], strict=True):
                assert (found == before + arrays[1]).all()
            assert (g == arrays[1]).all()
    with pytest.raises(ValueError, match="exp_avg_sq is 0"):
        _native.stream(64, 64, 64, 0, 1)


def test_isa_can_be_chosen_by_name_only_if_available() -> None:
    assert ISAS[-1] == "scalar"
    assert set(ISAS) <= set(_native.build_info()["isas"])
    for isa in ISAS:
        _native.set_isa(isa)
        assert _native.isa() == isa
    with pytest.raises(ValueError, match=r"'vax'.*scalar"):
        _native.set_isa("vax")
    assert _native.isa() == "scalar"


@pytest.mark.parametrize(("wanted", "found"), [("scalar", "scalar"), ("vax", "ValueError")])
def test_isa_from_the_environment(wanted: str, found: str) -> None:
    script = (
        "from offload import _native\n"
        "try: print(_native.isa())\n"
        "except ValueError as error: print('ValueError', error)\n"
    )
    root = str(Path(_native.__file__).parents[1])
    environment = {**os.environ, "HETERO_ISA": wanted, "PYTHONPATH": root}
    run = [sys.executable, "-c", script]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split()[0] == found
