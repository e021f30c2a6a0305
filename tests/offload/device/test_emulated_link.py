"""offload/device/emulated_link: copies in the background, at a bandwidth."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import timeline
from offload.device.backend import EmulatedBackend
from offload.device.emulated_link import LinkCopy, LinkWay
from tests.support.waiting import until

FAST = 1e12
MIB = 1 << 20


def bytes_of(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def error_of(copy: LinkCopy) -> OSError:
    with pytest.raises(OSError, match="copy of .* failed after") as caught:
        copy.wait()
    return caught.value


@pytest.fixture
def backend(request: Any) -> Iterator[EmulatedBackend]:
    made = EmulatedBackend(getattr(request, "param", FAST))
    yield made
    made.close()


def at(rate: float) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", [rate], indirect=True)


@given(
    # Copies of less than a cache line, too, and to any place in one.
    sizes=st.lists(st.integers(0, 200) | st.integers(0, 3 * MIB), min_size=1, max_size=6),
    place=st.integers(0, 64),
    rate=st.sampled_from([1e8, FAST]),
)
def test_bytes_arrive_whole_and_nothing_else_is_touched(
    sizes: list[int], place: int, rate: float
) -> None:
    backend = EmulatedBackend(rate)
    sources = [bytes_of(n, i) for i, n in enumerate(sizes)]
    for start in (backend.fetch, backend.to_ram):
        targets = [torch.full((n + 128,), 7, dtype=torch.uint8) for n in sizes]
        pairs = zip(targets, sources, strict=True)
        copies = [start(t[place : place + len(s)], s) for t, s in pairs]
        for copy in reversed(copies):
            copy.wait()
            copy.wait()
            assert copy.done()
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target[place : place + len(source)], source)
            assert (target[:place] == 7).all()
            assert (target[place + len(source) :] == 7).all()
    assert backend.h2d_bytes == backend.d2h_bytes == sum(sizes)
    backend.close()


@at(50 * MIB)
def test_a_copy_takes_its_time_and_copies_add_up(backend: EmulatedBackend) -> None:
    for _ in range(2):  # idle time is not saved up
        time.sleep(0.05)
        started_s = time.perf_counter()
        copies = [backend.fetch(zeros(MIB), bytes_of(MIB)) for _ in range(3)]
        for number, copy in enumerate(copies, 1):
            copy.wait()
            assert time.perf_counter() - started_s >= number / 50
    assert backend.link_busy_s[0] >= 6 / 50 * 0.999
    assert backend.link_busy_s[1] == 0


@at(100 * MIB)
def test_a_timeline_has_copies(backend: EmulatedBackend) -> None:
    with timeline.record() as recording:
        for copy in [backend.to_ram(zeros(MIB), bytes_of(MIB)) for _ in range(3)]:
            copy.wait()
    found = recording.timeline.of("d2h")
    assert [i.nbytes for i in found] == [MIB] * 3
    assert all(after.begin_s >= before.end_s for before, after in pairwise(found))


@at(MIB)
def test_the_bytes_arrive_over_the_time(backend: EmulatedBackend) -> None:
    source, target = torch.ones(MIB, dtype=torch.uint8), zeros(MIB)
    copy = backend.fetch(target, source)
    until(lambda: target[: MIB // 16].all())
    assert not copy.done()
    assert not target[-4096:].any()
    copy.cancel()
    error = error_of(copy)
    assert error.errno == errno.ECANCELED
    got = int(target.sum())
    assert 0 < got < MIB
    assert target[:got].all()
    assert backend.h2d_bytes == got
    assert f"copy of {MIB} bytes from host to device failed after {got} bytes: " in str(error)
    backend.fetch(target[:4096], source[:4096]).wait()


@at(1e5)
def test_what_is_queued_is_dropped_at_once_and_costs_no_time(backend: EmulatedBackend) -> None:
    large = bytes_of(MIB)
    running, *queued = (backend.fetch(zeros(MIB), large) for _ in range(100))
    source, target = bytes_of(64), zeros(64)
    last = backend.fetch(target, source)
    for copy in queued:
        copy.cancel()
        copy.cancel()
        assert copy.done()
    assert error_of(queued[0]).errno == errno.ECANCELED
    backend.to_ram(zeros(64), source).wait()  # the other direction does not wait
    assert not last.done()
    running.cancel()
    last.wait()  # would take hours
    assert torch.equal(target, source)


def test_injected_faults_hit_the_copies_they_name(backend: EmulatedBackend) -> None:
    backend.h2d.inject(2, error=errno.ENXIO, count=2)
    backend.h2d.inject(5)
    source, target = torch.ones(4096, dtype=torch.uint8), torch.zeros(7, 4096, dtype=torch.uint8)
    copies = [backend.fetch(row, source) for row in target]
    found = {}
    for number, copy in enumerate(copies):
        if number in (2, 3, 5):
            found[number] = error_of(copy).errno
            copy.cancel()
            assert error_of(copy).errno == found[number]
        else:
            copy.wait()
            copy.cancel()
            copy.wait()
    assert found == {2: errno.ENXIO, 3: errno.ENXIO, 5: errno.EIO}
    assert target.any(dim=1).tolist() == [True, True, False, False, True, False, True]


@pytest.mark.parametrize("rate", [0.0, -1.0, 999.0, float("inf"), float("nan")])
def test_rates_are_checked(rate: float) -> None:
    with pytest.raises(ValueError, match="d2h_bytes_per_s must be a number of bytes"):
        LinkWay("d2h", rate)


@at(1000)
def test_close_abandons_copies_and_can_be_repeated(backend: EmulatedBackend) -> None:
    copies = [backend.fetch(zeros(MIB), bytes_of(MIB)) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        waiters = [pool.submit(error_of, copy) for copy in copies]
        copies[1].cancel()
        assert waiters[1].result(timeout=30).errno == errno.ECANCELED
        backend.close()
        backend.close()
        assert {waiter.result(timeout=30).errno for waiter in waiters} == {errno.ECANCELED}
    with pytest.raises(RuntimeError, match="the link is closed"):
        backend.fetch(zeros(64), bytes_of(64))


def test_closing_while_others_copy() -> None:
    for _ in range(20):
        backend = EmulatedBackend(1e9)
        begun = threading.Barrier(3)

        def work(backend: EmulatedBackend = backend, begun: threading.Barrier = begun) -> None:
            source, target = bytes_of(1 << 16), zeros(1 << 16)
            begun.wait(30)
            for number in range(1000):
                try:
                    (backend.fetch if number % 2 else backend.to_ram)(target, source).wait()
                except (RuntimeError, OSError):
                    return

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(work) for _ in range(2)]
            begun.wait(30)
            futures.append(pool.submit(backend.close))
            backend.close()
            for future in futures:
                future.result(timeout=60)


@at(1000)
def test_a_forked_child_cannot_use_it(backend: EmulatedBackend) -> None:
    copy = backend.fetch(zeros(MIB), bytes_of(MIB))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own about threads and fork
        child = os.fork()
    if child == 0:
        refused = 0
        for use in (copy.wait, lambda: backend.fetch(zeros(64), bytes_of(64))):
            try:
                use()
            except RuntimeError as error:
                refused += "belongs to process" in str(error)
        copy.cancel()
        backend.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert not copy.done()
