"""offload/cache: what test_slot_cache_model.py, where no byte is ever wrong or lost, cannot see."""

import errno
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import _native
from offload.errors import BudgetError
from offload.memory.tiers import Account, Tier
from tests.support.native.cache_rig import SLOT, Rig, pattern


class TestReadsAndWrites:
    def test_reads_that_nobody_wants_any_more_are_cancelled(self, rig):
        r = rig(2, [1, 1])
        r.order.note(0)
        r.cache.begin(0, must=True)
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

    @pytest.mark.parametrize("wait", ["get", "drop", "create", "finish_transfers"])
    def test_reads_that_are_started_in_a_wait_do_not_take_the_awaited_slots(self, rig, wait):
        """A rank that waits for others starts what they wait for. It took the slots of the chunk
        that it waited for, and so waited for it inside the wait for it, on a lock that it held."""
        r = rig(2, [1, 1, 1])
        r.order.note(0)
        r.cache.begin(0, must=True)
        reading, waits = r.cache._entries[0].op, []

        def waited():
            waits.append(0)
            assert len(waits) == 1, "waited for inside the wait for it"
            for other in (1, 2):
                if not r.cache.holds(other) and not r.cache.is_making_room:
                    r.cache.begin(other, must=True)
            reading.wait()

        r.cache._entries[0].op = SimpleNamespace(cancel=lambda: None, wait=waited)
        if wait == "finish_transfers":
            r.cache.finish_transfers()
        else:
            getattr(r.cache, wait)(0)
        assert waits == [0]
        assert r.cache.holds(0) is (wait != "drop")
        assert not r.cache.holds(0) or not r.cache.is_locked(0)

    def test_a_chunk_on_its_way_to_the_file_changes_when_it_is_there(self, rig):
        r = rig(1, [1])
        r.cache.create(0)
        r.tensor(0).fill_(7)
        r.cache.write_back(0)
        r.cache.dirty(0)
        r.got(0).fill_(8)
        assert r.is_dirty(0)
        r.cache.clear()
        assert (r.on_file(0) == 8).all()


class TestRoom:
    def test_without_room_the_refusal_has_the_numbers(self, rig):
        r = rig(3, [1, 1, 1, 2, 1])
        pins = [r.got(0), r.got(1)]
        with pytest.raises(BudgetError) as refusal:
            r.got(3)
        message = str(refusal.value)
        for fact in ("chunk 3", "2 consecutive slots of 8.0 KiB", "2 of 3", "by at least 16.0 KiB"):
            assert fact in message
        assert "for all chunks at once by 24.0 KiB" in message
        pins.clear()
        assert torch.equal(r.got(3), pattern(r.extents[3].nbytes, 3))

    def test_leases_that_only_cycles_hold_are_found(self, rig):
        r = rig(1, [1, 1])
        cycle: dict = {"pin": r.got(0)}
        cycle["self"] = cycle
        del cycle
        assert torch.equal(r.got(1), pattern(r.extents[1].nbytes, 1))

    def test_a_locked_chunk_that_is_made_anew_while_it_is_read_stays_locked(self, rig):
        r = rig(2, [1, 2])
        assert r.cache.start(0) is not None
        r.cache.lock(0)
        r.cache.create(0)
        r.cache.dirty(0)
        r.tensor(0).fill_(5)
        with pytest.raises(BudgetError):
            r.got(1)
        assert (r.tensor(0) == 5).all()

    def test_read_ahead_takes_no_slots_that_are_not_written_yet(self, rig):
        r = rig(2, [1, 1, 1])
        for chunk in (1, 2, 0):
            r.use(chunk)
        r.order.end_step()
        pin = r.use(1)
        r.got(0)
        r.cache.dirty(0)
        r.cache.prefetch(1)
        assert r.held() == {0, 1}
        assert r.is_dirty(0)
        assert r.writes == []
        del pin

    def test_a_use_of_what_is_held_moves_its_next_use(self, rig):
        """After its second use chunk 0 is needed in the next step, and chunk 1 in this one."""
        r = rig(2, [1, 1, 1, 1])
        for chunk in (3, 0, 1, 0, 2, 1):
            r.use(chunk)
        r.order.end_step()
        r.cache.clear()
        for chunk in (3, 0, 1, 0, 2):
            r.use(chunk)
        assert r.held() == {1, 2}

    def test_slots_are_charged_when_they_are_first_used(self, rig):
        r = rig(4, [1, 2])
        r.got(0)
        assert r.ledger.used(Tier.HOST, Account.GATHERED) == SLOT
        r.got(1)
        r.got(0)
        assert r.ledger.used(Tier.HOST, Account.GATHERED) == 3 * SLOT

    def test_a_refusal_leaves_the_soft_limit_where_it_was(self, rig):
        """The slots past it are taken while RAM is free, and now something else has it."""
        r = rig(3, [1, 1, 2, 1])
        r.cache.refit(2)
        r.arena.commit(0, 2)
        pins = [r.got(0), r.got(1)]
        with pytest.raises(BudgetError):
            r.got(2)
        pins.clear()
        r.ledger.charge(Tier.HOST, Account.BUCKET, SLOT)
        assert torch.equal(r.got(3), pattern(r.extents[3].nbytes, 3))
        r.ledger.release(Tier.HOST, Account.BUCKET, SLOT)


class TestFailures:
    def test_a_failed_write_keeps_the_bytes(self, rig):
        r = rig(1, [1, 1])
        r.cache.create(0)
        r.tensor(0).fill_(5)
        r.engine.inject("write", 0, error=errno.ENOSPC)
        with pytest.raises(_native.NativeIoError) as failure:
            r.got(1)
        assert failure.value.errno == errno.ENOSPC
        assert r.is_dirty(0)
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

        setattr(r, hook, fail)
        with pytest.raises(OSError, match="optimizer's write"):
            r.got(1)
        setattr(r, hook, lambda chunk: None)
        assert not r.cache.holds(1)
        assert (r.got(0) == 5).all()
        assert torch.equal(r.got(1), pattern(r.extents[1].nbytes, 1))


class TestOrder:
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

    def test_prefetch_reads_everything_ahead_once_the_step_is_known(self, rig):
        r = rig(3, [1, 1, 1, 1, 1])
        late = []
        for turn in range(3):
            for chunk in range(5):
                if turn and not r.cache.holds(chunk):
                    late.append((turn, chunk))
                pin = r.use(chunk)
                r.cache.prefetch(4)
                assert torch.equal(pin, pattern(r.extents[chunk].nbytes, chunk))
                del pin
            r.order.end_step()
        assert late == [(1, 0)] or late == []

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
