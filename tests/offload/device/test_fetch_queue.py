"""offload/device/fetch_queue: chunks come from RAM and from the file, and nothing hangs."""

import errno
import gc
import tempfile
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import _native
from offload.cache.slot_cache import FileBacking, HostCopy, SharedCache, SlotCache, UseOrder
from offload.device.fetch_queue import ChunkFetch, FetchQueue
from offload.disk.scratch_file import Extent, ScratchFile
from offload.errors import BudgetError
from offload.memory.arena import HostArena
from offload.memory.ledger import Ledger
from offload.memory.tiers import Account, Tier
from tests.support.native.cache_rig import PAGE, SLOT, UINT8, pattern
from tests.support.native.gates import GatedBackend, GatedTransfers
from tests.support.native.scratch_files import write_to
from tests.support.waiting import until

FAST = 1e11


class Rig:
    """Chunks of `runs` slots; those in `at_home` are in RAM for good, the others in a file."""

    def __init__(
        self,
        device_slots: int,
        host_slots: int,
        runs: list[int],
        at_home: tuple[int, ...] = (),
        rate: float = FAST,
    ) -> None:
        self.ledger = Ledger({Tier.HOST: host_slots * SLOT, Tier.DEVICE: device_slots * SLOT})
        self.engine = _native.IoEngine("threads", threads=1)
        self.scratch = ScratchFile(tempfile.gettempdir(), self.ledger, Account.FILE)
        self.transfers = GatedTransfers(self.engine, self.scratch)
        self.runs = dict(enumerate(runs))
        self.used = {chunk: run * SLOT - PAGE * (chunk % 2) for chunk, run in self.runs.items()}
        self.homes = {chunk: self.want(chunk) for chunk in at_home}
        extents = {
            chunk: Extent(self.scratch.reserve(run * SLOT), run * SLOT, run)
            for chunk, run in self.runs.items()
        }
        for chunk, extent in extents.items():
            whole = torch.from_dlpack(_native.Arena(extent.nbytes).export(0, extent.nbytes))
            whole[: self.used[chunk]] = self.want(chunk)
            write_to(self.scratch, memoryview(whole.numpy()), extent.offset)
        self.host = HostArena(host_slots, SLOT, self.ledger, Account.SHARD)
        self.host_cache = SlotCache(
            self.host,
            FileBacking(self.host, self.transfers, extents),
            self.runs,
            UseOrder(),
            "chunk {}".format,
        )
        self.shared = SharedCache(self.host_cache, UINT8)
        self.backend = GatedBackend(rate)
        self.arena = self.backend.arena(device_slots, SLOT, self.ledger, Account.GATHERED)
        self.fetches = FetchQueue(self.arena, self.backend, self.homes.get, self.shared, self.used)
        self.order = UseOrder()
        self.cache = SlotCache(self.arena, self.fetches, self.runs, self.order, "chunk {}".format)

    def want(self, chunk: int) -> torch.Tensor:
        return pattern(self.used[chunk], chunk)

    def use(self, chunk: int) -> torch.Tensor:
        self.order.note(chunk)
        self.cache.get(chunk)
        return self.cache.tensor(chunk, UINT8)[: self.used[chunk]]

    def learn(self, *chunks: int) -> None:
        for chunk in chunks:
            self.order.note(chunk)
        self.order.end_step()

    def stall_file(self, milliseconds: int) -> None:
        """Keeps reads in flight for about that long."""
        self.engine.inject("read", 0, error=errno.EAGAIN, count=milliseconds)

    def staged(self) -> int:
        return self.host.live_views()

    def close(self) -> None:
        self.cache.close()
        self.fetches.close()
        self.host_cache.close()
        self.backend.close()
        self.transfers.close()
        self.engine.close()
        self.scratch.close()
        self.arena.close()
        self.host.close()
        assert set(self.ledger.in_use_bytes.values()) == {0}


def test_chunks_come_from_ram_and_from_the_file(rig):
    r = rig(2, 1, [1, 1, 1, 1], at_home=(1, 2))
    for chunk in (0, 1, 0, 1, 2, 3, 0):  # which is on the device is not fetched again
        assert torch.equal(r.use(chunk), r.want(chunk))
        assert r.staged() == 0
    assert r.backend.h2d_bytes == sum(r.used[chunk] for chunk in (0, 1, 2, 3, 0))
    assert r.backend.d2h_bytes == 0
    assert r.ledger.used(Tier.DEVICE, Account.GATHERED) == 2 * SLOT
    assert r.ledger.used(Tier.HOST, Account.SHARD) == SLOT
    assert r.engine.stats["reads"] == 3  # chunk 3 took the slot of 0


def test_prefetch_goes_on_while_compute_does_something_else(rig):
    r = rig(4, 1, [1, 1, 1, 1])
    r.learn(0, 1, 2, 3)
    r.cache.prefetch(4)
    until(lambda: r.backend.h2d_bytes == sum(r.used.values()))  # through a single slot in RAM
    until(lambda: r.staged() == 0)
    reads = r.engine.stats["reads"]
    for chunk in range(4):
        assert torch.equal(r.use(chunk), r.want(chunk))
    assert r.engine.stats["reads"] == reads


def test_starting_a_prefetch_does_not_wait_for_the_file(rig):
    r = rig(3, 2, [1, 1, 1])
    r.learn(0, 1, 2)
    with r.transfers.gate.closed():
        r.cache.prefetch(3)  # returns before any was done
        assert r.transfers.gate.held > 0
    for chunk in range(3):
        assert torch.equal(r.use(chunk), r.want(chunk))


def test_ram_s_chunks_pass_those_that_wait_for_the_file(rig):
    r = rig(2, 1, [1, 1], at_home=(1,))
    r.learn(0, 1)
    with r.transfers.gate.closed():
        r.cache.prefetch(1)
        assert torch.equal(r.use(1), r.want(1))
        assert r.engine.stats["reads"] == 0


def test_a_demand_fetch_is_next(rig):
    """The others are queued for the single slot in RAM, which chunk 0 holds."""
    r = rig(5, 1, [1] * 5)
    r.learn(0, 1, 2, 3, 4)
    staged, demanded = [], threading.Event()
    start, finish = r.shared.start, r.fetches.finish

    def watched(chunk: int) -> HostCopy | None:
        found = start(chunk)
        if found is not None:
            staged.append(chunk)
        elif demanded.is_set():  # whichever is the next in the queue
            r.transfers.gate.open()
        return found

    def finish_noted(fetch: ChunkFetch) -> None:
        demanded.set()
        finish(fetch)

    r.shared.start, r.fetches.finish = watched, finish_noted
    with r.transfers.gate.closed():
        r.cache.prefetch(4)
        assert torch.equal(r.use(4), r.want(4))
    assert staged[:2] == [0, 4]
    for chunk in (1, 2, 3, 0):
        assert torch.equal(r.use(chunk), r.want(chunk))


def test_what_is_dropped_is_not_fetched(rig):
    r = rig(3, 1, [1, 1, 1])
    r.learn(0, 1, 2)
    with r.backend.gate.closed():
        r.cache.prefetch(3)
        for chunk in (2, 1, 0):
            r.cache.drop(chunk)
        until(lambda: r.staged() == 0)
    assert r.backend.h2d_bytes == 0
    assert torch.equal(r.use(1), r.want(1))


@pytest.mark.parametrize("worker", ["_staging", "_copying"])
def test_a_thread_that_cannot_start_ends_the_fetch(rig, monkeypatch, worker):
    r = rig(2, 1, [1, 1])

    def refuse(job: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(r.fetches, worker), "do", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            r.use(0)
    r.fetches.clear()  # waits for what is under way
    assert r.staged() == 0
    assert torch.equal(r.use(0), r.want(0))


def test_no_room_in_ram_is_an_error_with_numbers(rig):
    r = rig(2, 1, [1, 1])
    no_room = "no room for chunk 1: it needs 1 .* 1 of 1 are held"
    with r.shared.open(0), pytest.raises(BudgetError, match=no_room):
        r.use(1)
    assert torch.equal(r.use(1), r.want(1))


def test_room_that_fetches_take_is_waited_for(rig):
    r = rig(2, 1, [1, 1])
    r.learn(0)
    r.stall_file(100)
    r.cache.prefetch(1)
    with r.shared.open(1) as flat:
        assert torch.equal(flat[: r.used[1]], r.want(1))
    assert torch.equal(r.use(0), r.want(0))


def test_who_opens_a_chunk_waits_for_another_thread_s_block(rig):
    r = rig(2, 1, [1, 1])
    shared = SharedCache(r.host_cache, UINT8, patience_s=30.0)
    opened, close = threading.Event(), threading.Event()

    def other() -> None:
        with shared.open(0):
            opened.set()
            assert close.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert opened.wait(30)
    waited = []

    def wait_or_open(timeout_s: float | None = None) -> None:
        close.set()
        waited.append(wait(timeout_s))

    wait, shared._changed.wait = shared._changed.wait, wait_or_open
    with shared.open(1) as flat:
        assert torch.equal(flat[: r.used[1]], r.want(1))
    assert waited
    assert all(waited), "it was not told"
    thread.join()


def test_no_room_on_the_device_names_its_budget(rig):
    r = rig(1, 1, [1, 1])
    held = r.use(0)
    with pytest.raises(BudgetError, match="raise device_memory by at least 8"):
        r.use(1)
    del held
    r.use(1)


@pytest.mark.parametrize(("fails", "at_home"), [("link", (0, 1, 2)), ("file", ())])
def test_a_failure_is_an_error_and_no_end(rig, fails, at_home):
    r = rig(3, 1, [1, 1, 1], at_home=at_home)

    def fail() -> tuple[type[Exception], str]:
        if fails == "link":
            r.backend.h2d.inject(0)
            return OSError, "host to device"
        r.engine.inject("read", 0, error=errno.EIO)
        return _native.NativeIoError, "read of"

    error, words = fail()
    with pytest.raises(error, match=words):
        r.use(0)
    assert torch.equal(r.use(0), r.want(0))
    fail()
    r.learn(1, 2)
    r.cache.prefetch(2)
    with pytest.raises(error, match=words):
        r.use(1)
    for chunk in (1, 2):
        assert torch.equal(r.use(chunk), r.want(chunk))
    assert r.staged() == 0


def test_an_error_holds_no_memory(rig):
    r = rig(2, 1, [1, 1])
    r.backend.h2d.inject(0)
    with pytest.raises(OSError, match="host to device") as caught:
        r.use(0)
    assert r.staged() == 0
    assert caught.value.__traceback__ is not None
    assert r.arena.live_views() == 0


def test_a_drop_holds_nothing_of_its_caller_s(rig):
    """The error of the read that it cancels would have the frames of the forward that drops."""
    held = []

    def forward() -> None:
        pin = torch.ones(1)
        held.append(weakref.ref(pin))
        with r.transfers.gate.closed():
            r.cache.prefetch(1)
            r.cache.drop(0)

    r = rig(2, 1, [1, 1])
    r.learn(0)
    gc.disable()
    try:
        forward()
        assert held[0]() is None
    finally:
        gc.enable()


def test_closing_does_not_wait_for_a_slow_link(rig):
    r = rig(3, 1, [1, 1, 1], rate=1000)  # all takes 24 s
    r.learn(0, 1, 2)
    r.cache.prefetch(3)
    until(lambda: r.backend.h2d_bytes > 0)
    r.close()
    assert r.backend.h2d_bytes < sum(r.used.values())
    r.close()


def test_a_closed_backend_is_an_error(rig):
    r = rig(2, 1, [1, 1], at_home=(0,))
    r.backend.close()
    for chunk in (0, 1):
        with pytest.raises(RuntimeError, match="the link is closed"):
            r.use(chunk)
    assert r.staged() == 0


@given(data=st.data())
def test_any_sequence_of_uses(data):
    """Uses, pins, prefetches, drops and faults in any order: the bytes are right or it raises."""
    runs = data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=6))
    at_home = tuple(data.draw(st.sets(st.integers(0, len(runs) - 1))))
    r = Rig(data.draw(st.integers(2, 6)), data.draw(st.integers(2, 4)), runs, at_home=at_home)
    chunks = st.integers(0, len(runs) - 1)
    pins: list[tuple[int, torch.Tensor]] = []
    faults = 0
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["use", "use", "keep", "let go", "prefetch", "drop"]))
        if action in ("use", "keep"):
            chunk = data.draw(chunks)
            if data.draw(st.integers(0, 5)) == 0:
                faults += 1
                if data.draw(st.booleans()):
                    r.backend.h2d.inject(data.draw(st.integers(0, 2)))
                else:
                    r.engine.inject("read", data.draw(st.integers(0, 2)), error=errno.EIO)
            try:
                pin = r.use(chunk)
            except BudgetError:
                assert pins
            except OSError:
                assert faults
                faults -= 1
            else:
                assert torch.equal(pin, r.want(chunk))
                if action == "keep":
                    pins.append((chunk, pin))
                del pin
        elif action == "let go" and pins:
            pins.pop()
        elif action == "prefetch":
            r.order.end_step()
            r.cache.prefetch(data.draw(st.integers(1, 4)))
        elif action == "drop":
            r.cache.drop(data.draw(chunks))
        assert all(torch.equal(kept, r.want(chunk)) for chunk, kept in pins)
    pins.clear()
    r.close()
    gc.collect()
