"""native/link: copies in the background, at a bandwidth."""

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import _native
from tests.support.native.io_tools import run_script

FAST = 1e12
MIB = 1 << 20
WAYS = ("h2d", "d2h")


@pytest.fixture
def link():
    link = _native.Link(FAST, FAST)
    yield link
    link.close()


def bytes_of(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator(seed))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def copy(link, way, to: torch.Tensor, source: torch.Tensor) -> _native.LinkOp:
    assert to.nbytes == source.nbytes
    return link.copy(way, to.data_ptr(), source.data_ptr(), to.nbytes)


def wait_error(op) -> OSError:
    with pytest.raises(OSError, match="copy of .* failed after") as caught:
        op.wait()
    return caught.value


def outcome(op) -> int:
    """The errno that `op` ended with, or 0."""
    try:
        op.wait()
    except OSError as error:
        return error.errno
    return 0


@pytest.mark.parametrize("way", WAYS)
@given(
    # Copies of less than a cache line, too, and to any place in one.
    sizes=st.lists(st.integers(0, 200) | st.integers(0, 3 * MIB), min_size=1, max_size=6),
    at=st.integers(0, 64),
)
def test_bytes_arrive_whole_and_nothing_else_is_touched(way, sizes, at):
    link = _native.Link(FAST, FAST)
    sources = [bytes_of(n, i) for i, n in enumerate(sizes)]
    targets = [torch.full((n + 128,), 7, dtype=torch.uint8) for n in sizes]
    ops = [copy(link, way, t[at : at + len(s)], s) for t, s in zip(targets, sources, strict=True)]
    for op in reversed(ops):
        op.wait()
        op.wait()
        assert op.done()
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target[at : at + len(source)], source)
        assert (target[:at] == 7).all()
        assert (target[at + len(source) :] == 7).all()
    other = "d2h" if way == "h2d" else "h2d"
    stats = link.stats
    assert stats[f"{way}_bytes"] == sum(sizes)
    assert stats[f"{way}_copies"] == len(sizes)
    assert stats[f"{other}_bytes"] == stats[f"{other}_copies"] == 0
    link.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_takes_its_time_and_copies_add_up(way):
    rates = {"h2d": FAST, "d2h": FAST, way: 50 * MIB}
    link = _native.Link(rates["h2d"], rates["d2h"])
    source, target = bytes_of(MIB), torch.zeros(MIB, dtype=torch.uint8)
    started = time.monotonic()
    ops = [copy(link, way, target, source) for _ in range(5)]
    for number, op in enumerate(ops, 1):
        op.wait()
        assert time.monotonic() - started >= number / 50
    assert link.stats[f"{way}_busy_s"] >= 5 / 50 * 0.999
    link.close()


def test_idle_time_is_not_saved_up():
    link = _native.Link(50 * MIB, FAST)
    source, target = bytes_of(MIB), torch.zeros(MIB, dtype=torch.uint8)
    for _ in range(2):
        time.sleep(0.05)
        started = time.monotonic()
        copy(link, "h2d", target, source).wait()
        assert time.monotonic() - started >= 1 / 50
    assert link.stats["h2d_busy_s"] >= 2 / 50 * 0.999
    link.close()


def test_the_bytes_arrive_over_the_time():
    link = _native.Link(1 * MIB, FAST)
    source, target = torch.ones(MIB, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    op = copy(link, "h2d", target, source)
    deadline = time.monotonic() + 20
    while not target[: MIB // 8].all():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert not op.done()
    assert not target[-4096:].any()
    op.cancel()
    assert wait_error(op).errno == errno.ECANCELED
    link.close()


def test_directions_do_not_wait_for_each_other():
    link = _native.Link(1000, FAST)
    slow_source, slow_target = bytes_of(MIB), torch.zeros(MIB, dtype=torch.uint8)
    slow = copy(link, "h2d", slow_target, slow_source)
    fast_target = torch.zeros(MIB, dtype=torch.uint8)
    copy(link, "d2h", fast_target, slow_source).wait()
    assert torch.equal(fast_target, slow_source)
    assert not slow.done()
    link.close()
    assert wait_error(slow).errno == errno.ECANCELED


def test_what_is_queued_is_dropped_at_once_and_costs_no_time():
    link = _native.Link(1 * MIB, FAST)
    huge = bytes_of(16 * MIB)
    running_target, huge_target = torch.zeros(2, 16 * MIB, dtype=torch.uint8)
    running = copy(link, "h2d", running_target, huge)
    queued = [copy(link, "h2d", huge_target, huge) for _ in range(1000)]
    source, target = bytes_of(4096), torch.zeros(4096, dtype=torch.uint8)
    last = copy(link, "h2d", target, source)
    for op in queued:
        op.cancel()
        op.cancel()
        assert op.done()
    error = wait_error(queued[0])
    assert error.errno == errno.ECANCELED
    assert f"copy of {16 * MIB} bytes from host to device failed after 0 bytes" in str(error)
    running.cancel()
    last.wait()  # would take hours
    assert torch.equal(target, source)
    assert not huge_target.any()
    assert link.stats["h2d_errors"] == 1001
    link.close()


def test_a_copy_under_way_stops_between_pieces():
    link = _native.Link(1 * MIB, FAST)
    source, target = torch.ones(MIB, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    op = copy(link, "h2d", target, source)
    while not target[0]:
        time.sleep(0.001)
    op.cancel()
    error = wait_error(op)
    assert error.errno == errno.ECANCELED
    got = int(target.sum())
    assert 0 < got < MIB
    assert target[:got].all()
    assert link.stats["h2d_bytes"] == got
    assert f"failed after {got} bytes: " in str(error)
    again = copy(link, "h2d", target[:4096], source[:4096])
    again.wait()
    link.close()


def test_a_done_copy_stays_done(link):
    source, target = bytes_of(4096), torch.zeros(4096, dtype=torch.uint8)
    op = copy(link, "h2d", target, source)
    op.wait()
    op.cancel()
    op.wait()
    link.inject("h2d", 0)
    failed = copy(link, "h2d", target, source)
    assert wait_error(failed).errno == errno.EIO
    failed.cancel()
    assert wait_error(failed).errno == errno.EIO


@pytest.mark.parametrize("way", WAYS)
def test_injected_faults_hit_the_copies_they_name(link, way):
    link.inject(way, 2, error=errno.ENXIO, count=2)
    source, target = torch.ones(4096, dtype=torch.uint8), torch.zeros(6, 4096, dtype=torch.uint8)
    ops = [copy(link, way, row, source) for row in target]
    for op in (*ops[:2], *ops[4:]):
        op.wait()
    for op in ops[2:4]:
        error = wait_error(op)
        assert error.errno == errno.ENXIO
        assert "failed after 0 bytes: " in str(error)
    assert target.any(dim=1).tolist() == [True, True, False, False, True, True]
    assert (link.stats[f"{way}_copies"], link.stats[f"{way}_errors"]) == (4, 2)


def test_options_are_checked():
    for rate in (0.0, -1.0, 999.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="h2d_bytes_per_s must be a number of bytes"):
            _native.Link(rate, FAST)
        with pytest.raises(ValueError, match="d2h_bytes_per_s"):
            _native.Link(FAST, rate)


def test_calls_are_checked(link):
    buffer = bytes_of(64)
    with pytest.raises(ValueError, match="direction is 'up', must be 'h2d' or 'd2h'"):
        link.copy("up", buffer.data_ptr(), buffer.data_ptr(), 64)
    with pytest.raises(ValueError, match="two addresses"):
        link.copy("h2d", 0, buffer.data_ptr(), 64)
    with pytest.raises(ValueError, match="two addresses"):
        link.copy("h2d", buffer.data_ptr(), 0, 64)
    arena = _native.Arena(4096)
    for to, source in [
        (arena.address + 4033, buffer.data_ptr()),
        (buffer.data_ptr(), arena.address + 4033),
    ]:
        with pytest.raises(ValueError, match="outside an arena of 4096 bytes"):
            link.copy("h2d", to, source, 64)
    with pytest.raises(ValueError, match="positive errno"):
        link.inject("h2d", 0, error=0)
    with pytest.raises(ValueError, match="count of at least 1"):
        link.inject("h2d", 0, count=0)
    link.copy("h2d", 0, 0, 0).wait()


def test_close_abandons_copies_and_can_be_repeated(nothing_left):
    link = _native.Link(1000, 1000)
    source, target = bytes_of(MIB), torch.zeros(2, MIB, dtype=torch.uint8)
    ops = [copy(link, way, row, source) for way, row in zip(WAYS, target, strict=True)]
    ops += [copy(link, way, row, source) for way, row in zip(WAYS, target, strict=True)]
    link.close()
    link.close()
    for op in ops:
        assert wait_error(op).errno == errno.ECANCELED
        op.cancel()
    with pytest.raises(RuntimeError, match="the link is closed"):
        copy(link, "h2d", target[0], source)


def test_a_link_that_is_dropped_closes(nothing_left):
    link = _native.Link(1000, 1000)
    source, target = bytes_of(MIB), torch.zeros(MIB, dtype=torch.uint8)
    op = copy(link, "h2d", target, source)
    del link  # the handle keeps it
    op.cancel()
    assert wait_error(op).errno == errno.ECANCELED


def test_a_waiter_is_woken():
    link = _native.Link(1000, FAST)
    source, target = bytes_of(MIB), torch.zeros(MIB, dtype=torch.uint8)
    ops = [copy(link, "h2d", target, source) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        waiters = [pool.submit(wait_error, op) for op in ops]
        ops[1].cancel()
        assert waiters[1].result(timeout=30).errno == errno.ECANCELED
        link.close()
        assert waiters[0].result(timeout=30).errno == errno.ECANCELED


def test_many_threads_at_once():
    link = _native.Link(1e10, 1e10)
    rounds = 100

    def work(seed: int) -> None:
        numbers = generator(seed)
        for number in range(rounds):
            nbytes = int(torch.randint(1, 1 << 16, (), generator=numbers))
            source, target = bytes_of(nbytes, number), torch.zeros(nbytes, dtype=torch.uint8)
            op = copy(link, WAYS[number % 2], target, source)
            if number % 7 == 0:
                op.cancel()
                assert outcome(op) in (0, errno.ECANCELED)
                continue
            op.wait()
            assert torch.equal(target, source)
            assert link.stats["h2d_errors"] <= 8 * rounds

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, seed) for seed in range(8)]:
            future.result(timeout=120)
    stats = link.stats
    done = sum(stats[f"{way}_{what}"] for way in WAYS for what in ("copies", "errors"))
    assert done == 8 * rounds
    link.close()


def test_closing_while_others_copy():
    for _ in range(20):
        link = _native.Link(1e9, 1e9)
        begun = threading.Barrier(3)

        def work(link=link, begun=begun) -> None:
            source, target = bytes_of(1 << 16), torch.zeros(1 << 16, dtype=torch.uint8)
            begun.wait(30)
            for number in range(1000):
                try:
                    copy(link, WAYS[number % 2], target, source).wait()
                except (RuntimeError, OSError):
                    return

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(work) for _ in range(2)]
            begun.wait(30)
            futures.append(pool.submit(link.close))
            link.close()
            for future in futures:
                future.result(timeout=60)


def test_a_forked_child_cannot_use_it():
    out = run_script("""
        import os, warnings
        from offload import _native
        warnings.simplefilter("ignore")  # Python's own about threads and fork
        arena = _native.Arena(1 << 20)
        link = _native.Link(1000, 1000)
        op = link.copy("h2d", arena.address, arena.address, 1 << 19)
        child = os.fork()
        if child == 0:
            refused = 0
            for use in (op.wait, op.cancel, lambda: link.stats,
                        lambda: link.copy("h2d", arena.address, arena.address, 1)):
                try:
                    use()
                except RuntimeError as error:
                    refused += "belongs to process" in str(error)
            link.close()
            del op, link
            os._exit(refused)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        op.cancel()
        link.close()
        """)
    assert out == "4\n"
