"""offload/cache: slots are reused only when they may be, and no byte is ever wrong or lost."""

import contextlib
import errno
import itertools
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offload import _native
from offload import cache as cache_module
from offload.arena import HostArena
from offload.backing import Extent, FileBacking
from offload.cache import SlotCache, SlotState
from offload.errors import BudgetError
from offload.ledger import Ledger
from offload.order import UseOrder
from offload.store import ScratchFile, Transfers
from offload.tiers import Account, Tier

SLOT = 8192
PAGE = 4096
UINT8 = torch.uint8


class Rig:
    """A cache of `slots` slots over a file with one extent per entry of `runs`."""

    def __init__(self, slots: int, runs: list[int]) -> None:
        self.ledger = Ledger({Tier.HOST: slots * SLOT})
        # One thread, so that transfers and the faults injected into them keep their order.
        self.engine = _native.IoEngine("threads", threads=1)
        self.scratch = ScratchFile(tempfile.gettempdir(), self.ledger, Account.PARAM)
        self.transfers = Transfers(self.engine, self.scratch)
        self.arena = HostArena(slots, SLOT, self.ledger, Account.GATHERED)
        self.order = UseOrder()
        self.extents: dict[int, Extent] = {}
        for chunk, run in enumerate(runs):
            # Every other chunk ends a page before its last slot does.
            nbytes = run * SLOT - PAGE * (chunk % 2)
            self.extents[chunk] = Extent(self.scratch.reserve(run * SLOT), nbytes, run)
            self.put(chunk, pattern(nbytes, chunk))
        self.cache = SlotCache(
            self.arena,
            FileBacking(self.arena, self.transfers, self.extents),
            dict(enumerate(runs)),
            self.order,
            "chunk {}".format,
        )
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.cache.before_read = self.reads.append
        self.cache.before_write = self.writes.append

    def bounce(self, nbytes: int) -> torch.Tensor:
        return torch.from_dlpack(_native.Arena(nbytes).export(0, nbytes))

    def put(self, chunk: int, content: torch.Tensor) -> None:
        aligned = self.bounce(len(content)).copy_(content)
        self.scratch.write_from(memoryview(aligned.numpy()), self.extents[chunk].offset)

    def on_file(self, chunk: int) -> torch.Tensor:
        aligned = self.bounce(self.extents[chunk].nbytes)
        self.scratch.read_into(memoryview(aligned.numpy()), self.extents[chunk].offset)
        return aligned

    def tensor(self, chunk: int) -> torch.Tensor:
        """A lease on what is transferred of the chunk."""
        return self.cache.tensor(chunk, UINT8)[: self.extents[chunk].nbytes]

    def got(self, chunk: int) -> torch.Tensor:
        self.cache.get(chunk)
        return self.tensor(chunk)

    def use(self, chunk: int) -> torch.Tensor:
        self.order.note(chunk)
        return self.got(chunk)

    def fail_prefetch(self, chunk: int) -> None:
        """A prefetch that has failed, unseen. Were its read still queued, what drops it would
        cancel it, and the error would hit the next read instead."""
        errors = self.engine.stats["errors"]
        self.order.note(chunk)
        self.order.end_step()
        self.engine.inject("read", 0, error=errno.EIO)
        self.cache.prefetch(1)
        deadline = time.monotonic() + 10
        while self.engine.stats["errors"] == errors:
            assert time.monotonic() < deadline, "the prefetch did not fail"
            time.sleep(0.001)

    def held(self) -> set[int]:
        return {chunk for chunk in self.extents if self.cache.holds(chunk)}

    def state(self, chunk: int) -> SlotState:
        return self.cache._entries[chunk].state

    def close(self) -> None:
        self.cache.close()
        self.transfers.close()
        self.engine.close()
        self.scratch.close()
        self.arena.close()


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=UINT8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.fixture
def rig():
    rigs = []

    def make(*args, **kwargs):
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for made in rigs:
        made.close()


class TestReadsAndWrites:
    def test_get_brings_the_file_s_bytes(self, rig):
        r = rig(2, [1, 1])
        for chunk in (0, 1, 0):
            assert torch.equal(r.got(chunk), pattern(r.extents[chunk].nbytes, chunk))
            assert r.state(chunk) is SlotState.CLEAN
        assert r.reads == [0, 1]

    def test_clean_copies_are_given_up_without_a_write(self, rig):
        r = rig(1, [1, 1])
        r.got(0)
        r.got(1)
        assert r.held() == {1}
        assert r.writes == []
        assert r.engine.stats["writes"] == 0

    def test_dirty_bytes_are_written_before_their_slots_are_reused(self, rig):
        r = rig(1, [1, 1])
        r.got(0)
        r.cache.dirty(0)
        r.tensor(0).fill_(5)
        assert r.cache.is_dirty(0)
        r.got(1)
        assert r.writes == [0]
        assert (r.on_file(0) == 5).all()
        assert (r.got(0) == 5).all()

    def test_reads_that_nobody_wants_any_more_are_cancelled(self, rig):
        r = rig(2, [1, 1])
        r.order.note(0)
        r.cache._start_read(0, 0)
        entry, calls = r.cache._entries[0], []
        reading = entry.op

        def wait():
            calls.append("wait")
            reading.wait()

        entry.op = SimpleNamespace(cancel=lambda: calls.append("cancel"), wait=wait)
        r.cache.drop(0)
        assert calls == ["cancel", "wait"]
        assert not r.cache.holds(0)
        assert torch.equal(r.got(0), pattern(r.extents[0].nbytes, 0))

    def test_created_chunks_are_not_read(self, rig):
        r = rig(2, [1])
        r.cache.create(0)
        assert r.cache.is_dirty(0)
        r.tensor(0).fill_(6)
        r.cache.dirty(0)
        r.cache.write_back(0)
        r.cache.get(0)
        assert r.reads == []
        assert r.state(0) is SlotState.CLEAN
        assert (r.on_file(0) == 6).all()

    def test_a_chunk_on_its_way_to_the_file_can_be_read(self, rig):
        r = rig(1, [1])
        r.cache.create(0)
        r.tensor(0).fill_(7)
        r.cache.write_back(0)
        assert r.state(0) is SlotState.WRITING
        assert not r.cache.is_dirty(0)
        assert (r.got(0) == 7).all()
        assert r.reads == []

    def test_write_back_of_clean_chunks_does_nothing(self, rig):
        r = rig(1, [1])
        r.got(0)
        r.cache.write_back(0)
        assert r.writes == []
        assert r.state(0) is SlotState.CLEAN

    def test_a_dropped_chunk_is_read_anew(self, rig):
        r = rig(2, [1])
        r.got(0)
        r.put(0, torch.full((SLOT,), 8, dtype=UINT8))  # as the optimizer does
        r.cache.drop(0)
        r.cache.drop(0)
        assert not r.cache.holds(0)
        assert (r.got(0) == 8).all()

    def test_a_lease_keeps_the_old_bytes_of_a_dropped_chunk(self, rig):
        r = rig(2, [1])
        old = r.got(0)
        r.put(0, torch.full((SLOT,), 9, dtype=UINT8))
        r.cache.drop(0)
        new = r.got(0)
        assert torch.equal(old, pattern(SLOT, 0))
        assert (new == 9).all()

    def test_close_waits_and_forgets(self, rig):
        r = rig(2, [1, 1])
        r.engine.inject("read", 0, error=errno.EIO)
        r.order.note(0)
        r.order.end_step()
        r.cache.prefetch(1)
        r.cache.create(1)
        r.cache.write_back(1)
        r.cache.close()
        assert r.held() == set()


class TestRoom:
    def test_leased_slots_are_not_reused(self, rig):
        r = rig(2, [1, 1, 1])
        lease = r.got(0)
        for chunk in (1, 2, 1, 2):
            r.got(chunk)
            assert r.cache.holds(0)
        assert torch.equal(lease, pattern(SLOT, 0))

    def test_without_room_the_refusal_has_the_numbers(self, rig):
        r = rig(3, [1, 1, 1, 2])
        leases = [r.got(0), r.got(1)]
        with pytest.raises(BudgetError) as refusal:
            r.got(3)
        message = str(refusal.value)
        for fact in ("chunk 3", "2 consecutive slots of 8.0 KiB", "2 of 3", "by 16.0 KiB"):
            assert fact in message
        leases.clear()
        assert torch.equal(r.got(3), pattern(r.extents[3].nbytes, 3))

    def test_leases_that_only_cycles_hold_are_found(self, rig):
        r = rig(1, [1, 1])
        cycle: dict = {"lease": r.got(0)}
        cycle["self"] = cycle
        del cycle
        assert torch.equal(r.got(1), pattern(r.extents[1].nbytes, 1))

    def test_pinned_chunks_stay_until_they_are_dropped(self, rig):
        r = rig(1, [1, 1])
        r.got(0)
        r.cache.pin(0)
        with pytest.raises(BudgetError):
            r.got(1)
        r.cache.drop(0)
        r.got(1)

    def test_a_small_lease_inside_a_former_run_blocks_only_itself(self, rig):
        r = rig(4, [4, 1, 2])
        r.got(0)
        lease = r.got(1)  # in one of the slots that 0 had
        for _ in range(3):
            assert torch.equal(r.got(2), pattern(2 * SLOT, 2))
        assert torch.equal(lease, pattern(r.extents[1].nbytes, 1))
        with pytest.raises(BudgetError):
            r.got(0)

    def test_a_lease_on_a_run_holds_all_its_slots(self, rig):
        r = rig(4, [3, 1, 1])
        lease = r.got(0)
        r.cache.drop(0)  # no entry any more, only the lease
        first = r.got(1)
        with pytest.raises(BudgetError):
            r.got(2)
        assert torch.equal(lease, pattern(3 * SLOT, 0))
        assert torch.equal(first, pattern(r.extents[1].nbytes, 1))

    def test_single_slots_stay_out_of_the_way_of_runs(self, rig):
        r = rig(6, [1, 1, 3])
        leases = [r.got(0), r.got(1)]
        run = r.got(2)
        assert torch.equal(run, pattern(3 * SLOT, 2))
        assert run.data_ptr() == r.arena.address(0)
        assert len(leases) == 2

    def test_slots_are_charged_when_they_are_first_used(self, rig):
        r = rig(4, [1, 2])
        r.got(0)
        assert r.ledger.used(Tier.HOST, Account.GATHERED) == SLOT
        r.got(1)
        r.got(0)
        assert r.ledger.used(Tier.HOST, Account.GATHERED) == 3 * SLOT


class TestOrder:
    def test_three_chunks_cycle_through_two_slots_with_every_second_use_a_hit(self, rig):
        r = rig(2, [1, 1, 1])
        for _ in range(3):
            for chunk in (0, 1, 2):
                r.use(chunk)
            r.order.end_step()
        residents, hits = [], []
        for chunk in (0, 1, 2, 0, 1, 2):
            hits.append(r.cache.holds(chunk))
            r.use(chunk)
            residents.append(r.held())
            if chunk == 2:
                r.order.end_step()
        assert sorted(hits) == [False] * 3 + [True] * 3
        assert all(a == b for a, b in itertools.pairwise(hits[::2]))
        assert {frozenset(s) for s in residents} == {
            frozenset(pair) for pair in itertools.combinations(range(3), 2)
        }

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.integers(1, 3))
    def test_a_known_step_costs_as_few_reads_as_possible(self, step, slots):
        r = Rig(slots, [1] * 5)
        for chunk in step:
            r.use(chunk)
        r.order.end_step()
        residents = frozenset(r.held())
        r.reads.clear()
        for _ in range(2):
            for chunk in step:
                r.use(chunk)
            r.order.end_step()
        assert len(r.reads) == fewest_reads(step * 2, slots, residents)
        r.close()

    def test_a_run_displaces_the_window_whose_soonest_use_is_farthest(self, rig):
        r = rig(4, [1, 1, 1, 1, 2])
        for chunk in (4, 2, 1, 0, 3):
            r.order.note(chunk)
        r.order.end_step()
        for chunk in (0, 1, 2, 3):
            r.got(chunk)  # from the last slot to the first: 3, 2, 1, 0 lie side by side
        r.use(4)
        assert r.held() == {2, 3, 4}

    def test_prefetch_reads_everything_ahead_once_the_step_is_known(self, rig):
        r = rig(3, [1, 1, 1, 1, 1])
        late = []
        for turn in range(3):
            for chunk in range(5):
                if turn and not r.cache.holds(chunk):
                    late.append((turn, chunk))
                lease = r.use(chunk)
                r.cache.prefetch(4)
                assert torch.equal(lease, pattern(r.extents[chunk].nbytes, chunk))
                del lease
            r.order.end_step()
        assert late == [(1, 0)] or late == []

    def test_prefetch_does_not_displace_what_is_needed_sooner_or_is_not_clean(self, rig):
        r = rig(2, [1, 1, 1])
        for chunk in (0, 1, 2):
            r.order.note(chunk)
        r.order.end_step()
        r.got(0)
        r.got(1)
        r.cache.prefetch(3)
        assert r.held() == {0, 1}
        r.order.note(0)  # now 1 then 2 then 0: the slot of 0 may go
        r.cache.dirty(0)
        r.cache.prefetch(3)
        assert r.held() == {0, 1}
        r.cache.write_back(0)
        r.cache.prefetch(3)
        assert r.held() == {0, 1}
        r.cache.get(0)  # clean again
        r.cache.prefetch(3)
        assert r.held() == {1, 2}

    def test_prefetch_leaves_chunks_of_other_homes_alone(self, rig):
        r = rig(2, [1])
        r.order.note(77)
        r.order.note(0)
        r.order.end_step()
        r.cache.prefetch(2)
        assert r.held() == {0}


def fewest_reads(uses: list[int], slots: int, residents: frozenset[int]) -> int:
    """By trying every choice of what to give up."""
    costs = {residents: 0}
    for chunk in uses:
        after: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            if chunk in held:
                choices = [(held, cost)]
            elif len(held) < slots:
                choices = [(held | {chunk}, cost + 1)]
            else:
                choices = [((held - {victim}) | {chunk}, cost + 1) for victim in held]
            for now, total in choices:
                after[now] = min(total, after.get(now, total))
        costs = after
    return min(costs.values())


class TestFailures:
    def test_a_failed_read_is_raised_and_can_be_tried_again(self, rig):
        r = rig(1, [1])
        r.engine.inject("read", 0, error=errno.EIO)
        with pytest.raises(_native.NativeIoError) as failure:
            r.got(0)
        assert failure.value.errno == errno.EIO
        assert not r.cache.holds(0)
        assert torch.equal(r.got(0), pattern(SLOT, 0))

    def test_a_failed_prefetch_is_raised_where_the_chunk_is_needed(self, rig):
        r = rig(1, [1])
        r.order.note(0)
        r.order.end_step()
        r.engine.inject("read", 0, error=errno.EIO)
        r.cache.prefetch(1)
        with pytest.raises(_native.NativeIoError):
            r.got(0)
        assert torch.equal(r.got(0), pattern(SLOT, 0))

    def test_a_failed_prefetch_does_not_fail_what_takes_its_slots(self, rig):
        r = rig(1, [1, 1])
        r.fail_prefetch(0)
        assert torch.equal(r.got(1), pattern(r.extents[1].nbytes, 1))

    def test_a_failed_prefetch_does_not_fail_drop_or_create(self, rig):
        r = rig(1, [1])
        for call in (r.cache.drop, r.cache.create):
            r.fail_prefetch(0)
            call(0)
            r.cache.drop(0)

    def test_a_failed_write_keeps_the_bytes(self, rig):
        r = rig(1, [1, 1])
        r.cache.create(0)
        r.tensor(0).fill_(5)
        r.engine.inject("write", 0, error=errno.ENOSPC)
        with pytest.raises(_native.NativeIoError) as failure:
            r.got(1)
        assert failure.value.errno == errno.ENOSPC
        assert r.cache.is_dirty(0)
        assert not r.cache.holds(1)
        assert (r.tensor(0) == 5).all()
        assert torch.equal(r.got(1), pattern(r.extents[1].nbytes, 1))
        assert (r.got(0) == 5).all()

    @pytest.mark.parametrize("hook", ["before_read", "before_write"])
    def test_a_hook_that_raises_changes_nothing(self, rig, hook):
        r = rig(1, [1, 1])
        r.cache.create(0)
        r.tensor(0).fill_(5)

        def fail(chunk):
            raise OSError("the optimizer's write failed")

        setattr(r.cache, hook, fail)
        with pytest.raises(OSError, match="optimizer's write"):
            r.got(1)
        setattr(r.cache, hook, lambda chunk: None)
        assert not r.cache.holds(1)
        assert (r.got(0) == 5).all()
        assert torch.equal(r.got(1), pattern(r.extents[1].nbytes, 1))

    def test_short_transfers_are_completed(self, rig):
        r = rig(1, [1, 1])
        r.engine.inject("read", 0, short_bytes=PAGE)
        r.engine.inject("write", 0, short_bytes=PAGE)
        r.got(0)
        r.cache.dirty(0)
        r.tensor(0).fill_(4)
        r.got(1)
        assert (r.got(0) == 4).all()
        assert r.engine.stats["short_transfers"] == 2


SLOTS = 6
RUNS = [1, 1, 1, 1, 1, 2, 2, 3, 4]
MOST_LEASES = 4
chunks = st.integers(0, len(RUNS) - 1)


class CacheMachine(RuleBasedStateMachine):
    """Random use, against a dict of what each chunk's bytes must be."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(SLOTS, RUNS)
        self.cache = self.rig.cache
        self.rig.cache.before_write = self.before_write
        # Collecting takes as long as all else together; one test above is about it.
        cache_module.gc = SimpleNamespace(collect=lambda: 0)
        # The truth per chunk, in the file and now; None: it cannot be known.
        self.on_file = {c: self.rig.on_file(c) for c in self.rig.extents}
        self.now = dict(self.on_file)
        self.unwritten: set[int] = set()
        self.leases: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.pinned: set[int] = set()
        self.faults = 0
        self.version = 1000

    def teardown(self) -> None:
        import gc

        cache_module.gc = gc
        self.leases.clear()
        self.rig.close()

    def before_write(self, chunk: int) -> None:
        self.on_file[chunk] = self.now[chunk]
        self.unwritten.discard(chunk)

    # What is about to be asked for, and what may come of it.

    def has_room(self, chunk: int) -> bool:
        blocked = [False] * SLOTS
        held = [(self.rig.arena.slot_of(lease.data_ptr()), c) for c, lease, _ in self.leases]
        held += [(self.rig.arena.slot_of(self.cache.address(c)), c) for c in self.pinned]
        for first, c in held:
            blocked[first : first + RUNS[c]] = [True] * RUNS[c]
        run = RUNS[chunk]
        return any(not any(blocked[s : s + run]) for s in range(SLOTS - run + 1))

    @contextlib.contextmanager
    def asked(self, chunk: int | None = None):
        """Lets injected faults surface, each once, and BudgetError where there is no room."""
        no_room = chunk is not None and not self.cache.holds(chunk) and not self.has_room(chunk)
        try:
            yield
        except _native.NativeIoError as error:
            self.surfaced(error)
        except BudgetError:
            assert no_room, "there was a window that nothing leases"
        else:
            assert not no_room, "found room where there is none"

    def surfaced(self, failure: _native.NativeIoError) -> None:
        assert failure.errno == errno.EIO
        assert self.faults > 0, "a transfer failed for no reason"
        self.faults -= 1
        self.pinned &= self.rig.held()  # a failed read leaves nothing to pin
        assert failure.op == "read" or any(map(self.write_failed, self.rig.held()))

    def write_failed(self, chunk: int) -> bool:
        """It is dirty although it was not changed since its last write began."""
        return self.cache.is_dirty(chunk) and chunk not in self.unwritten

    def check(self, chunk: int, content: torch.Tensor) -> None:
        if self.now[chunk] is None:
            self.now[chunk] = self.on_file[chunk] = content.clone()
        assert torch.equal(content, self.now[chunk])

    def fill(self, chunk: int, lease: torch.Tensor) -> None:
        self.version += 1
        content = pattern(len(lease), self.version)
        lease.copy_(content)
        self.now[chunk] = content
        self.unwritten.add(chunk)
        self.leases = [
            (c, t, content if t.data_ptr() == lease.data_ptr() else kept)
            for c, t, kept in self.leases
        ]

    def keep(self, chunk: int, lease: torch.Tensor) -> None:
        if len(self.leases) < MOST_LEASES:
            self.leases.append((chunk, lease, lease.clone()))

    @rule(chunk=chunks, keep=st.booleans())
    def use(self, chunk, keep):
        with self.asked(chunk):
            lease = self.rig.use(chunk)
            self.check(chunk, lease)
            if keep:
                self.keep(chunk, lease)

    @rule(chunk=chunks, keep=st.booleans())
    def change(self, chunk, keep):
        with self.asked(chunk):
            lease = self.rig.use(chunk)
            self.check(chunk, lease)
            self.cache.dirty(chunk)
            self.fill(chunk, lease)
            if keep:
                self.keep(chunk, lease)

    @rule(chunk=chunks, keep=st.booleans())
    def make(self, chunk, keep):
        with self.asked(chunk):
            self.cache.create(chunk)
            lease = self.rig.tensor(chunk)
            # Settled by create(), so that this cannot fail between the bytes and their mark.
            self.cache.dirty(chunk)
            self.fill(chunk, lease)
            if keep:
                self.keep(chunk, lease)

    @rule(chunk=chunks)
    def write_back(self, chunk):
        if self.cache.holds(chunk):
            with self.asked():
                self.cache.write_back(chunk)

    @rule(chunk=chunks)
    def drop(self, chunk):
        with self.asked():
            if self.write_failed(chunk):
                self.on_file[chunk] = None
            self.cache.drop(chunk)
            self.pinned.discard(chunk)
            self.unwritten.discard(chunk)
            self.now[chunk] = self.on_file[chunk]

    @rule(depth=st.integers(0, 6))
    def prefetch(self, depth):
        before = {c: self.rig.state(c) for c in self.rig.held()}
        self.cache.prefetch(depth)
        after = self.rig.held()
        given_up, begun = before.keys() - after, after - before.keys()
        assert begun <= set(self.rig.order.upcoming(depth))
        assert all(self.rig.state(c) is SlotState.READING for c in begun)
        next_use = self.rig.order.next_use
        for chunk in given_up:
            assert before[chunk] is SlotState.CLEAN
            assert next_use(chunk) > min(map(next_use, begun))

    @rule(which=st.integers(0, MOST_LEASES - 1))
    def release(self, which):
        del self.leases[which : which + 1]

    @rule(chunk=chunks)
    def pin(self, chunk):
        if self.cache.holds(chunk) and not self.pinned:
            self.cache.pin(chunk)
            self.pinned.add(chunk)

    @rule()
    def end_step(self):
        self.rig.order.end_step()

    @rule(op=st.sampled_from(["read", "write"]), nth=st.integers(0, 2))
    def break_a_transfer(self, op, nth):
        if self.faults < 2:
            self.rig.engine.inject(op, nth, error=errno.EIO)
            self.faults += 1

    @invariant()
    def held_bytes_are_right(self):
        for _, lease, kept in self.leases:
            assert torch.equal(lease, kept)

    @invariant()
    def entries_are_legal(self):
        slots: list[int] = []
        for chunk, entry in self.cache._entries.items():
            moving = entry.state in (SlotState.READING, SlotState.WRITING)
            assert moving == (entry.op is not None)
            slots += range(entry.slot, entry.slot + RUNS[chunk])
        assert len(slots) == len(set(slots))
        assert all(0 <= slot < SLOTS for slot in slots)
        assert self.pinned <= self.rig.held()

    @invariant()
    def unwritten_bytes_are_still_held(self):
        assert all(self.cache.is_dirty(chunk) for chunk in self.unwritten)

    @invariant()
    def the_budget_holds(self):
        assert self.rig.ledger.peak_bytes["host"] <= SLOTS * SLOT


CacheMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRandomUse = CacheMachine.TestCase
